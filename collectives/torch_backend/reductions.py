"""Synchronous reductions of torch.distributed for which there is no schedule: each rank gathers the tensors of all
ranks, and reduces them itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.collectives.communicator import Communicator
from gradwire.collectives.sparse import begin_sum

_Combine = Callable[[Tensor, Tensor], Tensor]

#: The functions of the reductions of bits.
BITWISE: dict[Any, _Combine] = {
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


def allreduce_bits(communicator: Communicator, tensor: Tensor, combine: _Combine) -> None:
    """Combine the bits of all ranks' tensors, in place and in rank order. combine: from BITWISE. Raises TypeError for
    a tensor of floating-point or complex numbers."""
    if tensor.dtype.is_floating_point or tensor.is_complex():
        raise TypeError(
            f"rank {communicator.rank}: {combine.__name__} needs a tensor of integers, not of {tensor.dtype}"
        )
    every = tensor.new_empty((communicator.size, *tensor.shape))
    communicator.allgather(every, tensor)
    tensor.detach().copy_(reduce(combine, every))


def allreduce_sparse(communicator: Communicator, tensor: Tensor, op: Any) -> None:
    """Sum or average sparse COO tensors of one shape, in place. Raises ValueError for another operation."""
    if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        raise ValueError(f"rank {communicator.rank}: a sparse tensor can be summed and averaged, not reduced by {op}")
    mine = tensor.detach().coalesce()
    counts = torch.empty(communicator.size, dtype=torch.int64, device="cpu")
    communicator.allgather(counts, torch.tensor([mine._nnz()], dtype=torch.int64, device="cpu"))
    works, total = begin_sum(communicator, mine.indices().t(), mine.values(), counts.tolist(), tensor.shape)
    for work in works:
        work.wait()
    with torch.no_grad():
        tensor.copy_(total() / communicator.size if op == dist.ReduceOp.AVG else total())
