"""The backend's own collectives: what algorithm='native' runs, and the peer that ours are measured against.

Reductions take what `_reducible` returns, and `_settle` turns that back; whatever only moves data takes every dtype, as bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from collectives import torch_internals
from collectives.link.base import Request
from collectives.reduction import finish
from collectives.torch_internals import Backend

NATIVE = "native"

_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "average": dist.ReduceOp.SUM,  # gloo's AVG is wrong on some paths: divided afterwards
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

#: Starts what it is called with, and returns when that is done.
Complete = Callable[[Callable[[], "dist.Work | None"]], None]


def perform(
    request: Request, backend: Backend, source: torch.Tensor, destination: torch.Tensor, complete: Complete
) -> None:
    """Do a verb as the backend does it. Source and destination as Whole.run has them."""
    start = _VERBS[request.verb]
    if request.verb not in _REDUCING:
        complete(lambda: start(request, backend, _bytes(source), _bytes(destination)))
        return
    landed = moved = _reducible(source, request.op)
    if request.verb == "reduce_scatter":
        landed = torch.empty(destination.numel(), dtype=moved.dtype, device=moved.device)
    complete(lambda: start(request, backend, moved, landed))
    _settle(destination, landed)
    finish(destination, request.op, backend.size())


def _reducible(tensor: torch.Tensor, op: str) -> torch.Tensor:
    """Return what the backend can reduce in place of a tensor: itself, a view, or a copy in another dtype.

    The backends' own min and max lose a NaN where another rank has a number, so floating-point numbers go as integers in the
    same order, with NaN at the end that wins.
    """
    moved = tensor
    if op in ("min", "max") and moved.dtype.is_floating_point:
        ordered = _reordered(moved.view(_BITS[moved.dtype]))
        limits = torch.iinfo(ordered.dtype)
        moved = ordered.masked_fill_(moved.isnan(), limits.max if op == "max" else limits.min)
    return moved.to(_WIDENED.get(moved.dtype, moved.dtype))


def _settle(tensor: torch.Tensor, moved: torch.Tensor) -> None:
    """Write to a tensor what came of its, or its like's, `_reducible`."""
    if tensor.dtype.is_floating_point and not moved.dtype.is_floating_point:
        moved = _reordered(moved.to(_BITS[tensor.dtype])).view(tensor.dtype)
    tensor.copy_(moved)


def _reordered(bits: torch.Tensor) -> torch.Tensor:
    """Return the bits of floating-point numbers as integers in the order of the numbers, and these back: below zero, bits
    count down."""
    limits = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (limits.bits - 1)) & limits.max)


def _bytes(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(torch.uint8)


def _allreduce(request: Request, backend: Backend, source: torch.Tensor, destination: torch.Tensor) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = _OPS[request.op]
    return backend.allreduce([destination], options)


def _reduce(request: Request, backend: Backend, source: torch.Tensor, destination: torch.Tensor) -> Any:
    options = dist.ReduceOptions()
    options.reduceOp = _OPS[request.op]
    options.rootRank = request.root
    return backend.reduce([destination], options)


def _reduce_scatter(request: Request, backend: Backend, source: torch.Tensor, destination: torch.Tensor) -> Any:
    options = dist.ReduceScatterOptions()
    options.reduceOp = _OPS[request.op]
    return torch_internals.reduce_scatter(backend, destination, source, options)


def _allgather(request: Request, backend: Backend, source: torch.Tensor, destination: torch.Tensor) -> Any:
    return torch_internals.allgather(backend, destination, source)


def _broadcast(request: Request, backend: Backend, source: torch.Tensor, destination: torch.Tensor) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = request.root
    return backend.broadcast([destination], options)


def _gather(request: Request, backend: Backend, source: torch.Tensor, destination: torch.Tensor) -> Any:
    options = dist.GatherOptions()
    options.rootRank = request.root
    return backend.gather([pieces] if (pieces := _pieces(request, backend, destination)) else [], [source], options)


def _scatter(request: Request, backend: Backend, source: torch.Tensor, destination: torch.Tensor) -> Any:
    options = dist.ScatterOptions()
    options.rootRank = request.root
    return backend.scatter([destination], [pieces] if (pieces := _pieces(request, backend, source)) else [], options)


def _pieces(request: Request, backend: Backend, parts: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return what belongs to each rank of the root's buffer of all parts; nothing elsewhere."""
    return list(parts.view(backend.size(), -1)) if backend.rank() == request.root else []


def _alltoall(request: Request, backend: Backend, source: torch.Tensor, destination: torch.Tensor) -> Any:
    itemsize = request.dtype.itemsize
    incoming = [length * itemsize for length in request.destination_lengths]
    outgoing = [length * itemsize for length in request.source_lengths]
    return backend.alltoall_base(destination, source, incoming, outgoing, dist.AllToAllOptions())


def _barrier(request: Request, backend: Backend, source: torch.Tensor, destination: torch.Tensor) -> Any:
    return backend.barrier(dist.BarrierOptions())


_REDUCING = ("allreduce", "reduce", "reduce_scatter")

_VERBS: dict[str, Callable[[Request, Backend, torch.Tensor, torch.Tensor], Any]] = {
    "allreduce": _allreduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "allgather": _allgather,
    "broadcast": _broadcast,
    "gather": _gather,
    "scatter": _scatter,
    "alltoall": _alltoall,
    "barrier": _barrier,
}

#: What a transport over such backends offers.
ALGORITHMS = dict.fromkeys(_VERBS, (NATIVE,))
