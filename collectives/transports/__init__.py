"""The links, which move bytes between ranks, and the membership of ranks."""

from gradwire.collectives.control.membership import Membership
from gradwire.collectives.transports.base import Message, Pending, Request, Transport, Whole

__all__ = ["Membership", "Message", "Pending", "Request", "Transport", "Whole"]
