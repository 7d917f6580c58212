"""A shard: the elements of a parameter that one rank steps, and their places in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Parts of a parameter, from one element up to another, counted in the order of its memory."""

RESIDUAL = "gradwire_residual"
"""The key in the state of a shard for its residual: the error of codes, which is added to the optimizer's next update."""


@dataclass
class Shard:
    """The elements of a parameter that this rank steps. tensor: the elements in `ranges`, with one dimension; a view of the
    parameter if there is one range and `has_residual` is False.

    by_rank: the ranges of all ranks. has_residual: whether the optimizer's updates are sent as codes. If so, the tensor has
    separate memory, and holds the residual between steps.
    """

    parameter: Tensor
    by_rank: tuple[Ranges, ...]
    ranges: Ranges
    has_residual: bool
    tensor: Tensor = field(init=False)

    def __post_init__(self) -> None:
        memory = memory_of(self.parameter)
        self.tensor = memory.new_zeros(length(self.ranges)) if self.has_residual else in_place(memory, self.ranges)

    @property
    def is_moved(self) -> bool:
        """Return whether the parameter has been moved to another dtype or device."""
        return (self.parameter.dtype, self.parameter.device) != (self.tensor.dtype, self.tensor.device)

    def set_residual(self, residual: Tensor | None) -> None:
        """Set the residual; None sets zero. Does nothing if `has_residual` is False."""
        if self.has_residual:
            self.tensor.zero_() if residual is None else self.tensor.copy_(residual)


def memory_of(tensor: Tensor) -> Tensor:
    """Return a view of the elements of a dense tensor, in the order of memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def parts_of(flat: Tensor, ranges: Ranges) -> list[Tensor]:
    """Return views of some elements."""
    return [flat[start:stop] for start, stop in ranges]


def taken(flat: Tensor, ranges: Ranges) -> Tensor:
    """Return a copy of some elements, one after the other."""
    return torch.cat(parts_of(flat, ranges)) if ranges else flat.new_empty(0)


def in_place(flat: Tensor, ranges: Ranges) -> Tensor:
    """Return some elements, one after the other: a view if they are contiguous, else a copy."""
    return flat[slice(*ranges[0])] if len(ranges) == 1 else taken(flat, ranges)


def split(values: Tensor, ranges: Ranges) -> list[Tensor]:
    """Split the result of taken() into the parts of each range."""
    return list(values.split([stop - start for start, stop in ranges]))


def overlap(shares: Sequence[slice], span: slice) -> Ranges:
    """Return the ranges of a span of a bucket that are in some shares, counted from the span's beginning."""
    overlaps = ((max(share.start, span.start), min(share.stop, span.stop)) for share in shares)
    return tuple((start - span.start, stop - span.start) for start, stop in overlaps if start < stop)


def shifted(ranges: Ranges, start: int) -> Ranges:
    """Return ranges of a part of memory that begins at `start`, counted from the beginning of the memory."""
    return tuple((start + first, start + stop) for first, stop in ranges)


def length(ranges: Ranges) -> int:
    """Return how many elements there are in ranges."""
    return sum(stop - start for start, stop in ranges)
