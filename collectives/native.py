"""The backend's own collectives behind the same verbs: what algorithm='native' runs, and the peer that we measure against."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "average": dist.ReduceOp.SUM,  # gloo's AVG is wrong on some paths; the caller divides
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}

#: Dtypes that the backends cannot reduce, and what they travel as.
_WIDENED = {torch.int16: torch.int32}

Call = Callable[[], dist.Work | None]

# torch 2.13 gave these two new names and warns about the old ones.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_allgather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def reducible(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy in a dtype that the backend can reduce."""
    return tensor.to(_WIDENED.get(tensor.dtype, tensor.dtype))


def allreduce(group: dist.ProcessGroup, tensor: torch.Tensor, op: str) -> Call:
    return lambda: dist.all_reduce(tensor, _OPS[op], group=group, async_op=True)


def reduce_scatter(group: dist.ProcessGroup, output: torch.Tensor, source: torch.Tensor, op: str) -> Call:
    return lambda: _reduce_scatter(output, source, _OPS[op], group=group, async_op=True)


def allgather(group: dist.ProcessGroup, output: torch.Tensor, source: torch.Tensor) -> Call:
    return lambda: _allgather(output, source, group=group, async_op=True)


def broadcast(group: dist.ProcessGroup, tensor: torch.Tensor, root: int) -> Call:
    return lambda: dist.broadcast(tensor, dist.get_global_rank(group, root), group=group, async_op=True)


def reduce(group: dist.ProcessGroup, tensor: torch.Tensor, root: int, op: str) -> Call:
    return lambda: dist.reduce(tensor, dist.get_global_rank(group, root), _OPS[op], group=group, async_op=True)


def gather(group: dist.ProcessGroup, source: torch.Tensor, output: list[torch.Tensor] | None, root: int) -> Call:
    return lambda: dist.gather(source, output, dist.get_global_rank(group, root), group=group, async_op=True)


def scatter(group: dist.ProcessGroup, output: torch.Tensor, source: list[torch.Tensor] | None, root: int) -> Call:
    return lambda: dist.scatter(output, source, dist.get_global_rank(group, root), group=group, async_op=True)


def alltoall(
    group: dist.ProcessGroup,
    output: torch.Tensor,
    source: torch.Tensor,
    output_lengths: list[int],
    input_lengths: list[int],
) -> Call:
    return lambda: dist.all_to_all_single(output, source, output_lengths, input_lengths, group=group, async_op=True)


def barrier(group: dist.ProcessGroup) -> Call:
    return lambda: dist.barrier(group=group, async_op=True)
