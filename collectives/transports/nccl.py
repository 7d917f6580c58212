"""NCCL, which moves and reduces CUDA tensors: collectives and messages are enqueued on the current stream, or ordered with it,
and the host waits for none of them.

NCCL connects the ranks when they need it: in the first operation on a device, again in the first one of each kind, and for the
first message to each rank. It does so in the calling thread, and without a deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from gradwire.collectives import torch_internals
from gradwire.collectives.daemon_thread import DaemonThread
from gradwire.collectives.errors import LinkError
from gradwire.collectives.reduction import finish
from gradwire.collectives.torch_internals import Backend
from gradwire.collectives.transports.base import GroupRun, Message, Operation, Pending, Run
from gradwire.collectives.transports.loop import flat
from gradwire.collectives.transports.native import (
    link_error,
    options_of,
    perform,
    perform_group,
    reducible,
    settle,
    start,
)

_POLL_S = 0.05

_SHARED = (
    " (ranks that share a GPU exchange through the host's memory: make a group over gloo before, by "
    "torch.distributed.init_process_group('gloo'))"
)

#: How many kinds of operations are remembered as launched.
_KEPT = 4096

#: How long close() waits for NCCL to end.
_END_S = 5.0

_Result = TypeVar("_Result")


class NcclConnections:
    """The devices on which the ranks of a backend over NCCL are connected. is_over: returns whether to stop waiting.

    Attribute communicators: by device, the address of NCCL's communicator."""

    def __init__(self, backend: Backend, is_over: Callable[[], bool] = lambda: False) -> None:
        self._backend = backend
        self._is_over = is_over
        self.communicators: dict[torch.device, int] = {}

    def connect(self, device: torch.device, deadline: float) -> None:
        """Connect the ranks on a device, once. Collective. Raises LinkError if they are not connected by the deadline
        (time.monotonic()); the backend cannot be used then."""
        if device not in self.communicators:
            self.first(device, lambda: None, deadline)

    def first(
        self, device: torch.device, launch: Callable[[], _Result], deadline: float, *, connects: bool = True
    ) -> _Result:
        """Return the result of a call of NCCL that may have to connect ranks. It runs on another thread, with the caller's
        current stream. connects: whether all ranks make it, so that they are connected on the device before. Raises LinkError if
        it has not returned by the deadline (time.monotonic()); the backend cannot be used then."""
        stream = torch.cuda.current_stream(device) if torch.cuda.is_available() else None

        def on_thread() -> _Result:
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                if connects and device not in self.communicators:
                    self._backend.eager_connect_single_device(device)
                    self.communicators[device] = torch_internals.nccl_communicator(self._backend)
                return launch()

        thread = DaemonThread("gradwire-nccl")  # it cannot be ended
        launching = thread.submit(on_thread)
        thread.close()
        while not wait([launching], min(_POLL_S, max(0.0, deadline - time.monotonic()))).done:
            if self._is_over() or time.monotonic() >= deadline:
                why = "NCCL has not connected the ranks"
                raise LinkError(None, timed_out=not self._is_over(), detail=why)
        if isinstance(error := launching.exception(), RuntimeError):
            advice = _SHARED if "duplicate gpu" in str(error).lower() else ""
            raise LinkError(None, timed_out=False, detail=f"NCCL cannot connect the ranks: {error}{advice}")
        return launching.result()


@dataclass(eq=False, slots=True)
class _Enqueued:
    """Messages of NCCL on a stream of its own."""

    work: dist.Work

    def wait(self, deadline: float) -> None:
        """Let the current stream wait for the messages."""
        self.work.synchronize()  # wait() would block the host

    def is_done(self) -> bool:
        return self.work.is_completed()


@contextmanager
def grouped(backend: Backend, works: list[dist.Work] | None = None) -> Iterator[None]:
    """Launch the calls of the with block as one group, and add its Work to those of the calls."""
    torch_internals.begin_coalescing(backend)
    try:
        yield
    finally:  # an open group would collect all later calls of this process
        work = torch_internals.end_coalescing(backend)
    if works is not None:
        works.append(work)


