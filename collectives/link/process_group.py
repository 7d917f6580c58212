"""Messages over the point-to-point operations of torch.distributed's backends: gloo for CPU tensors, NCCL for CUDA tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from gradwire.collectives import torch_internals
from gradwire.collectives.daemon import DaemonThread
from gradwire.collectives.errors import LinkError
from gradwire.collectives.link import native
from gradwire.collectives.link.base import KIND_BITS, Message, Pending, Request, Transport, Whole
from gradwire.collectives.link.membership import Membership
from gradwire.collectives.torch_internals import Backend

#: A tag that no operation uses, for a receive that nobody answers.
_ABORT_TAG = 2**31 - 1
_ABORT_WAIT = timedelta(milliseconds=1)
_POLL_S = 0.0005

#: gloo counts whole milliseconds, so its timeout may end a wait a little before the deadline.
_ROUNDING_S = 0.005


def process_group(membership: Membership, timeout_s: float) -> ProcessGroupTransport:
    """Build backends of our own for the members, so that nothing meets the user's traffic.

    Raises RuntimeError or LinkError when they do not come together within timeout_s seconds.
    """
    rank, size, timeout = membership.rank, membership.size, timedelta(seconds=timeout_s)
    backends: dict[str, Backend] = {}
    if "cpu" in membership.device_types:
        gloo_store = PrefixStore("gloo", membership.store)
        with membership.asking(time.monotonic() + timeout_s) as asking:
            gloo = asking.ask(lambda: dist.ProcessGroupGloo(gloo_store, rank, size, timeout))
            backends["cpu"] = torch_internals.left_to_parent(gloo)
    if "cuda" in membership.device_types:
        store = PrefixStore("nccl", membership.store)
        backends["cuda"] = torch_internals.nccl_backend(store, rank, size, timeout)
    return ProcessGroupTransport(backends)


def _reason(error: RuntimeError) -> str:
    """The first sentence of a backend's message, without the place in its source."""
    return str(error).rpartition("] ")[2].partition(". ")[0].strip()


class _GlooPending:
    """gloo's wait takes a timeout of its own; when it passes, gloo breaks all connections of the group."""

    __slots__ = ("_peer", "_tensor", "_waiting", "_work")

    def __init__(self, work: dist.Work, peer: int | None, tensor: torch.Tensor | None) -> None:
        self._work = work
        self._peer = peer
        self._tensor = tensor  # the backend reads or writes it until the wait is over
        self._waiting: Future[bool] | None = None

    def wait(self, deadline: float) -> None:
        left = max(0.001, deadline - time.monotonic())
        try:
            if self._waiting is not None:
                self._waiting.result(left)
            else:
                self._work.wait(timedelta(seconds=left))
        except FutureTimeout:
            raise LinkError(self._peer, timed_out=True, detail=f"nothing came from rank {self._peer}") from None
        except RuntimeError as error:
            timed_out = time.monotonic() >= deadline - _ROUNDING_S
            raise LinkError(self._peer, timed_out=timed_out, detail=_reason(error)) from None

    def is_done(self) -> bool:
        if self._waiting is None:  # only who waits is told by gloo
            thread = DaemonThread("gradwire-gloo")
            self._waiting = thread.submit(self._work.wait)
            thread.close()
        return self._waiting.done()


class _Checked:
    """A message, and another after it that says what kind of numbers it carries."""

    __slots__ = ("_kind", "_nbytes", "_parts", "_peer", "_told")

    def __init__(
        self, message: Pending, kind_message: Pending, told: torch.Tensor, kind: int, peer: int, nbytes: int
    ) -> None:
        self._parts = (message, kind_message)
        self._told = told
        self._kind = kind
        self._peer = peer
        self._nbytes = nbytes

    def wait(self, deadline: float) -> None:
        for part in self._parts:
            part.wait(deadline)
        if (kind := int(self._told)) != self._kind:
            detail = f"rank {self._peer} sent something else"
            raise LinkError(self._peer, timed_out=False, detail=detail, found=(kind, self._nbytes))

    def is_done(self) -> bool:
        return all(part.is_done() for part in self._parts)


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
            raise LinkError(self._peer, timed_out=False, detail=_reason(error)) from None

    def is_done(self) -> bool:
        return self._work.is_completed()


