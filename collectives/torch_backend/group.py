"""The process group that torch.distributed makes for the backend "gradwire".

torch calls its methods from Python and from C++ (DDP's reducer, functional collectives), by names that have changed between its
versions: the newer one of each pair is defined, and the older one is another name of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from gradwire.collectives.communicator import Communicator, close_all
from gradwire.collectives.environment import TORCH_BACKEND
from gradwire.collectives.link.membership import membership_in
from gradwire.collectives.plan.topology import host_id
from gradwire.collectives.reduction import DTYPES
from gradwire.collectives.torch_backend.mover import Mover
from gradwire.collectives.torch_backend.reductions import allreduce_bits, allreduce_sparse, bitwise
from gradwire.collectives.torch_backend.work import GradwireWork, at_once
from gradwire.collectives.torch_internals import ProcessGroup, nccl_group, profiling

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _verb(name: str) -> Callable[[_Method], _Method]:
    """Make a method one of torch's verbs: CUDA tensors go to NCCL, profilers see a range of this name, as gloo's has it, and the
    handle is kept where calls are coalesced."""

    def decorate(method: _Method) -> _Method:
        @wraps(method)
        def call(self: GradwireGroup, *arguments: Any, **options: Any) -> GradwireWork:
            if any(tensor.is_cuda for tensor in _tensors(arguments)):
                return getattr(self.nccl(), method.__name__)(*arguments, **options)  # type: ignore[no-any-return]
            with profiling(f"{TORCH_BACKEND}:{name}"):
                work: GradwireWork = method(self, *arguments, **options)
            if self._coalesced is not None:
                self._coalesced.append(work)
            return work

        return call  # type: ignore[return-value]

    return decorate


class GradwireGroup(ProcessGroup):  # type: ignore[misc]  # torch's stubs know neither its overloads nor its older names
    """The ranks of a torch.distributed group, whose CPU tensors go through shared memory inside a host, and over TCP between
    hosts.

    Operations run in the order issued, one at a time; messages are beside them, so that a message which nobody receives yet holds
    up no operation. CUDA tensors go to a group over NCCL, which all ranks make with their first one. Errors are
    gradwire.collectives.CollectiveError, a DistBackendError, with the ranks to blame.
    """

    def __init__(self, store: Store, rank: int, global_ranks: tuple[int, ...], timeout: timedelta) -> None:
        """Meet the other ranks in a store that is theirs. timeout: of that, and of every operation."""
        super().__init__(rank, len(global_ranks))
        self._store = store
        self._name = self._description = ""
        self._timeout = timeout
        self._nccl: dist.ProcessGroup | None = None
        self._coalesced: list[GradwireWork] | None = None
        self._mover = Mover()
        timeout_s = timeout.total_seconds()
        membership = membership_in(store, TORCH_BACKEND, rank, global_ranks, ("cpu",), host_id(), timeout_s)
        membership = replace(membership, natively=False)
        try:
            self._communicator, self._messages = (
                Communicator(membership.subset(range(len(global_ranks)), purpose), timeout_s=timeout_s)
                for purpose in ("operations", "messages")
            )
        finally:
            membership.close()

    def nccl(self) -> dist.ProcessGroup:
        """Return the group for CUDA tensors. Collective the first time."""
        if self._nccl is None:
            self._nccl = nccl_group(PrefixStore("nccl", self._store), self.rank(), self.size(), self._timeout)
        return self._nccl

    # Reductions

    @_verb("all_reduce")
    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> GradwireWork:
        """Reduce a tensor in place, to the same bits on all ranks."""
        opts = opts or dist.AllreduceOptions()
        (tensor,) = tensors
        if tensor.is_sparse:
            allreduce_sparse(self._communicator, tensor, _name_of(opts.reduceOp))
            return GradwireWork(tensors)
        if (combine := bitwise(opts.reduceOp)) is not None:
            allreduce_bits(self._communicator, tensor, combine)
            return GradwireWork(tensors)
        op = _name_of(opts.reduceOp)
        return self._started(tensors, opts, lambda a: [self._communicator.allreduce(_real(tensor), op, async_op=a)])

    @_verb("all_reduce_coalesced")
    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> GradwireWork:
        """Reduce several tensors as one operation."""
        opts = opts or dist.AllreduceCoalescedOptions()
        op, moved = _name_of(opts.reduceOp), [_real(tensor) for tensor in tensors]
        return self._started(tensors, opts, lambda a: [self._communicator.grouped_allreduce(moved, op, async_op=a)])

    @_verb("reduce")
    def reduce(self, tensors: Sequence[Tensor], opts: Any = None) -> GradwireWork:
        """Reduce a tensor in place on the root."""
        opts = opts or dist.ReduceOptions()
        (tensor,) = tensors
        root, op = opts.rootRank, _name_of(opts.reduceOp)
        return self._started(tensors, opts, lambda a: [self._communicator.reduce(_real(tensor), root, op, async_op=a)])

    @_verb("reduce_scatter")
    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> GradwireWork:
        """Reduce lists of tensors, one tensor a rank."""
        (output,), (parts,) = outputs, inputs
        return self._reduce_scatter([output], [parts], opts)

    @_verb("_reduce_scatter_base")
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> GradwireWork:
        """Reduce a tensor, of which each rank gets a part."""
        return self._reduce_scatter([output], [input], opts)

    @_verb("reduce_scatter_tensor_coalesced")
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> GradwireWork:
        """Reduce several tensors, of each of which each rank gets a part."""
        return self._reduce_scatter(outputs, inputs, opts)

    def _reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Any], opts: Any) -> GradwireWork:
        opts = opts or dist.ReduceScatterOptions()
        op = _name_of(opts.reduceOp)
        pairs = [(_real(output), _each(_real, given)) for output, given in zip(outputs, inputs, strict=True)]
        return self._started(
            outputs, opts, lambda a: [self._communicator.reduce_scatter(*pair, op, async_op=a) for pair in pairs]
        )

    # Movement

    @_verb("broadcast")
    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> GradwireWork:
        """Copy the root's tensor to all ranks."""
        opts = opts or dist.BroadcastOptions()
        (tensor,) = tensors
        root = opts.rootRank
        return self._started(tensors, opts, lambda a: [self._communicator.broadcast(_raw(tensor), root, async_op=a)])

    @_verb("all_gather")
    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> GradwireWork:
        """Collect every rank's tensor, which may be of other sizes, in lists."""
        return self._allgather(outputs, inputs, opts)

    @_verb("all_gather_coalesced")
    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> GradwireWork:
        """Collect several tensors of every rank; outputs: by rank, a list of them."""
        return self._allgather(list(map(list, zip(*outputs, strict=True))), inputs, opts)

    @_verb("_all_gather_base")
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> GradwireWork:
        """Collect every rank's tensor in one."""
        return self._allgather([output], [input], opts)

    @_verb("all_gather_into_tensor_coalesced")
    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> GradwireWork:
        """Collect every rank's tensors, each in one."""
        return self._allgather(outputs, inputs, opts)

    def _allgather(self, outputs: Sequence[Any], inputs: Sequence[Tensor], opts: Any) -> GradwireWork:
        pairs = [(_each(_raw, output), _raw(given)) for output, given in zip(outputs, inputs, strict=True)]
        return self._started(
            _tensors(outputs), opts, lambda a: [self._communicator.allgather(*pair, async_op=a) for pair in pairs]
        )

    @_verb("gather")
    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> GradwireWork:
        """Collect every rank's tensor in the root's list."""
        opts = opts or dist.GatherOptions()
        (given,) = inputs
        lists, root = [_raw(tensor) for tensor in _tensors(outputs)], opts.rootRank
        return self._started(
            _tensors(outputs), opts, lambda a: [self._communicator.gather(_raw(given), lists, root, async_op=a)]
        )

    @_verb("scatter")
    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> GradwireWork:
        """Give each rank a tensor of the root's list."""
        opts = opts or dist.ScatterOptions()
        (output,) = outputs
        lists, root = [_raw(tensor) for tensor in _tensors(inputs)], opts.rootRank
        return self._started(
            outputs, opts, lambda a: [self._communicator.scatter(_raw(output), lists, root, async_op=a)]
        )

    @_verb("all_to_all")
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
    ) -> GradwireWork:
        """Send each rank a part of a tensor, in rows; no splits cut into equal parts."""
        pair = (_raw(output), _raw(input))
        both: tuple[Sequence[int] | None, Sequence[int] | None] = (None, None)
        if output_splits or input_splits:
            both = self._rows(output, output_splits), self._rows(input, input_splits)
        return self._started([output], opts, lambda a: [self._communicator.alltoall(*pair, *both, async_op=a)])

    def _rows(self, tensor: Tensor, splits: Sequence[int]) -> Sequence[int]:
        return splits or [len(tensor) // self.size()] * self.size()

    @_verb("all_to_all")
    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> GradwireWork:
        """Send each rank a tensor. Returns when it is done."""
        sent = torch.cat([_raw(tensor).flatten() for tensor in inputs])
        lengths = [tensor.numel() for tensor in inputs], [_raw(tensor).numel() for tensor in outputs]
        landed = sent.new_empty(sum(lengths[1]))
        sent_lengths = [_raw(tensor).numel() for tensor in inputs]
        self._communicator.alltoall(landed, sent, lengths[1], sent_lengths)
        for tensor, part in zip(outputs, landed.split(lengths[1]), strict=True):
            moved = _raw(tensor)
            moved.detach().copy_(part.view(moved.shape))
        return GradwireWork(outputs)

    # Barriers

    @_verb("barrier")
    def barrier(self, opts: Any = None) -> GradwireWork:
        """Return when all ranks have come."""
        opts = opts or dist.BarrierOptions()
        with self._within(opts.timeout):
            return self._started((), opts, lambda a: [self._communicator.barrier(async_op=a)])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Return when all ranks have come. Raises CollectiveTimeout, which names all ranks that have not, whatever
        wait_all_ranks."""
        with self._within(timeout):
            self._communicator.barrier()

    @contextmanager
    def _within(self, timeout: timedelta | None) -> Iterator[None]:
        """Have operations that begin meanwhile take no longer. timeout: torch's negative ones stand for none."""
        if timeout is None or timeout <= timedelta(0):
            yield
            return
        before, self._communicator.timeout_s = self._communicator.timeout_s, timeout.total_seconds()
        try:
            yield
        finally:
            self._communicator.timeout_s = before

    # Messages

    @_verb("send")
    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> GradwireWork:
        """Begin to send a tensor to a rank."""
        (tensor,) = tensors
        return self._message(tensors, self._messages.send(_raw(tensor), peer, tag=tag, async_op=True))

    @_verb("recv")
    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> GradwireWork:
        """Begin to receive a tensor from a rank."""
        (tensor,) = tensors
        return self._message(tensors, self._messages.recv(_raw(tensor), peer, tag=tag, async_op=True))

    @_verb("recvAnySource")
    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> GradwireWork:
        """Begin to receive a tensor from whichever rank sends one. Until it has come, what this rank sends waits."""
        (tensor,) = tensors
        return self._message(tensors, self._messages.recv(_raw(tensor), None, tag=tag, async_op=True))

    def _message(self, tensors: Sequence[Tensor], work: Any) -> GradwireWork:
        self._mover.add(work)
        return GradwireWork(
            tensors, [work], lambda callback: self._mover.when_done(work, callback), lambda: work.sender
        )

    # What torch asks of a group

    def _started(self, results: Sequence[Tensor], opts: Any, start: Callable[[bool], Sequence[Any]]) -> GradwireWork:
        """Return the handle of start(is_asynchronous), which returns the handles of its parts."""
        is_asynchronous = opts is None or getattr(opts, "asyncOp", True)
        parts = start(is_asynchronous)
        if not is_asynchronous or not parts:
            return GradwireWork(results)
        return GradwireWork(results, parts, parts[-1].when_done)

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type == "cuda":
            self.nccl()._start_coalescing(device)
        else:
            self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Any:
        if device.type == "cuda":
            return self.nccl()._end_coalescing(device)
        works, self._coalesced = self._coalesced or [], None
        results = [tensor for work in works for tensor in work.result()]
        return GradwireWork(results, works, works[-1].when_done if works else at_once)

    def _get_backend(self, device: torch.device) -> Any:
        """Return what torch asks for what a backend is able to: this group itself, for CPU tensors."""
        return self if torch.device(device).type == "cpu" else self.nccl()._get_backend(torch.device(device))

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return whether allocate_tensor() makes what is quicker to exchange."""
        return torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised 1-D CPU tensor, in shared memory where ranks share a host."""
        return self._communicator.empty(size, dtype=dtype)

    def getBackendName(self) -> str:  # noqa: N802
        """Return the name by which C++ knows it."""
        return TORCH_BACKEND

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Keep the name by which functional collectives find the group."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        """Return that name."""
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Keep what torch says of the group in its logs."""
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return that description."""
        return self._description

    def get_group_store(self) -> Store:
        """Return the store of these ranks."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Give the operations that begin from now on so much time."""
        self._timeout = timeout
        self._communicator.timeout_s = self._messages.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: operations are numbered from the start."""

    def shutdown(self) -> None:
        """Finish what was issued, and leave. torch.distributed.destroy_process_group calls it."""
        self._mover.close()
        close_all([self._communicator, self._messages])
        if self._nccl is not None:
            self._nccl.shutdown()

    def abort(self) -> None:
        """Leave; the others' operations fail, with this rank as the reason."""
        self._mover.close()
        close_all([self._communicator, self._messages], RuntimeError("the group was aborted"))
        if self._nccl is not None:
            self._nccl.abort()

    # The names of these verbs in torch up to 2.12
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _tensors(given: Any) -> list[Tensor]:
    """Return all tensors in lists of lists of them."""
    if isinstance(given, Tensor):
        return [given]
    return [tensor for each in given for tensor in _tensors(each)] if isinstance(given, list | tuple) else []


def _real(tensor: Tensor) -> Tensor:
    """Return what is reduced for a tensor: of complex numbers, pairs of real ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _raw(tensor: Tensor) -> Tensor:
    """Return what is moved for a tensor: of a dtype that no Communicator carries, the bytes."""
    moved = _real(tensor)
    return moved if moved.dtype in DTYPES else moved.view(-1).view(torch.uint8)


def _each(view: Callable[[Tensor], Tensor], given: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
    return view(given) if isinstance(given, Tensor) else [view(tensor) for tensor in given]


def _name_of(op: Any) -> Any:
    """Return an operation without the wrapper that options have around it."""
    return getattr(op, "op", op)