class Nccl:
    """The collectives and messages of one rank over NCCL. timeout_s: for which messages to a rank may connect the first time.

    An operation is over on the host when it is enqueued. Whoever calls this keeps its deadline, by an event on the stream, and
    ends it by abort()."""

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        self._backend = torch_internals.nccl_backend(store, rank, size)
        self._timeout_s = timeout_s
        self._ending: Future[object] | None = None
        self._once = threading.Lock()  # for the first to set _ending
        self._in_use = threading.Lock()  # of the communicators, which end in a call of _ending
        self._connections = NcclConnections(self._backend, lambda: self._ending is not None)
        self._launched: dict[Hashable, set[torch.device]] = {}  # by operation, the devices on which it has run
        # The ranks to (True) and from which messages went.
        self._met: set[tuple[torch.device, int | None, bool]] = set()

    def prepare(self, operation: Operation) -> Run:
        """Return what enqueues an operation of NCCL's own."""
        if operation.verb in ("reduce_shares", "gather_shares"):
            return self._prepare_half(operation)
        if operation.verb == "barrier":  # that of torch would block the host
            operation = replace(operation, verb="allreduce")
        backend, options, launched = self._backend, options_of(operation), self._devices_of(operation)
        options.asyncOp = False  # so that it runs on the current stream
        enqueue = partial(start, operation, options, backend)

        def run(source: torch.Tensor, destination: torch.Tensor, tag: int, deadline: float) -> None:
            landing = flat(destination)
            given = landing if source is destination else flat(source)

            def launch(moved: torch.Tensor, landed: torch.Tensor) -> None:
                self._launch(launched, landing.device, partial(enqueue, moved, landed), deadline)

            perform(operation, backend, given, landing, launch)

        return run

    def _prepare_half(self, operation: Operation) -> Run:
        """Return what enqueues reduce_shares or gather_shares, in place: NCCL's verb for equal parts, and in the same group one
        for the elements that only the share of the last rank has."""
        backend, launched = self._backend, self._devices_of(operation)
        rank, size, numel = backend.rank(), backend.size(), operation.numel
        reduces = operation.verb == "reduce_shares"
        equal = replace(operation, verb="reduce_scatter" if reduces else "allgather", outgoing=(), incoming=())
        last = replace(operation, verb="reduce" if reduces else "broadcast", root=size - 1)
        equal_options, last_options = options_of(equal), options_of(last)
        equal_options.asyncOp = last_options.asyncOp = False
        each, rest = divmod(numel, size)
        own = slice(rank * each, numel if rank == size - 1 else (rank + 1) * each)

        def enqueue(numbers: torch.Tensor) -> None:
            width = numbers.numel() // numel  # of an element, which may be sent as bytes
            parts, end = numbers[: size * each * width], numbers[size * each * width :]
            mine = parts[rank * each * width : (rank + 1) * each * width]
            with grouped(backend) if each and rest else nullcontext():
                if each:
                    pair = (parts, mine) if reduces else (mine, parts)
                    start(equal, equal_options, backend, *pair)
                if rest:
                    start(last, last_options, backend, end, end)

        def run(source: torch.Tensor, destination: torch.Tensor, tag: int, deadline: float) -> None:
            numbers = flat(destination)
            moved = reducible(numbers, operation.op) if reduces else numbers.view(torch.uint8)
            if numel:
                self._launch(launched, numbers.device, partial(enqueue, moved), deadline)
            if reduces:
                mine = numbers[own]
                if moved is not numbers:
                    settle(mine, moved[own])
                finish(mine, operation.op, size)

        return run

    def prepare_group(self, operation: Operation) -> GroupRun:
        """Return what enqueues an allreduce on several tensors as one group."""
        backend, op, launched = self._backend, operation.op, self._devices_of(operation, grouped=True)
        options = torch_internals.AllreduceCoalescedOptions()
        options.reduceOp, options.asyncOp = options_of(operation).reduceOp, False

        def run(tensors: Sequence[torch.Tensor], tag: int, deadline: float) -> None:
            def launch(moved: list[torch.Tensor]) -> None:
                call = partial(backend.allreduce_coalesced, moved, options)
                self._launch(launched, tensors[0].device, call, deadline)

            perform_group(op, backend, list(map(flat, tensors)), launch)

        return run

    def _devices_of(self, operation: Operation, *, grouped: bool = False) -> set[torch.device]:
        """Return the devices on which an operation like this one has run, to which _launch() adds."""
        if len(self._launched) >= _KEPT:
            self._launched.clear()
        each = operation
        lengths = each.outgoing, each.incoming
        key = each.verb, each.dtype, each.op, each.root, each.numel, lengths, grouped
        return self._launched.setdefault(key, set())

    def _launch(
        self, launched: set[torch.device], device: torch.device, call: Callable[[], _Result], deadline: float
    ) -> _Result:
        """Return the result of a call of NCCL by all ranks. launched: the devices on which it has run before. The next call with
        the same arguments connects no ranks any more, and runs in this thread."""
        if device not in launched:
            result = self._connections.first(device, call, deadline)
            launched.add(device)
            return result
        try:
            return call()
        except RuntimeError as error:
            raise link_error(error) from None

    def post(self, sends: Sequence[Message], receives: Sequence[Message], *, is_message: bool) -> Pending:
        """Launch the sends and receives of a round as one group, without which NCCL deadlocks; return one handle for all. Tensors
        are sent as bytes, because NCCL does not support every dtype. is_message: whether only two ranks call this, for one
        tensor. Before all ranks are connected on its device, NCCL connects these two by themselves."""
        device = (receives or sends)[0][1].device
        of_two = is_message and device not in self._connections.communicators
        if of_two and self._connections.communicators:
            raise LinkError(None, timed_out=False, detail=f"a message on {device} needs a collective there before it")
        launch = partial(self._exchange, sends, receives, alone=of_two)
        peers = {(device, peer, True) for peer, _ in sends} | {(device, peer, False) for peer, _ in receives}
        if not peers <= self._met:
            deadline = time.monotonic() + self._timeout_s
            work = self._connections.first(device, launch, deadline, connects=not of_two)
            if not of_two:
                self._met |= peers
            return _Enqueued(work)
        try:
            return _Enqueued(launch())
        except RuntimeError as error:
            raise link_error(error) from None

    def _exchange(self, sends: Sequence[Message], receives: Sequence[Message], *, alone: bool) -> dist.Work:
        backend, works = self._backend, list[dist.Work]()
        with nullcontext(works) if alone else grouped(backend, works):
            works += [backend.send([tensor.view(torch.uint8)], peer, 0) for peer, tensor in sends]
            works += [backend.recv([tensor.view(torch.uint8)], peer, 0) for peer, tensor in receives]
        return works[-1]

    def trouble(self) -> str | None:
        """See Transport."""
        if not self._in_use.acquire(blocking=False):
            return None
        try:
            if self._ending is None:
                for communicator in list(self._connections.communicators.values()):
                    if error := torch_internals.nccl_error(communicator):
                        return error
        finally:
            self._in_use.release()
        return None

    def abort(self) -> None:
        """End NCCL's kernels, which leave their results incomplete, on a thread of its own: this may take seconds."""
        self._end(self._backend.abort)

    def close(self) -> None:
        """End NCCL after the enqueued operations, unless it was aborted, and wait for the end, but not for long."""
        wait([self._end(self._backend.shutdown)], _END_S)

    def _end(self, call: Callable[[], None]) -> Future[object]:
        def end() -> None:
            with self._in_use:
                call()

        with self._once:
            if self._ending is None:
                thread = DaemonThread("gradwire-nccl-end", or_callers=True)
                self._ending = thread.submit(end)
                thread.close()
            return self._ending
