"""What a transport is: a way to move spans of 1-D tensors between ranks. Small on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

#: One of torch.distributed's C++ backends, whose methods torch's type stubs leave out.
Backend = Any

#: One message: the other rank, and the contiguous 1-D tensor that is sent or filled.
Message = tuple[int, torch.Tensor]


class Pending(Protocol):
    """A message on its way."""

    def wait(self, deadline: float) -> None:
        """Return when the tensor is free (sent) or filled (received). deadline: time.monotonic() seconds.

        Raises LinkError when the connection breaks or the deadline passes.
        """


class Transport(Protocol):
    """Connects the ranks of one Communicator.

    Messages from one rank to another with one tag arrive in the order sent; a tag that the other end does not use is never
    taken for one that it does.
    """

    rank: int
    size: int

    def post(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int
    ) -> tuple[list[Pending], list[Pending]]:
        """Start all messages of one round; return one Pending for each send and each receive. Raises LinkError when a peer is
        known to be gone."""

    def abort(self) -> None:
        """Break every connection now, so that all waits, here and at the peers, end with a LinkError. Never blocks."""

    def close(self) -> None:
        """Give the resources back. Never blocks."""
