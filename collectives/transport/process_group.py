"""Messages over torch.distributed's point-to-point operations: gloo for CPU tensors, NCCL for CUDA tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from collectives.errors import LinkError
from collectives.transport.base import Message, Pending

#: A tag that no operation uses (theirs have 31 bits), for a receive that nobody answers.
_ABORT_TAG = 2**31 - 1
_ABORT_WAIT = timedelta(milliseconds=1)
_POLL_S = 0.0005

#: gloo counts whole milliseconds, so its timeout may end a wait a little before the deadline.
_ROUNDING_S = 0.005


class _GlooPending:
    """gloo's wait takes a timeout of its own; when it passes, gloo breaks all connections of the group."""

    __slots__ = ("_peer", "_tensor", "_work")

    def __init__(self, work: dist.Work, peer: int | None, tensor: torch.Tensor | None) -> None:
        self._work = work
        self._peer = peer
        self._tensor = tensor  # the backend reads or writes it until the wait is over

    def wait(self, deadline: float) -> None:
        left = max(0.001, deadline - time.monotonic())
        try:
            self._work.wait(timedelta(seconds=left))
        except RuntimeError as error:
            raise LinkError(
                self._peer, timed_out=time.monotonic() >= deadline - _ROUNDING_S, detail=str(error)
            ) from error


class _StreamPending:
    """NCCL's wait only orders streams, so the deadline is kept by polling."""

    __slots__ = ("_peer", "_work")

    def __init__(self, work: dist.Work, peer: int | None) -> None:
        self._work = work
        self._peer = peer

    def wait(self, deadline: float) -> None:
        while not self._work.is_completed():
            if time.monotonic() >= deadline:
                raise LinkError(self._peer, timed_out=True, detail="no completion from NCCL")
            time.sleep(_POLL_S)
        try:
            self._work.wait()
        except RuntimeError as error:
            raise LinkError(self._peer, timed_out=False, detail=str(error)) from error


class ProcessGroupTransport:
    """A Transport over a process group that nothing else uses."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()

    def post(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int
    ) -> tuple[list[Pending], list[Pending]]:
        """See Transport. All messages of a call are on the same kind of device."""
        if (receives or sends) and (receives or sends)[0][1].is_cuda:
            return self._post_nccl(sends, receives)
        group = self.group
        peer = None
        try:
            received: list[Pending] = []
            for peer, tensor in receives:
                received.append(_GlooPending(group.recv([tensor], peer, tag), peer, tensor))
            sent: list[Pending] = []
            for peer, tensor in sends:
                sent.append(_GlooPending(group.send([tensor], peer, tag), peer, tensor))
        except RuntimeError as error:
            raise LinkError(peer, timed_out=False, detail=str(error)) from error
        return sent, received

    def _post_nccl(self, sends: Sequence[Message], receives: Sequence[Message]) -> tuple[list[Pending], list[Pending]]:
        """NCCL deadlocks when sends and receives of a round are not launched as one group."""
        operations = [
            dist.P2POp(operation, tensor, dist.get_global_rank(self.group, peer), self.group)
            for operation, messages in ((dist.isend, sends), (dist.irecv, receives))
            for peer, tensor in messages
        ]
        return [], [_StreamPending(work, None) for work in dist.batch_isend_irecv(operations)]

    def native(self, call: Callable[[], dist.Work | None], *, is_cuda: bool, deadline: float) -> None:
        """Run one of torch.distributed's own collectives, made by `call` with async_op=True, under the deadline."""
        try:
            work = call()
        except RuntimeError as error:
            raise LinkError(None, timed_out=False, detail=str(error)) from error
        if work is not None:
            (_StreamPending(work, None) if is_cuda else _GlooPending(work, None, None)).wait(deadline)

    def lost_peers(self) -> set[int]:
        """gloo refuses at once to post to a peer whose connection is gone."""
        lost = set()
        for peer in self._gloo_peers():
            try:
                self.group.recv([torch.empty(1, dtype=torch.uint8)], peer, _ABORT_TAG)
            except RuntimeError:
                lost.add(peer)
        return lost

    def abort(self) -> None:
        """A receive that times out makes gloo close every connection of the group, which the peers see at once."""
        for peer in self._gloo_peers():
            try:
                self.group.recv([torch.empty(1, dtype=torch.uint8)], peer, _ABORT_TAG).wait(_ABORT_WAIT)
            except RuntimeError:
                continue
        if not self._gloo_peers():
            self.group.abort()

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group(self.group)

    def _gloo_peers(self) -> list[int]:
        has_gloo = torch.device("cpu") in self.group._device_types
        return [peer for peer in range(self.size) if peer != self.rank] if has_gloo else []