class ProcessGroupTransport(Transport):
    """A Transport over backends that nothing else uses. backends: by the type of device whose tensors they carry."""

    algorithms = native.ALGORITHMS

    def __init__(self, backends: dict[str, Backend]) -> None:
        self._backends = backends
        any_backend = next(iter(backends.values()))
        self.rank: int = any_backend.rank()
        self.size: int = any_backend.size()
        self.device_types = tuple(backends)
        self.posts_together = ("cuda",) if "cuda" in backends else ()
        names = {"cpu": "gloo", "cuda": "NCCL"}
        self.routes = tuple(f"{'CPU' if device == 'cpu' else 'CUDA'} tensors: {names[device]}" for device in backends)

    def post(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int
    ) -> tuple[list[Pending], list[Pending]]:
        """See Transport. All messages of a call are on the same kind of device."""
        if not sends and not receives:
            return [], []
        if (receives or sends)[0][1].is_cuda:
            pending = self._post_nccl(sends, receives)
            return [pending] * len(sends), [pending] * len(receives)
        gloo = self._backends["cpu"]
        kind, tag = divmod(tag, 1 << KIND_BITS)
        peer = None
        try:
            received: list[Pending] = []
            for peer, tensor in receives:
                received.append(_GlooPending(gloo.recv([tensor], peer, tag), peer, tensor))
                if kind:
                    theirs = torch.zeros(1, dtype=torch.int64)
                    told = _GlooPending(gloo.recv([theirs], peer, tag), peer, theirs)
                    received[-1] = _Checked(received[-1], told, theirs, kind, peer, tensor.nbytes)
            sent: list[Pending] = []
            for peer, tensor in sends:
                sent.append(_GlooPending(gloo.send([tensor], peer, tag), peer, tensor))
                if kind:
                    mine = torch.tensor([kind])
                    told = _GlooPending(gloo.send([mine], peer, tag), peer, mine)
                    sent[-1] = _Checked(sent[-1], told, mine, kind, peer, tensor.nbytes)
        except RuntimeError as error:
            raise LinkError(peer, timed_out=False, detail=_reason(error)) from None
        return sent, received

    def _post_nccl(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """NCCL deadlocks when the sends and receives of a round are not launched as one group. One work stands for
        all. Bytes travel: NCCL does not know every dtype."""
        nccl = self._backends["cuda"]
        try:
            torch_internals.begin_coalescing(nccl)
            try:
                for peer, tensor in sends:
                    nccl.send([tensor.view(torch.uint8)], peer, 0)
                for peer, tensor in receives:
                    nccl.recv([tensor.view(torch.uint8)], peer, 0)
            finally:  # a group left open would swallow whatever else this process sends
                work = torch_internals.end_coalescing(nccl)
        except RuntimeError as error:
            raise LinkError(None, timed_out=False, detail=_reason(error)) from None
        return _StreamPending(work, None)

    def collective(self, request: Request) -> Whole:
        """See Transport. gloo's collectives do not survive ranks that disagree: a longer message than expected ends the
        process."""

        def run(source: torch.Tensor, destination: torch.Tensor, tag: int, deadline: float) -> None:
            def complete(start: Callable[[], dist.Work | None]) -> None:
                try:
                    work = start()
                except RuntimeError as error:
                    raise LinkError(None, timed_out=False, detail=_reason(error)) from None
                if work is not None:
                    (_StreamPending(work, None) if on_cuda else _GlooPending(work, None, None)).wait(deadline)

            native.perform(request, self._backends[request.device_type], source, destination, complete)

        on_cuda = request.device_type == "cuda"
        return Whole(run, needs_meeting=not on_cuda)

    def abort(self) -> None:
        """A gloo receive that times out closes every connection of the group, which the peers see at once; one such receive
        is enough, unless its peer's connection is gone already."""
        for device, backend in self._backends.items():
            if device == "cuda":
                backend.abort()
                continue
            for peer in self._peers():
                try:
                    backend.recv([torch.empty(1, dtype=torch.uint8)], peer, _ABORT_TAG).wait(_ABORT_WAIT)
                except RuntimeError:
                    continue

    def close(self) -> None:
        """Connections close when the backends' last users, works in flight among them, let go of them."""
        self._backends = {}

    def _peers(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.rank]
