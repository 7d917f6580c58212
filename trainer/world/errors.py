"""Errors of a verb's caller that Horovod's programs catch as HorovodInternalError."""

from __future__ import annotations

from gradwire.collectives import CollectiveError, Communicator


class Refused(CollectiveError, ValueError):
    """Tells that a verb cannot do what it was given: its arguments, or how they fit those of other ranks. No data has moved, and
    the Communicator goes on."""


class NotIncluded(Refused):
    """Tells that a verb was called with a process set that this rank is not in."""


def refused(communicator: Communicator, verb: str, message: str) -> Refused:
    """Return the error of a verb that cannot do what it was given."""
    return Refused(message, rank=communicator.rank, operation=verb)
