"""The backend's own collectives: what algorithm='native' runs, and the peer that ours are measured against.

Each function returns a call that starts the operation on a backend. Roots are ranks in the group; tensors are 1-D.
Reductions take what `reducible` returns, and `settle` turns that back; whatever only moves data takes every dtype, as bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from collectives.link.base import Backend
from collectives.reduction import carried

_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "average": dist.ReduceOp.SUM,  # gloo's AVG is wrong on some paths; the caller divides
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}

#: Integers of the width of each floating-point dtype.
_BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}

#: Dtypes that the backends cannot reduce, and what they travel as.
_WIDENED = {torch.int16: torch.int32}

Call = Callable[[Backend], dist.Work | None]


def reducible(tensor: torch.Tensor, op: str) -> tuple[torch.Tensor, str]:
    """A tensor and op that the backend can reduce in place of these: the same, a view, or a copy in another dtype.

    The backends' own min and max lose a NaN where another rank has a number, so floating-point numbers go as integers in the
    same order, with NaN at the end that wins.
    """
    moved, op = carried(tensor, op)
    if op in ("min", "max") and moved.dtype.is_floating_point:
        ordered = _reordered(moved.view(_BITS[moved.dtype]))
        limits = torch.iinfo(ordered.dtype)
        moved = ordered.masked_fill_(moved.isnan(), limits.max if op == "max" else limits.min)
    return moved.to(_WIDENED.get(moved.dtype, moved.dtype)), op


def settle(tensor: torch.Tensor, moved: torch.Tensor) -> None:
    """Write to a tensor what came of its, or its like's, `reducible`."""
    if tensor.dtype.is_floating_point and not moved.dtype.is_floating_point:
        moved = _reordered(moved.to(_BITS[tensor.dtype])).view(tensor.dtype)
    tensor.copy_(moved)


def _reordered(bits: torch.Tensor) -> torch.Tensor:
    """The bits of floating-point numbers as integers in the order of the numbers, and these back: below zero, bits count down."""
    limits = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (limits.bits - 1)) & limits.max)


def _bytes(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(torch.uint8)


def allreduce(tensor: torch.Tensor, op: str) -> Call:
    options = AllreduceOptions()
    options.reduceOp = _OPS[op]
    return lambda backend: backend.allreduce([tensor], options)


def reduce_scatter(output: torch.Tensor, source: torch.Tensor, op: str) -> Call:
    options = ReduceScatterOptions()
    options.reduceOp = _OPS[op]
    return lambda backend: backend._reduce_scatter_base(output, source, options)


def allgather(output: torch.Tensor, source: torch.Tensor) -> Call:
    return lambda backend: backend._allgather_base(_bytes(output), _bytes(source), AllgatherOptions())


def broadcast(tensor: torch.Tensor, root: int) -> Call:
    options = BroadcastOptions()
    options.rootRank = root
    return lambda backend: backend.broadcast([_bytes(tensor)], options)


def reduce(tensor: torch.Tensor, root: int, op: str) -> Call:
    options = ReduceOptions()
    options.reduceOp = _OPS[op]
    options.rootRank = root
    return lambda backend: backend.reduce([tensor], options)


def gather(source: torch.Tensor, pieces: list[torch.Tensor], root: int) -> Call:
    options = GatherOptions()
    options.rootRank = root
    landing = [[_bytes(piece) for piece in pieces]] if pieces else []
    return lambda backend: backend.gather(landing, [_bytes(source)], options)


def scatter(output: torch.Tensor, pieces: list[torch.Tensor], root: int) -> Call:
    options = ScatterOptions()
    options.rootRank = root
    leaving = [[_bytes(piece) for piece in pieces]] if pieces else []
    return lambda backend: backend.scatter([_bytes(output)], leaving, options)


def alltoall(output: torch.Tensor, source: torch.Tensor, output_lengths: list[int], input_lengths: list[int]) -> Call:
    """Lengths in elements, one per rank."""
    incoming = [length * output.element_size() for length in output_lengths]
    outgoing = [length * source.element_size() for length in input_lengths]
    return lambda backend: backend.alltoall_base(_bytes(output), _bytes(source), incoming, outgoing, AllToAllOptions())


def barrier() -> Call:
    return lambda backend: backend.barrier(BarrierOptions())
