"""The collectives of torch.distributed's backends, gloo and NCCL, which algorithm='native' runs.

`reducible` converts a tensor to one that a backend can reduce, and `settle` converts the result back. Verbs that only move data
send any dtype as bytes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from gradwire.collectives import torch_internals
from gradwire.collectives.control.membership import ROUNDING_S
from gradwire.collectives.errors import LinkError
from gradwire.collectives.reduction import TORCH_OPS, finish
from gradwire.collectives.torch_internals import Backend
from gradwire.collectives.transports.base import Operation

#: gloo's AVG is wrong on some paths. NCCL's multiplies each contribution by 1/n before it adds them, which rounds otherwise than
#: the division of the sum on all other links. So finish() divides.
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


@contextmanager
def link_errors(peer: int | None = None, deadline: float = math.inf) -> Iterator[None]:
    """Raise LinkError for a backend's RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        raise link_error(error, peer, timed_out=time.monotonic() >= deadline - ROUNDING_S) from None


def link_error(error: BaseException, peer: int | None = None, *, timed_out: bool = False) -> LinkError:
    """Return the LinkError for a backend's error, with the first sentence of its message and without its source line."""
    detail = str(error).rpartition("] ")[2].partition(". ")[0].strip()
    return LinkError(peer, timed_out=timed_out, detail=detail)


def options_of(operation: Operation) -> Any:
    """Return the options of an operation's verb."""
    options = _OPTIONS[operation.verb]()
    for name, value in (("reduceOp", _OPS[operation.op]), ("rootRank", operation.root)):
        if hasattr(options, name):
            setattr(options, name, value)
    return options


def start(operation: Operation, options: Any, backend: Backend, source: torch.Tensor, destination: torch.Tensor) -> Any:
    """Start a verb of a backend, on tensors from perform(). Return its Work, or None if it runs on the current stream."""

    def parts(buffer: torch.Tensor) -> list[list[torch.Tensor]]:
        size = backend.size()
        return [list(buffer.view(size, buffer.numel() // size))] if backend.rank() == operation.root else []

    def cut(buffer: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        width = buffer.numel() // max(1, sum(lengths))  # elements as bytes are longer
        return list(buffer.split([width * length for length in lengths]))

    outgoing, incoming = operation.outgoing, operation.incoming
    match operation.verb:
        case "allreduce" | "broadcast" | "reduce":
            return getattr(backend, operation.verb)([destination], options)
        case "reduce_scatter":
            if is_even(outgoing):
                return torch_internals.reduce_scatter(backend, destination, source, options)
            return backend.reduce_scatter([destination], [cut(source, outgoing)], options)
        case "allgather":
            if is_even(incoming):
                return torch_internals.allgather(backend, destination, source, options)
            return backend.allgather([cut(destination, incoming)], [source], options)
        case "gather":
            return backend.gather(parts(destination), [source], options)
        case "scatter":
            return backend.scatter([destination], parts(source), options)
        case "alltoall":
            width = operation.dtype.itemsize
            landed, sent = ([width * length for length in lengths] for lengths in (incoming, outgoing))
            return backend.alltoall_base(destination, source, landed, sent, options)
        case _:
            return backend.barrier(options)


def is_even(lengths: Sequence[int]) -> bool:
    """Return whether the ranks have parts of equal lengths; none are given if they have."""
    return all(one == other for one, other in pairwise(lengths))


def perform(
    operation: Operation,
    backend: Backend,
    source: torch.Tensor,
    destination: torch.Tensor,
    run: Callable[[torch.Tensor, torch.Tensor], object],
) -> None:
    """Run a verb of a backend by a function that gets what start() needs. source, destination: see Operation, both 1-D and
    without autograd history."""
    if operation.verb not in ("allreduce", "reduce", "reduce_scatter"):
        run(source.view(torch.uint8), destination.view(torch.uint8))
        return
    moved = landed = reducible(source, operation.op)
    if operation.verb == "reduce_scatter":
        landed = destination
        if moved.dtype is not destination.dtype:
            landed = torch.empty(destination.numel(), dtype=moved.dtype, device=moved.device)
    run(moved, landed)
    if operation.verb == "reduce" and backend.rank() != operation.root:
        return
    if landed is not destination:
        settle(destination, landed)
    finish(destination, operation.op, backend.size())


def perform_group(
    op: str, backend: Backend, tensors: Sequence[torch.Tensor], run: Callable[[list[torch.Tensor]], object]
) -> None:
    """Allreduce several tensors of one dtype and device in place by a function that reduces the tensors that it gets."""
    moved = [reducible(tensor, op) for tensor in tensors]
    run(moved)
    for tensor, landed in zip(tensors, moved, strict=True):
        if landed is not tensor:
            settle(tensor, landed)
    if op == "average" and tensors[0].dtype.is_floating_point:
        torch._foreach_div_(list(tensors), backend.size())
        return
    for tensor in tensors:
        finish(tensor, op, backend.size())


def reducible(tensor: torch.Tensor, op: str) -> torch.Tensor:
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


def settle(tensor: torch.Tensor, moved: torch.Tensor) -> None:
    """Write the reduced result `moved` to a tensor, after the inverse of `reducible`."""
    if tensor.dtype.is_floating_point and not moved.dtype.is_floating_point:
        moved = _reordered(moved.to(_BITS[tensor.itemsize])).view(tensor.dtype)
    tensor.copy_(moved)


def _reordered(bits: torch.Tensor) -> torch.Tensor:
    """Map the bits of floating-point numbers to integers in the same order, and back: for negative numbers, larger bits mean
    smaller numbers."""
    limits = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (limits.bits - 1)) & limits.max)
