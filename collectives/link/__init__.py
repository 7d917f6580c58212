"""The links, which move bytes between ranks, and the membership of ranks."""

from gradwire.collectives.link.base import Message, Pending, Request, Transport, Whole
from gradwire.collectives.link.membership import Membership

__all__ = ["Membership", "Message", "Pending", "Request", "Transport", "Whole"]
