"""Messages and collectives over torch.distributed's backends: gloo for CPU tensors, NCCL for CUDA tensors.

algorithm='native' runs the backends' own collectives, with which the benchmarks compare ours. `_reducible` converts a tensor to
one that a backend can reduce, and `_settle` converts the result back. Verbs that only move data send any dtype as bytes.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from gradwire.collectives import torch_internals
from gradwire.collectives.control.asking import Asking
from gradwire.collectives.control.membership import ROUNDING_S, Membership
from gradwire.collectives.daemon_thread import DaemonThread
from gradwire.collectives.environment import GLOO_INTERFACE
from gradwire.collectives.errors import LinkError
from gradwire.collectives.reduction import TORCH_OPS, finish
from gradwire.collectives.schedules.algorithms import PLANNERS, recursive_doubling
from gradwire.collectives.schedules.program import Program
from gradwire.collectives.schedules.schedule import Place
from gradwire.collectives.schedules.spans import segments_of_buffer
from gradwire.collectives.torch_internals import Backend
from gradwire.collectives.transports.base import (
    DONE_POLL_S,
    KIND_BITS,
    Capabilities,
    Message,
    Operation,
    Pending,
    Posted,
    Run,
    Transport,
)
from gradwire.collectives.transports.loop import flat
from gradwire.collectives.transports.nccl import NEVER, NcclConnections

#: A tag that no operation uses, for a receive that no rank answers.
_ABORT_TAG = 2**31 - 1
_ABORT_WAIT = timedelta(milliseconds=1)

#: gloo's AVG is wrong on some paths, so finish() divides.
_OPS: dict[str, Any] = {name: op for op, name in TORCH_OPS.items()} | {"average": dist.ReduceOp.SUM}

#: The options of each verb of a backend.
_OPTIONS: dict[str, Callable[[], Any]] = {
    "allreduce": dist.AllreduceOptions,
    "reduce": dist.ReduceOptions,
    "reduce_scatter": dist.ReduceScatterOptions,
    "broadcast": dist.BroadcastOptions,
    "allgather": torch_internals.AllgatherOptions,
    "gather": dist.GatherOptions,
    "scatter": dist.ScatterOptions,
    "alltoall": dist.AllToAllOptions,
    "barrier": dist.BarrierOptions,
}

#: Integers of the width of each floating-point dtype, by bytes.
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

#: Dtypes that the backends cannot reduce, and the dtypes to which they are converted.
_WIDENED = {torch.int16: torch.int32}


def process_group(membership: Membership, timeout_s: float) -> ProcessGroupTransport:
    """Connect the members by separate backends, so that no message mixes with the user's traffic.

    Raises RuntimeError or LinkError if they do not connect within timeout_s seconds.
    """
    transport = ProcessGroupTransport(membership, timeout_s)
    if "cpu" in membership.device_types:
        transport.connect(time.monotonic() + timeout_s)
    return transport


def _gloo_key(rank: int) -> str:
    """Return the key under which gloo stores a rank's address, which no rank needs once all are connected. The name is that
    of gloo's store in torch 2.9 to 2.13; tests/ranks/test_growth.py counts the keys, which grow if another version has another
    name."""
    return f"0/{rank}"


@contextmanager
def _link_errors(peer: int | None = None, deadline: float = math.inf) -> Iterator[None]:
    """Raise LinkError for a backend's RuntimeError, with the first sentence of its message and without its source line."""
    try:
        yield
    except RuntimeError as error:
        detail = str(error).rpartition("] ")[2].partition(". ")[0].strip()
        raise LinkError(peer, timed_out=time.monotonic() >= deadline - ROUNDING_S, detail=detail) from None


