"""What moves bytes between ranks, and who of them is there."""

from gradwire.collectives.link.base import Message, Pending, Request, Transport, Whole
from gradwire.collectives.link.membership import Membership

__all__ = ["Membership", "Message", "Pending", "Request", "Transport", "Whole"]
