"""Several transports as one: shared memory for CPU tensors inside a host, TCP or the process group for those between hosts,
the process group for everything else."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from gradwire.collectives.errors import LinkError, ranks_text
from gradwire.collectives.link.base import Message, Pending, Request, Transport, Whole, WholeRun
from gradwire.collectives.link.process_group import ProcessGroupTransport
from gradwire.collectives.link.shared_memory.messages import SharedMemoryTransport
from gradwire.collectives.plan.program import Program

_POLL_S = 0.0001

#: How long what is to be received through one part may stand still while another one is waited for.
_SLICE_S = 0.05

#: How long a look for a message from any other host takes, before it is looked for in memory again.
_LOOK_S = 0.001


class _SharedPending:
    """A message through one part, during whose wait what is under way through the other part moves on.

    Nobody but this rank moves that, and the peer may depend on it before it answers: on what is sent, as a rule, so that moves
    at once; what is to be received, now and then.
    """

    __slots__ = ("_other", "_part", "_pending")

    def __init__(self, pending: Pending, part: Transport, other: Transport) -> None:
        self._pending = pending
        self._part = part
        self._other = other

    def wait(self, deadline: float) -> None:
        while self._other.is_busy() and time.monotonic() < deadline:
            if self._other.sends():
                if self.is_done():
                    break
                time.sleep(_POLL_S)
            elif self._part.waits_again:
                try:
                    self._pending.wait(min(deadline, time.monotonic() + _SLICE_S))
                    return
                except LinkError as error:
                    if not error.timed_out:
                        raise
                self._other.nudge()
            else:
                break
        self._pending.wait(deadline)

    def is_done(self) -> bool:
        self._other.nudge()
        return self._pending.is_done()


class RoutingTransport(Transport):
    """A Transport made of others. group: for CUDA tensors where it carries them, and for whole verbs. near: for CPU tensors to
    `neighbours`, the ranks that it reaches, this one among them. far: for all other messages; it may be `group`. some_share:
    whether any ranks, perhaps others, share memory."""

    def __init__(
        self,
        group: ProcessGroupTransport,
        far: Transport,
        near: SharedMemoryTransport | None,
        neighbours: Sequence[int],
        *,
        some_share: bool = False,
    ) -> None:
        self.rank = group.rank
        self.size = group.size
        self.device_types = group.device_types
        self.posts_together = group.posts_together
        self.quick = far.quick
        self.eager = far.eager
        self.hears_anyone = far.hears_anyone or len(neighbours) == group.size
        self.algorithms = group.algorithms
        if near is not None:
            self.shares_memory = True
            self.preferred, self.share_alignment_bytes = near.preferred, near.share_alignment_bytes
            self.algorithms = {
                verb: (*near.algorithms.get(verb, ()), *names) for verb, names in group.algorithms.items()
            }
        self.routes = _routes(group, far, set(neighbours) - {group.rank})
        self._group = group
        self._far = far
        self._near = near
        self._neighbours = frozenset(neighbours)
        self._some_share = some_share
        self._near_was_heard = False

    @property
    def _parts(self) -> list[Transport]:
        return [part for part in (self._near, self._far, self._group) if part is not None]

    def post(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int
    ) -> tuple[list[Pending], list[Pending]]:
        """See Transport. All messages of a call are on the same kind of device."""
        if not sends and not receives:
            return [], []
        if (receives or sends)[0][1].is_cuda:
            return self._group.post(sends, receives, tag)
        if self._near is None:
            return self._far.post(sends, receives, tag)
        near_sends, far_sends = self._divide(sends)
        near_receives, far_receives = self._divide(receives)
        far_sent, far_received = self._far.post([sends[i] for i in far_sends], [receives[i] for i in far_receives], tag)
        near_sent, near_received = self._near.post(
            [sends[i] for i in near_sends], [receives[i] for i in near_receives], tag
        )
        return (
            self._merge(near_sends, near_sent, far_sends, far_sent),
            self._merge(near_receives, near_received, far_receives, far_received),
        )

    def next_sender(self, tag: int, deadline: float) -> int | None:
        """See Transport."""
        if self._near is None:
            return self._far.next_sender(tag, deadline)
        if len(self._neighbours) == self.size:
            return self._near.next_sender(tag, deadline)
        while True:
            now = time.monotonic()
            looks = [(self._near, now), (self._far, min(deadline, now + _LOOK_S))]
            for part, until in reversed(looks) if self._near_was_heard else looks:
                if (sender := part.next_sender(tag, until)) is not None:
                    self._near_was_heard = part is self._near
                    return sender
            if now >= deadline:
                return None

    def is_busy(self) -> bool:
        """See Transport."""
        return any(part.is_busy() for part in self._parts)

    def nudge(self) -> None:
        """See Transport."""
        for part in self._parts:
            part.nudge()

    def collective(self, request: Request) -> Whole:
        """See Transport."""
        near = self._near
        if near is not None and request.algorithm in near.algorithms.get(request.verb, near.share_alignment_bytes):
            return near.collective(request)
        return self._group.collective(request)

    def follow(self, program: Program, dtype: torch.dtype, op: str) -> WholeRun | None:
        """See Transport. Where messages go both ways, each must be seen to. Ranks that reduce the same numbers must all use the
        same loop: which of two zeros is the least depends on it, and which bits stand for no number."""
        if self._neighbours & program.peers or (self._some_share and program.scratch):
            return None
        return self._far.follow(program, dtype, op)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See Transport."""
        return (self._near or self._far).empty(shape, dtype)

    def wait_beside_work(self, beside_work: bool) -> None:
        """See Transport."""
        for part in self._parts:
            part.wait_beside_work(beside_work)

    def abort(self) -> None:
        for part in self._parts:
            part.abort()

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def disown(self) -> None:
        for part in self._parts:
            part.disown()

    def _divide(self, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
        """The places of those that stay on the host, and of the others."""
        near = [i for i, (peer, _) in enumerate(messages) if peer in self._neighbours]
        return near, [i for i, (peer, _) in enumerate(messages) if peer not in self._neighbours]

    def _merge(
        self, near_places: list[int], near: list[Pending], far_places: list[int], far: list[Pending]
    ) -> list[Pending]:
        assert self._near is not None
        merged: dict[int, Pending] = {}
        parts = ((near_places, near, self._near, self._far), (far_places, far, self._far, self._near))
        for places, pendings, part, other in parts:
            merged |= zip(places, (_SharedPending(pending, part, other) for pending in pendings), strict=True)
        return [merged[place] for place in sorted(merged)]


def _routes(group: ProcessGroupTransport, far: Transport, neighbours: set[int]) -> tuple[str, ...]:
    """Return the lines for people."""
    others = set(range(group.size)) - neighbours - {group.rank}
    lines = [f"{ranks_text(neighbours)}: shared memory, on the same host"] if neighbours else []
    if others:
        (how,) = {line.partition(": ")[2] for line in far.routes if "CUDA" not in line}
        lines.append(f"{ranks_text(others)}: {how}")
    return (*lines, *(line for line in group.routes if "CUDA" in line))