@dataclass(eq=False, slots=True)
class _GlooPending:
    """A message of gloo, whose wait takes a timeout. When it passes, gloo breaks all connections of the group. waits: those of
    threads, which is_done() adds."""

    work: dist.Work
    peer: int | None
    tensor: torch.Tensor | None  # the backend reads or writes it until the wait is over
    waits: set[Future[bool]] = field(default_factory=set)
    waiting: Future[bool] | None = None

    def wait(self, deadline: float) -> None:
        left_s = max(0.001, deadline - time.monotonic())
        with _link_errors(self.peer, deadline):
            if self.waiting is None:
                self.work.wait(timedelta(seconds=left_s))
            elif wait([self.waiting], left_s).done:
                self.waiting.result()
            else:
                raise LinkError(self.peer, timed_out=True, detail=f"received nothing from rank {self.peer}")

    def is_done(self) -> bool:
        if self.waiting is None:  # gloo answers only a wait
            thread = DaemonThread("gradwire-gloo")
            self.waiting = thread.submit(partial(self.work.wait, NEVER))
            self.waits.add(self.waiting)
            self.waiting.add_done_callback(self.waits.discard)
            thread.close()
        return self.waiting.done()


@dataclass(eq=False, slots=True)
class _Checked:
    """A message, and a second one whose tensor `sent_kind` contains the kind of numbers in the first."""

    parts: tuple[Pending, Pending]
    sent_kind: torch.Tensor
    kind: int
    peer: int
    nbytes: int

    def wait(self, deadline: float) -> None:
        for part in self.parts:
            part.wait(deadline)
        if (found := int(self.sent_kind)) != self.kind:
            detail = f"rank {self.peer} sent something else"
            raise LinkError(self.peer, timed_out=False, detail=detail, found=(found, self.nbytes))

    def is_done(self) -> bool:
        return all(part.is_done() for part in self.parts)


@dataclass(eq=False, slots=True)
class _StreamPending:
    """Messages of NCCL, whose wait only orders streams: wait() polls until they are done or the deadline passes."""

    work: dist.Work

    def wait(self, deadline: float) -> None:
        while not self.work.is_completed():
            if time.monotonic() >= deadline:
                raise LinkError(None, timed_out=True, detail="no completion from NCCL")
            time.sleep(DONE_POLL_S)
        with _link_errors():
            self.work.wait()

    def is_done(self) -> bool:
        return self.work.is_completed()


