"""The data plane: transports move tensors between ranks."""

from gradwire.collectives.control.membership import Membership
from gradwire.collectives.transports.base import Capabilities, Message, Operation, Pending, Run, Transport

__all__ = ["Capabilities", "Membership", "Message", "Operation", "Pending", "Run", "Transport"]
