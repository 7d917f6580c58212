"""The process group that torch.distributed makes for the backend "gradwire".

torch calls its methods from Python and from C++ (DDP's reducer, functional collectives). Some methods have other names
in older versions of torch: the class defines the newer name, and makes the older name an alias.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial, wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from gradwire.collectives import cores
from gradwire.collectives.communicator import Communicator, abandon_all, close_all
from gradwire.collectives.control.attempt import Attempt, Meetings
from gradwire.collectives.control.membership import Membership, coming_together
from gradwire.collectives.end_of_backward import EndOfBackward, is_delayable
from gradwire.collectives.engine.point_to_point import MessageWork
from gradwire.collectives.environment import TORCH_BACKEND
from gradwire.collectives.schedules.topology import host_id
from gradwire.collectives.torch_backend.reductions import BITWISE, allreduce_bits, allreduce_sparse
from gradwire.collectives.torch_backend.work import GradwireWork, Mover
from gradwire.collectives.torch_internals import ProcessGroup, nccl_group, profiling, uncompiled
from gradwire.collectives.transports.nccl import NcclConnections

_Method = TypeVar("_Method", bound=Callable[..., Any])

#: Methods that only two ranks call. NCCL connects these two by itself.
_OF_TWO_RANKS = ("send", "recv", "recv_anysource")

#: The names that torch up to 2.12 has for verbs, by their newer names.
_OLDER_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}


def _verb(name: str, verb: str = "", *, may_delay: bool = False) -> Callable[[_Method], _Method]:
    """Return a decorator for the methods that torch calls for its verbs. Calls with CUDA tensors go to NCCL. For other
    calls, profilers record a range with this name, which gloo also uses, and handles of coalesced calls are kept. Exchanges that
    are delayed to the end of backward() begin before. verb: the method's name, if it is not that of the decorated function.
    may_delay: whether the method decides by itself whether they begin."""

    def decorate(method: _Method) -> _Method:
        @uncompiled  # DDP calls it inside of a compiled model
        def call(self: GradwireGroup, *arguments: Any, **options: Any) -> GradwireWork:
            if (device := _device_of(arguments)) is not None:
                ours = verb or method.__name__
                nccl = self.nccl(None if ours in _OF_TWO_RANKS else device)
                theirs = ours if hasattr(nccl, ours) else _OLDER_NAMES[ours]
                return getattr(nccl, theirs)(*arguments, **options)  # type: ignore[no-any-return]
            if not may_delay:
                self._end_of_backward.begin()
            with profiling(f"{TORCH_BACKEND}:{name}"):
                work: GradwireWork = method(self, *arguments, **options)
            if self._coalesced is not None:
                self._coalesced.append(work)
            return work

        return wraps(method)(call)  # type: ignore[return-value]

    return decorate


class GradwireGroup(ProcessGroup):  # type: ignore[misc]  # torch's stubs know neither its overloads nor its older names
    """A process group of torch.distributed that moves CPU tensors through shared memory inside a host, and over TCP
    between hosts.

    Operations run in the order of the calls, one at a time. Messages have a separate Communicator, so a message that is
    not received yet delays no operation. CUDA tensors go to an NCCL group, which all ranks make with their first CUDA
    tensor. Errors are gradwire.collectives.CollectiveError, a DistBackendError, and name the ranks at fault.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        global_ranks: tuple[int, ...],
        timeout: timedelta,
        met: Membership | None = None,
    ) -> None:
        """Connect to the other ranks. store: used only by these ranks. rank: this rank's place in global_ranks.
        timeout: that of connecting, and of each operation. met: the Membership of the ranks, if they have met outside of
        torch.distributed. Raises CollectiveError if the ranks do not connect."""
        super().__init__(rank, len(global_ranks))
        self._store = store
        self._name = ""
        self._timeout = timeout
        self._nccl: dist.ProcessGroup | None = None
        self._coalesced: list[GradwireWork] | None = None
        self._mover = Mover()
        timeout_s = timeout.total_seconds()
        self._meetings = (
            None if dist.is_initialized() else Meetings.of(self)
        )  # those of the default group, which this one is
        if met is None:
            meetings = self._meetings or Meetings.of_default_group()
            met = Attempt(store, TORCH_BACKEND, rank, global_ranks, meetings).meet(("cpu",), host_id(), timeout_s)
        met = replace(met, device_types=("cpu",))
        opened = met.opened()
        self._own_store = opened.store  # fresh: `store` may hold keys of the processes before a restart
        try:
            self._communicator, self._messages = (
                Communicator(met.subset(range(len(global_ranks)), purpose), timeout_s=timeout_s)
                for purpose in ("operations", "messages")
            )
        except BaseException:
            self._release()
            raise
        finally:
            opened.channel.close()
        self._end_of_backward = EndOfBackward()

    def nccl(self, device: torch.device | None = None) -> dist.ProcessGroup:
        """Return the NCCL group for CUDA tensors. The first call for each device is collective. Raises CollectiveError if NCCL
        does not connect the ranks on the device within the group's timeout."""
        if self._nccl is None:
            self._nccl = nccl_group(PrefixStore("nccl", self._own_store), self.rank(), self.size(), self._timeout)
            self._connections = NcclConnections(self._nccl._get_backend(torch.device("cuda")))
        if device is not None:
            timeout_s = self._timeout.total_seconds()
            with coming_together(self.rank(), timeout_s, operation=f"the first operation on {device}"):
                self._connections.connect(device, time.monotonic() + timeout_s)
        return self._nccl

    # Reductions

    @property
    def _has_no_core_beside(self) -> bool:
        """Return whether all ranks are on one host, and an exchange beside backward() would take a core from it."""
        communicator = self._communicator
        is_inside = communicator.shares_memory and len(communicator.topology.hosts) == 1
        return is_inside and not cores.suffice(communicator.size, 1 + torch.get_num_threads())

    def _real(self, tensor: Tensor, op: Any) -> Tensor:
        """Return a tensor to be reduced; if it is complex, a view of it as pairs of real numbers. Raises TypeError for a complex
        tensor if the operation is another one on complex numbers than on these pairs."""
        if not tensor.is_complex():
            return tensor
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise TypeError(f"rank {self.rank()}: a complex tensor can be summed and averaged, not reduced by {op}")
        return torch.view_as_real(tensor)

    @_verb("all_reduce", may_delay=True)
    def allreduce(self, tensors: Sequence[Tensor] | Tensor, opts: Any = None) -> GradwireWork:
        """Reduce a tensor in place, to the same bits on all ranks. tensors: a list of it, or in DDP's join(), the tensor."""
        opts = opts or dist.AllreduceOptions()
        (tensor,) = tensors = _tensors(tensors)
        op = _name_of(opts.reduceOp)
        is_async, is_plain = _is_async(opts), not (tensor.is_sparse or op in BITWISE)
        called = sys._getframe(1)  # that of call() in _verb()
        is_delayed = is_async and is_plain and is_delayable(called) and self._has_no_core_beside
        if not is_delayed:
            self._end_of_backward.begin()
        if is_plain:
            part = self._communicator.allreduce(self._real(tensor, op), op, async_op=is_async, awaited=is_delayed)
            work = GradwireWork(tensors, part, awaited=is_delayed)
            if is_delayed:
                self._end_of_backward.add(work.finish, work.settle)
            return work
        if tensor.is_sparse:
            allreduce_sparse(self._communicator, tensor, op)
        else:
            allreduce_bits(self._communicator, tensor, BITWISE[op])
        return GradwireWork(tensors)

    @_verb("all_reduce_coalesced")
    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> GradwireWork:
        """Reduce several tensors in place, as one operation."""
        opts = opts or dist.AllreduceCoalescedOptions()
        op = _name_of(opts.reduceOp)
        moved = [self._real(tensor, op) for tensor in tensors]
        return GradwireWork(tensors, self._communicator.grouped_allreduce(moved, op, async_op=_is_async(opts)))

    @_verb("reduce")
    def reduce(self, tensors: Sequence[Tensor], opts: Any = None) -> GradwireWork:
        """Reduce a tensor in place on the root."""
        opts = opts or dist.ReduceOptions()
        (tensor,) = tensors
        op = _name_of(opts.reduceOp)
        work = self._communicator.reduce(self._real(tensor, op), opts.rootRank, op, async_op=_is_async(opts))
        return GradwireWork(tensors, work)

    def _reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Any], opts: Any = None) -> GradwireWork:
        """Do reduce_scatter_single() for several tensors. An input may be a list of its parts."""
        opts = opts or dist.ReduceScatterOptions()
        op, is_async = _name_of(opts.reduceOp), _is_async(opts)
        works = [
            self._communicator.reduce_scatter(
                self._real(output, op),
                self._real(given, op) if isinstance(given, Tensor) else [self._real(part, op) for part in given],
                op,
                async_op=is_async,
            )
            for output, given in zip(outputs, inputs, strict=True)
        ]
        return GradwireWork(outputs, *works)

    reduce_scatter = _verb("reduce_scatter", "reduce_scatter")(_reduce_scatter)
    reduce_scatter_single_coalesced = _verb("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced")(
        _reduce_scatter
    )

    @_verb("_reduce_scatter_base")
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> GradwireWork:
        """Reduce the inputs of all ranks, and write the r-th part of the result to the output of rank r."""
        return self._reduce_scatter([output], [input], opts)

    # Movement

    @_verb("broadcast")
    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> GradwireWork:
        """Copy the root's tensor to the tensors of all ranks."""
        opts = opts or dist.BroadcastOptions()
        (tensor,) = tensors
        return GradwireWork(tensors, self._communicator.broadcast(tensor, opts.rootRank, async_op=_is_async(opts)))

    def _allgather(self, outputs: Sequence[Any], inputs: Sequence[Tensor], opts: Any = None) -> GradwireWork:
        """Do all_gather_single() for several tensors. An output may be a list of tensors by rank, whose sizes may differ."""
        pairs, is_async = zip(outputs, inputs, strict=True), _is_async(opts)
        return GradwireWork(outputs, *(self._communicator.allgather(*pair, async_op=is_async) for pair in pairs))

    allgather = _verb("all_gather", "allgather")(_allgather)
    all_gather_single_coalesced = _verb("all_gather_into_tensor_coalesced", "all_gather_single_coalesced")(_allgather)

    @_verb("all_gather_coalesced")
    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> GradwireWork:
        """Gather several tensors of every rank. outputs: by rank, a list of that rank's tensors."""
        return self._allgather(list(map(list, zip(*outputs, strict=True))), inputs, opts)

    @_verb("_all_gather_base")
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> GradwireWork:
        """Gather every rank's tensor into one tensor, in rank order."""
        return self._allgather([output], [input], opts)

    @_verb("gather")
    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> GradwireWork:
        """Gather every rank's tensor into a list on the root, by rank."""
        opts = opts or dist.GatherOptions()
        (given,), lists = inputs, _tensors(outputs)
        work = self._communicator.gather(given, lists, opts.rootRank, async_op=_is_async(opts))
        return GradwireWork(lists, work)

    @_verb("scatter")
    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> GradwireWork:
        """Copy the r-th tensor of the root's list to the output of rank r."""
        opts = opts or dist.ScatterOptions()
        (output,) = outputs
        work = self._communicator.scatter(output, _tensors(inputs), opts.rootRank, async_op=_is_async(opts))
        return GradwireWork(outputs, work)

    @_verb("all_to_all")
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
    ) -> GradwireWork:
        """Send the r-th part of the input to rank r. Splits: the rows of each part; by default, parts are equal."""
        splits: list[Sequence[int] | None] = [None, None]
        if output_splits or input_splits:
            both = (output, output_splits), (input, input_splits)
            splits = [given or [len(tensor) // self.size()] * self.size() for tensor, given in both]
        return GradwireWork([output], self._communicator.alltoall(output, input, *splits, async_op=_is_async(opts)))

    @_verb("all_to_all")
    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> GradwireWork:
        """Send the r-th input to rank r, which has one output per rank. The operation is synchronous."""
        sent = torch.cat([tensor.detach().flatten() for tensor in inputs])
        received_lengths, sent_lengths = ([tensor.numel() for tensor in tensors] for tensors in (outputs, inputs))
        received = sent.new_empty(sum(received_lengths))
        self._communicator.alltoall(received, sent, received_lengths, sent_lengths)
        for tensor, part in zip(outputs, received.split(received_lengths), strict=True):
            tensor.detach().copy_(part.view(tensor.shape))
        return GradwireWork(outputs)

    # Barriers

    @_verb("barrier")
    def barrier(self, opts: Any = None) -> GradwireWork:
        """Complete when every rank has called this."""
        opts = opts or dist.BarrierOptions()
        return GradwireWork([], self._communicator.barrier(timeout_s=_seconds(opts.timeout), async_op=_is_async(opts)))

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until every rank has called this. Raises CollectiveTimeout with all missing ranks in any case."""
        self._communicator.barrier(timeout_s=_seconds(timeout))

    # Messages

    @_verb("send")
    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> GradwireWork:
        """Begin to send a tensor to a rank."""
        (tensor,) = tensors
        return self._message(tensors, self._messages.isend(tensor, peer, tag))

    @_verb("recv")
    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> GradwireWork:
        """Begin to receive a tensor from a rank."""
        (tensor,) = tensors
        return self._message(tensors, self._messages.irecv(tensor, peer, tag))

    @_verb("recvAnySource")
    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> GradwireWork:
        """Begin to receive a tensor from any rank. Until it has arrived, later messages of this rank wait."""
        (tensor,) = tensors
        return self._message(tensors, self._messages.irecv(tensor, None, tag))

    def _message(self, tensors: Sequence[Tensor], work: MessageWork) -> GradwireWork:
        return GradwireWork(tensors, work, when_done=self._mover.add(work))

    # Other methods that torch calls

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type == "cuda":
            self.nccl(device)._start_coalescing(device)
        else:
            self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Any:
        if device.type == "cuda":
            return self.nccl()._end_coalescing(device)
        works, self._coalesced = self._coalesced or [], None
        return GradwireWork([tensor for work in works for tensor in work.result()], *works)

    def _get_backend(self, device: torch.device) -> Any:
        """Return the object whose capabilities torch reads: this group for the CPU, NCCL's backend for CUDA devices."""
        return self if torch.device(device).type == "cpu" else self.nccl()._get_backend(torch.device(device))

    @property
    def _device_types(self) -> list[torch.device]:
        """Return the types of devices whose tensors the group takes, which torch's checkpoints look for."""
        return [torch.device(kind) for kind in dist.Backend.backend_capability[TORCH_BACKEND]]

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return whether allocate_tensor() makes tensors for a device: only for the CPU."""
        return torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised 1-D CPU tensor, in shared memory if all ranks share a host."""
        return self._communicator.empty(size, dtype=dtype)

    def getBackendName(self) -> str:  # noqa: N802
        """Return the name of the backend in C++."""
        return TORCH_BACKEND

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Store the name by which functional collectives find the group."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name of the group."""
        return self._name

    def get_group_store(self) -> Store:
        """Return the store of the group."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of operations that begin from now on."""
        self._timeout = timeout
        if self._nccl is not None:
            self._nccl._get_backend(torch.device("cuda"))._set_default_timeout(timeout)
        self._communicator.timeout_s = self._messages.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing, because operations are always numbered."""

    def shutdown(self) -> None:
        """Finish all operations, and close the group. torch.distributed.destroy_process_group calls this."""
        self._close(close_all)
        if self._nccl is not None:
            self._nccl.shutdown()

    def abort(self) -> None:
        """Close the group without waiting for other ranks. Their operations fail, with errors that name this rank."""
        self._close(partial(abandon_all, error=RuntimeError("the group was aborted")))
        if self._nccl is not None:
            self._nccl.abort()

    def _close(self, close: Callable[[list[Communicator]], None]) -> None:
        try:
            with self._mover.ending():
                close([self._communicator, self._messages])
        finally:
            self._release()

    def _release(self) -> None:
        """Release the Monitors of the default group, if this is it."""
        if self._meetings is not None:
            self._meetings.release()


for _newer, _older in _OLDER_NAMES.items():
    setattr(GradwireGroup, _older, getattr(GradwireGroup, _newer))


def _seconds(timeout: timedelta | None) -> float | None:
    """Return the timeout of one call in seconds; None for None, 0 or a negative timeout: the group's timeout then
    applies."""
    return timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None


def _tensors(given: Any) -> list[Tensor]:
    """Return all tensors in nested lists or tuples, in order."""
    if isinstance(given, Tensor):
        return [given]
    return [tensor for each in given for tensor in _tensors(each)] if isinstance(given, list | tuple) else []


def _device_of(arguments: Sequence[Any]) -> torch.device | None:
    """Return the device of the first tensor in nested lists or tuples, if it is a CUDA device."""
    for given in arguments:
        while isinstance(given, list | tuple):
            given = given[0] if given else None
        if isinstance(given, Tensor):
            return given.device if given.is_cuda else None
    return None


def _name_of(op: Any) -> Any:
    """Return the reduction inside the wrapper that torch's options contain."""
    return getattr(op, "op", op)


def _is_async(opts: Any) -> bool:
    """Return whether a call with these options is asynchronous, as it is by default."""
    return getattr(opts, "asyncOp", True)