class ProcessGroupTransport(Transport):
    """A Transport over backends of torch.distributed that nothing else uses. timeout_s: for which the first operation on each
    CUDA device may connect NCCL.

    gloo is connected by connect(), or else in the first operation that uses it. Operations have their own deadlines. The
    backends' timeouts, which end the whole process with NCCL, never come first."""

    def __init__(self, membership: Membership, timeout_s: float) -> None:
        self.rank, self.size = membership.rank, membership.size
        self._membership = membership
        self._timeout_s = timeout_s
        self._backends: dict[str, Backend] = {}
        self._is_aborted = False
        self._waits: set[Future[bool]] = set()
        self._process = os.getpid()
        device_types = membership.device_types
        has_nccl = "cuda" in device_types
        if has_nccl:
            store = PrefixStore("nccl", membership.store)
            backend = self._backends["cuda"] = torch_internals.nccl_backend(store, self.rank, self.size, NEVER)
            self._nccl = NcclConnections(backend, lambda: self._is_aborted)
        self.capabilities = Capabilities(
            device_types=device_types,
            posts_together=("cuda",) if has_nccl else (),
            algorithms=dict.fromkeys(PLANNERS, ("native",)),
            # NCCL needs one kernel; the general loop launches kernels for each message.
            preferred_on_gpu={"allreduce": "native"} if has_nccl else {},
        )
        names = {"cpu": "CPU tensors: gloo", "cuda": "CUDA tensors: NCCL"}
        self.routes = tuple(names[device] for device in device_types)

    def connect(self, deadline: float) -> None:
        """Connect gloo, once. Collective. Raises RuntimeError or LinkError if the ranks do not connect by the deadline
        (time.monotonic())."""
        if "cpu" in self._backends:
            return
        membership, rank = self._membership, self.rank
        store, timeout = PrefixStore("gloo", membership.store), timedelta(seconds=self._timeout_s)
        address = None if os.environ.get(GLOO_INTERFACE) else membership.address

        def check() -> None:
            if self._is_aborted:
                raise LinkError(None, timed_out=False, detail="the wait was ended")
            membership.channel.check()

        with closing(Asking(membership.store, check, membership.keepers)) as asking:
            gloo = asking.ask(lambda: torch_internals.gloo_backend(store, rank, self.size, timeout, address), deadline)
            self._backends["cpu"] = gloo  # from here on, abort() ends its waits
            check()
            with _link_errors(None, deadline):
                _GlooPending(gloo.barrier(dist.BarrierOptions()), None, None).wait(deadline)
            with suppress(LinkError, RuntimeError):  # all ranks have read this address
                asking.ask(lambda: store.delete_key(_gloo_key(rank)), deadline)

    def prepare(self, operation: Operation) -> Run:
        return self.native(operation, meets_over=self) if operation.program is None else super().prepare(operation)

    def native(self, operation: Operation, *, meets_over: Transport) -> Run:
        """Return what runs a backend's own collective. gloo's need a barrier before, over messages of `meets_over`: a longer
        message than expected ends the process."""
        if operation.device_type == "cuda":

            def run_nccl(source: torch.Tensor, destination: torch.Tensor, tag: int, deadline: float) -> None:
                self._nccl.connect(source.device, deadline)
                _perform(operation, self._backends["cuda"], flat(source), flat(destination), deadline)

            return run_nccl
        meet = _meeting(meets_over)
        token = torch.zeros(1, dtype=torch.uint8, device="cpu")

        def run_gloo(source: torch.Tensor, destination: torch.Tensor, tag: int, deadline: float) -> None:
            meet(token, token, tag, deadline)
            with _link_errors(None, deadline):
                self.connect(deadline)
            _perform(operation, self._backends["cpu"], flat(source), flat(destination), deadline)

        return run_gloo

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Posted:
        """See Transport. All messages of a call are on the same kind of device."""
        if not sends and not receives:
            return [], []
        if (receives or sends)[0][1].is_cuda:
            pending = self._post_nccl(sends, receives)
            return [pending] * len(sends), [pending] * len(receives)
        kind, tag = divmod(tag, 1 << KIND_BITS)
        gloo = self._backends["cpu"]

        def posted(start: Callable[..., dist.Work], peer: int | None, tensor: torch.Tensor, sent_kind: int) -> Pending:
            with _link_errors(peer):
                message = _GlooPending(start([tensor.view(torch.uint8)], peer, tag), peer, tensor, self._waits)
                if not kind:
                    return message
                after = torch.tensor([sent_kind], dtype=torch.int64, device="cpu")
                pending = _GlooPending(start([after], peer, tag), peer, after, self._waits)
            assert peer is not None  # see Capabilities.receives_from_any
            return _Checked((message, pending), after, kind, peer, tensor.nbytes)

        received = [posted(gloo.recv, peer, tensor, 0) for peer, tensor in receives]
        return [posted(gloo.send, peer, tensor, kind) for peer, tensor in sends], received

    def _post_nccl(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Launch the sends and receives of a round as one group, without which NCCL deadlocks; return one handle for all.
        Tensors are sent as bytes, because NCCL does not support every dtype."""
        nccl = self._backends["cuda"]
        self._nccl.connect((receives or sends)[0][1].device, time.monotonic() + self._timeout_s)
        with _link_errors():
            torch_internals.begin_coalescing(nccl)
            try:
                for peer, tensor in sends:
                    nccl.send([tensor.view(torch.uint8)], peer, 0)
                for peer, tensor in receives:
                    nccl.recv([tensor.view(torch.uint8)], peer, 0)
            finally:  # an open group would collect all later calls of this process
                work = torch_internals.end_coalescing(nccl)
        return _StreamPending(work)

    def abort(self) -> None:
        """Let a gloo receive time out: gloo then closes every connection of the group, and the peers detect it at
        once. One such receive is enough, unless the connection to its peer is closed already."""
        self._is_aborted = True
        for device, backend in list(self._backends.items()):
            if device == "cuda":
                backend.abort()
                continue
            for peer in range(self.size):
                if peer != self.rank:
                    with suppress(RuntimeError):
                        backend.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, _ABORT_TAG).wait(
                            _ABORT_WAIT
                        )

    def close(self) -> None:
        """See Transport. gloo's connections close when their last user, such as a work in flight, releases them, too. NCCL's
        backend is shut down, because it would otherwise warn at the end of the process."""
        if os.getpid() != self._process:
            return
        if self._waits:  # for messages that never arrived
            self.abort()
        if "cuda" in self._backends:
            self._backends["cuda"].shutdown()
        self._backends = {}


def _meeting(transport: Transport) -> Run:
    """Return a barrier over a transport's messages."""
    schedule = recursive_doubling.allreduce(Place(transport.rank, transport.size))
    program = Program(schedule, segments_of_buffer(1, schedule.blocks, 1))
    return transport.prepare(Operation("barrier", "recursive_doubling", torch.uint8, "cpu", 1, "max", program=program))


def _perform(
    operation: Operation, backend: Backend, source: torch.Tensor, destination: torch.Tensor, deadline: float
) -> None:
    """Run a verb of the backend. source, destination: see Operation."""

    def complete(moved: torch.Tensor, landed: torch.Tensor) -> None:
        with _link_errors():
            work = _start(operation, backend, moved, landed, deadline)
        if work is not None:
            on_cuda = operation.device_type == "cuda"
            (_StreamPending(work) if on_cuda else _GlooPending(work, None, None)).wait(deadline)

    if operation.verb not in ("allreduce", "reduce", "reduce_scatter"):
        complete(source.view(torch.uint8), destination.view(torch.uint8))
        return
    landed = moved = _reducible(source, operation.op)
    if operation.verb == "reduce_scatter":
        landed = torch.empty(destination.numel(), dtype=moved.dtype, device=moved.device)
    complete(moved, landed)
    _settle(destination, landed)
    finish(destination, operation.op, backend.size())


def _reducible(tensor: torch.Tensor, op: str) -> torch.Tensor:
    """Return the tensor that the backend reduces in place of a tensor: the tensor itself, or a copy in another dtype.

    The backends' min and max lose a NaN if another rank has a number, so floating-point numbers are sent as integers in the
    same order, with NaN as the least (min) or the greatest (max).
    """
    moved = tensor
    if op in ("min", "max") and moved.dtype.is_floating_point:
        ordered = _reordered(moved.view(_BITS[moved.itemsize]))
        limits = torch.iinfo(ordered.dtype)
        moved = ordered.masked_fill_(moved.isnan(), limits.max if op == "max" else limits.min)
    return moved.to(_WIDENED.get(moved.dtype, moved.dtype))


def _settle(tensor: torch.Tensor, moved: torch.Tensor) -> None:
    """Write the reduced result `moved` to a tensor, after the inverse of `_reducible`."""
    if tensor.dtype.is_floating_point and not moved.dtype.is_floating_point:
        moved = _reordered(moved.to(_BITS[tensor.itemsize])).view(tensor.dtype)
    tensor.copy_(moved)


def _reordered(bits: torch.Tensor) -> torch.Tensor:
    """Map the bits of floating-point numbers to integers in the same order, and back: for negative numbers, larger bits mean
    smaller numbers."""
    limits = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (limits.bits - 1)) & limits.max)


