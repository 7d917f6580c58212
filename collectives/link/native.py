"""The backend's own collectives: what algorithm='native' runs, and the peer that ours are measured against.

Reductions take what `_reducible` returns, and `_settle` turns that back; whatever only moves data takes every dtype, as bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from gradwire.collectives import torch_internals
from gradwire.collectives.link.base import Request
from gradwire.collectives.plan.algorithms import PLANNERS
from gradwire.collectives.reduction import finish
from gradwire.collectives.torch_internals import Backend

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

#: What a transport over such backends offers: every verb.
ALGORITHMS = dict.fromkeys(PLANNERS, (NATIVE,))

#: Starts what it is called with, and returns when that is done.
Complete = Callable[[Callable[[], "dist.Work | None"]], None]


def perform(
    request: Request, backend: Backend, source: torch.Tensor, destination: torch.Tensor, complete: Complete
) -> None:
    """Do a verb as the backend does it. Source and destination as Whole.run has them."""
    if request.verb not in ("allreduce", "reduce", "reduce_scatter"):
        complete(lambda: _start(request, backend, source.view(torch.uint8), destination.view(torch.uint8)))
        return
    landed = moved = _reducible(source, request.op)
    if request.verb == "reduce_scatter":
        landed = torch.empty(destination.numel(), dtype=moved.dtype, device=moved.device)
    complete(lambda: _start(request, backend, moved, landed))
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


def _start(request: Request, backend: Backend, source: torch.Tensor, destination: torch.Tensor) -> Any:
    """Start a verb; return its Work."""
    match request.verb:
        case "allreduce":
            return backend.allreduce([destination], _options(dist.AllreduceOptions(), request))
        case "reduce":
            return backend.reduce([destination], _options(dist.ReduceOptions(), request))
        case "reduce_scatter":
            options = _options(dist.ReduceScatterOptions(), request)
            return torch_internals.reduce_scatter(backend, destination, source, options)
        case "allgather":
            return torch_internals.allgather(backend, destination, source)
        case "broadcast":
            return backend.broadcast([destination], _options(dist.BroadcastOptions(), request))
        case "gather":
            return backend.gather(
                _parts(request, backend, destination), [source], _options(dist.GatherOptions(), request)
            )
        case "scatter":
            options = _options(dist.ScatterOptions(), request)
            return backend.scatter([destination], _parts(request, backend, source), options)
        case "alltoall":
            incoming = [length * request.dtype.itemsize for length in request.destination_lengths]
            outgoing = [length * request.dtype.itemsize for length in request.source_lengths]
            return backend.alltoall_base(destination, source, incoming, outgoing, dist.AllToAllOptions())
        case _:
            return backend.barrier(dist.BarrierOptions())


def _options(options: Any, request: Request) -> Any:
    """Fill in what such options have of a request."""
    if hasattr(options, "reduceOp"):
        options.reduceOp = _OPS[request.op]
    if hasattr(options, "rootRank"):
        options.rootRank = request.root
    return options


def _parts(request: Request, backend: Backend, buffer: torch.Tensor) -> list[list[torch.Tensor]]:
    """Return what belongs to each rank of the root's buffer, in a list as backends take it; nothing elsewhere."""
    return [list(buffer.view(backend.size(), -1))] if backend.rank() == request.root else []
