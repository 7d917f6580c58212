"""What stands in for torch's backend over NCCL: every verb, on streams, between processes of one host.

An operation waits for all ranks, or for the two of a message. Until they come, it is not done: events after it answer so, and
what needs its result waits. A rank that never comes, or comes with another verb, leaves it so until abort().
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tests.simulated_gpu.clocks import Clock, Gate, closed_gates
from tests.simulated_gpu.cuda import Event, Stream, current_stream
from tests.simulated_gpu.futures import future_after
from tests.simulated_gpu.mail import Mail
from tests.simulated_gpu.memory import device_of, record

Tensors = list[torch.Tensor]

#: From what all ranks have given to what this rank gets.
Compute = Callable[[list[Tensors]], Tensors]

#: torch's operations, by their names in dist.ReduceOp.
_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}


@dataclass
class Operation:
    """One operation of a launch. peer: of a message; None for a collective."""

    verb: str
    inputs: Tensors
    outputs: Tensors
    compute: Compute
    peer: int | None = None


class NcclWork(dist.Work):
    """Stands in for WorkNCCL. It keeps the tensors of an operation on the internal stream until wait()."""

    def __init__(self, finished: Event, outputs: Tensors, kept: Tensors, backend: SimulatedNccl) -> None:
        super().__init__()
        self._finished, self._outputs, self._kept, self._backend = finished, outputs, kept, backend

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.synchronize()
        if self._backend.blocks:
            self._finished.synchronize()
        return True

    def synchronize(self) -> None:
        current_stream(self._finished.device).wait_event(self._finished)
        self._kept = []

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        return self._finished.query()

    def is_success(self) -> bool:
        return self.is_completed() and not self._backend.is_aborted

    def exception(self) -> BaseException | None:
        return None

    def result(self) -> Tensors:
        return self._outputs

    def get_future(self) -> Any:
        return future_after(self._finished, self._outputs)


class SimulatedNccl:
    """Stands in for dist.ProcessGroupNCCL, and for a ProcessGroup with this backend. blocks: as with TORCH_NCCL_BLOCKING_WAIT."""

    supports_coalescing = True

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta | None = None, *, blocks: bool = False
    ) -> None:
        self.blocks = blocks
        self._rank, self._size = rank, size
        self._mail = Mail(store, rank, size)
        self._streams: dict[torch.device, Stream] = {}
        self._group: list[Operation] | None = None
        self._group_is_async = True
        self.is_aborted = False

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return "nccl"

    def _get_backend(self, device: torch.device) -> SimulatedNccl:
        return self

    def _set_default_timeout(self, timeout: timedelta) -> None:
        pass

    def _set_sequence_number_for_group(self) -> None:
        pass

    def get_error(self) -> Any:
        return torch._C._distributed_c10d.ErrorType.SUCCESS

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Wait for all ranks, as making a communicator does."""
        self._stream(device)

    def abort(self) -> None:
        self.is_aborted = True
        self._mail.end()

    def shutdown(self) -> None:
        self._mail.end()

    # Launches

    def _stream(self, device: torch.device) -> Stream:
        if device not in self._streams:
            self._mail.meet(f"connect {device}")
            self._streams[device] = Stream(device, name="NCCL stream")
        return self._streams[device]

    def _add(self, operation: Operation, options: Any = None) -> NcclWork | None:
        is_async = getattr(options, "asyncOp", True)
        tensors = operation.inputs + operation.outputs
        devices = {device_of(each) for each in tensors}
        if None in devices or len(devices) != 1 or not all(each.is_contiguous() for each in tensors):
            raise RuntimeError(f"NCCL {operation.verb} of tensors on {devices}: contiguous ones on one GPU are needed")
        if self._group is not None:
            self._group.append(operation)
            self._group_is_async = is_async
            return None
        return self._launch([operation], is_async)

    def _launch(self, operations: list[Operation], is_async: bool) -> NcclWork:
        if self.is_aborted:
            raise RuntimeError("[Rank 0] NCCL communicator was aborted.")
        tensors = [each for operation in operations for each in operation.inputs + operation.outputs]
        device = device_of(tensors[0])
        assert device is not None
        internal, here = self._stream(device), current_stream(device)
        if is_async:
            internal.wait_stream(here)
        stream = internal if is_async else here
        gate, before = Gate(), stream.clock
        clock = stream.launch(gate)
        inputs = [each for operation in operations for each in operation.inputs]
        outputs = [each for operation in operations for each in operation.outputs]
        record(f"NCCL {' and '.join(sorted({each.verb for each in operations}))}", stream, clock, inputs, outputs)
        self._mail.submit(partial(self._exchange, operations, before), gate.open)
        return NcclWork(stream.record_event(), outputs, tensors if is_async else [], self)

    def _exchange(self, operations: list[Operation], before: Clock) -> None:
        """Move the data, on the mail's thread. before: what must be done first."""
        for gate in closed_gates(before):
            gate.pass_through()
        sends = [each for each in operations if each.peer is not None and each.inputs]
        for each in sends:
            self._mail.send(each.peer, each.inputs)
        for each in operations:
            if each.peer is None:
                got = each.compute(self._mail.gather(each.verb, each.inputs))
            else:
                got = self._mail.receive(each.peer) if each.outputs else []
            for output, value in zip(each.outputs, got, strict=True):
                output.copy_(value.view(output.shape))
        for each in sends:
            self._mail.await_receipt(each.peer)

    def _start_coalescing(self, *_: Any) -> None:
        self._group = []

    def _end_coalescing(self, *_: Any) -> NcclWork | None:
        assert self._group is not None
        operations, self._group = self._group, None
        return self._launch(operations, self._group_is_async) if operations else None

    # Verbs. Each gives what this rank reads and writes, and how what it gets follows from what all ranks give.

    def _run(self, verb: str, inputs: Tensors, outputs: Tensors, compute: Compute, options: Any = None) -> Any:
        return self._add(Operation(verb, inputs, outputs, compute), options)

    def _all(self, options: Any, given: Sequence[Tensors]) -> Tensors:
        """Reduce the tensors that all ranks give, one by one."""
        op = dist.ReduceOp.SUM if options is None else options.reduceOp
        name = next(each for each in _COMBINE if op == getattr(dist.ReduceOp, each))
        results = [functools.reduce(_COMBINE[name], parts) for parts in zip(*given, strict=True)]
        return [each / self._size for each in results] if name == "AVG" else results

    def allreduce(self, tensors: Tensors, options: Any = None) -> Any:
        return self._run("allreduce", tensors, tensors, lambda given: self._all(options, given), options)

    def reduce(self, tensors: Tensors, options: Any) -> Any:
        if options.rootRank != self._rank:
            return self._run("reduce", tensors, [], lambda given: [], options)
        return self._run("reduce", tensors, tensors, lambda given: self._all(options, given), options)

    def broadcast(self, tensors: Tensors, options: Any) -> Any:
        if options.rootRank == self._rank:
            return self._run("broadcast", tensors, [], lambda given: [], options)
        return self._run("broadcast", [], tensors, lambda given: given[options.rootRank], options)

    def _allgather_base(self, output: torch.Tensor, source: torch.Tensor, options: Any = None) -> Any:
        return self.allgather_into_tensor_coalesced([output], [source], options)

    def allgather(self, outputs: list[Tensors], sources: Tensors, options: Any = None) -> Any:
        return self._run("allgather", sources, outputs[0], lambda given: [each for (each,) in given], options)

    def allgather_into_tensor_coalesced(self, outputs: Tensors, sources: Tensors, options: Any = None) -> Any:
        def joined(given: list[Tensors]) -> Tensors:
            return [torch.cat(parts) for parts in zip(*given, strict=True)]

        return self._run("allgather", sources, outputs, joined, options)

    def _reduce_scatter_base(self, output: torch.Tensor, source: torch.Tensor, options: Any = None) -> Any:
        return self.reduce_scatter_tensor_coalesced([output], [source], options)

    def reduce_scatter(self, outputs: Tensors, sources: list[Tensors], options: Any = None) -> Any:
        def own(given: list[Tensors]) -> Tensors:
            return self._all(options, [[each[self._rank]] for each in given])

        return self._run("reduce_scatter", sources[0], outputs, own, options)

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, sources: Tensors, options: Any = None) -> Any:
        def own(given: list[Tensors]) -> Tensors:
            return [whole.view(self._size, -1)[self._rank] for whole in self._all(options, given)]

        return self._run("reduce_scatter", sources, outputs, own, options)

    def gather(self, outputs: list[Tensors], sources: Tensors, options: Any) -> Any:
        if options.rootRank != self._rank:
            return self._run("gather", sources, [], lambda given: [], options)
        return self._run("gather", sources, outputs[0], lambda given: [each for (each,) in given], options)

    def scatter(self, outputs: Tensors, sources: list[Tensors], options: Any) -> Any:
        parts = sources[0] if options.rootRank == self._rank else []
        return self._run("scatter", parts, outputs, lambda given: [given[options.rootRank][self._rank]], options)

    def alltoall_base(
        self, output: torch.Tensor, source: torch.Tensor, received: list[int], sent: list[int], options: Any = None
    ) -> Any:
        outputs, inputs = [
            list(whole.split(lengths) if lengths else whole.tensor_split(self._size))  # type: ignore[no-untyped-call]
            for whole, lengths in ((output, received), (source, sent))
        ]
        return self.alltoall(outputs, inputs, options)

    def alltoall(self, outputs: Tensors, sources: Tensors, options: Any = None) -> Any:
        return self._run("alltoall", sources, outputs, lambda given: [each[self._rank] for each in given], options)

    def barrier(self, options: Any = None) -> Any:
        return self._run("barrier", [torch.zeros(1, device="cuda")], [], lambda given: [], options)

    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> Any:
        return self._add(Operation("send", tensors, [], lambda given: [], peer))

    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> Any:
        return self._add(Operation("recv", [], tensors, lambda given: [], peer))

    allreduce_coalesced = allreduce
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base