def _start(
    operation: Operation, backend: Backend, source: torch.Tensor, destination: torch.Tensor, deadline: float
) -> Any:
    """Start a verb; return its Work."""
    options: Any = _OPTIONS[operation.verb]()
    if operation.device_type != "cuda":  # gloo would end it at the group's timeout, before or after the deadline
        options.timeout = timedelta(seconds=max(0.001, deadline - time.monotonic()))
    for name, value in (("reduceOp", _OPS[operation.op]), ("rootRank", operation.root)):
        if hasattr(options, name):
            setattr(options, name, value)

    def parts(buffer: torch.Tensor) -> list[list[torch.Tensor]]:
        return [list(buffer.view(backend.size(), -1))] if backend.rank() == operation.root else []

    match operation.verb:
        case "allreduce" | "broadcast" | "reduce":
            return getattr(backend, operation.verb)([destination], options)
        case "reduce_scatter":
            return torch_internals.reduce_scatter(backend, destination, source, options)
        case "allgather":
            return torch_internals.allgather(backend, destination, source, options)
        case "gather":
            return backend.gather(parts(destination), [source], options)
        case "scatter":
            return backend.scatter([destination], parts(source), options)
        case "alltoall":
            incoming = [length * operation.dtype.itemsize for length in operation.incoming]
            outgoing = [length * operation.dtype.itemsize for length in operation.outgoing]
            return backend.alltoall_base(destination, source, incoming, outgoing, options)
        case _:
            return backend.barrier(options)
