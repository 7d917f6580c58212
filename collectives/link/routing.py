"""Two transports as one: shared memory for CPU tensors between ranks of a host, the process group for everything else."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import wait

import torch

from collectives.daemon import DaemonThread
from collectives.link.base import Message, Pending, Request, Transport, Whole
from collectives.link.process_group import ProcessGroupTransport
from collectives.link.shared_memory.messages import SharedMemoryTransport

_POLL_S = 0.0005


class _RemotePending:
    """A message of the process group, during whose wait the messages in shared memory move on.

    The backend moves its messages by threads of its own; nobody but this rank moves those that it sends through shared
    memory, and the peer may depend on them before it answers.
    """

    __slots__ = ("_pending", "_routing")

    def __init__(self, routing: RoutingTransport, pending: Pending) -> None:
        self._routing = routing
        self._pending = pending

    def wait(self, deadline: float) -> None:
        self._routing.wait_for_remote(self._pending, deadline)


class RoutingTransport(Transport):
    """A Transport made of two. neighbours: the ranks that `local` reaches."""

    def __init__(self, local: SharedMemoryTransport, remote: ProcessGroupTransport, neighbours: Sequence[int]) -> None:
        self.rank = remote.rank
        self.size = remote.size
        self.device_types = remote.device_types
        self.posts_together = remote.posts_together
        self.shares_memory = True
        self.algorithms = {verb: (*local.algorithms.get(verb, ()), *names) for verb, names in remote.algorithms.items()}
        self.preferred = local.preferred
        self._local = local
        self._remote = remote
        self._neighbours = frozenset(neighbours)
        self._waiter: DaemonThread | None = None

    def post(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int
    ) -> tuple[list[Pending], list[Pending]]:
        """See Transport. All messages of a call are on the same kind of device."""
        if not sends and not receives:
            return [], []
        if (receives or sends)[0][1].is_cuda:
            return self._remote.post(sends, receives, tag)
        near_sends, far_sends = self._divide(sends)
        near_receives, far_receives = self._divide(receives)
        far_sent, far_received = self._remote.post(
            [sends[i] for i in far_sends], [receives[i] for i in far_receives], tag
        )
        near_sent, near_received = self._local.post(
            [sends[i] for i in near_sends], [receives[i] for i in near_receives], tag
        )
        return (
            self._merge(near_sends, near_sent, far_sends, far_sent),
            self._merge(near_receives, near_received, far_receives, far_received),
        )

    def wait_for_remote(self, pending: Pending, deadline: float) -> None:
        """Wait for a message of the process group, in another thread while this rank has messages to send in memory."""
        if not self._local.sends():
            pending.wait(deadline)
            return
        if self._waiter is None:
            self._waiter = DaemonThread("gradwire-remote")
        future = self._waiter.submit(lambda: pending.wait(deadline))
        while not future.done() and self._local.sends():
            self._local.nudge()
            wait([future], _POLL_S)
        future.result()

    def collective(self, request: Request) -> Whole:
        """See Transport."""
        is_local = request.algorithm in self._local.algorithms.get(request.verb, ())
        return (self._local if is_local else self._remote).collective(request)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See Transport."""
        return self._local.empty(shape, dtype)

    def wait_beside_work(self, beside_work: bool) -> None:
        """See Transport."""
        self._local.wait_beside_work(beside_work)

    def abort(self) -> None:
        self._local.abort()
        self._remote.abort()

    def close(self) -> None:
        self._local.close()
        self._remote.close()
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.close()

    def _divide(self, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
        """The places of those that stay on the host, and of the others."""
        near = [i for i, (peer, _) in enumerate(messages) if peer in self._neighbours]
        return near, [i for i, (peer, _) in enumerate(messages) if peer not in self._neighbours]

    def _merge(
        self, near_places: list[int], near: list[Pending], far_places: list[int], far: list[Pending]
    ) -> list[Pending]:
        merged = dict(zip(near_places, near, strict=True))
        merged |= zip(far_places, (_RemotePending(self, pending) for pending in far), strict=True)
        return [merged[place] for place in sorted(merged)]
