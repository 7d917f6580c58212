"""Sums of sparse tensors: every rank gathers the elements of all ranks, and adds those with the same index."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradwire.collectives.communicator import Communicator
from gradwire.collectives.engine.work import Work


def added(indices: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the coalesced sparse tensor in which the elements with the same index are added. indices: (dimensions, elements)."""
    made = torch.sparse_coo_tensor(indices, values, tuple(shape), device=values.device, check_invariants=False)
    return made.coalesce()


def begin_sum(
    communicator: Communicator,
    indices: Tensor,
    values: Tensor,
    counts: Sequence[int],
    shape: Sequence[int],
    dtype: torch.dtype | None = None,
) -> tuple[list[Work], Callable[[], Tensor]]:
    """Begin to add the elements of all ranks' sparse tensors of one shape. Return the running Works, and a function that returns
    the sum, a coalesced sparse tensor, when they are done.

    indices: (elements, dimensions) of int64. values: an element has this rank's value, or row of values, in its first dimension.
    counts: the number of elements of each rank. dtype: that in which values are added, if it is not that in which they are sent.
    """
    parts = [(part, part.new_empty((sum(counts), *part.shape[1:]))) for part in (indices, values)]
    works = [
        communicator.allgather(list(everyones.split(list(counts))), mine.contiguous(), async_op=True)
        for mine, everyones in parts
        if sum(counts)
    ]
    (_, all_indices), (_, all_values) = parts
    return works, lambda: added(all_indices.t(), all_values.to(dtype or values.dtype), shape)
