"""A piece: the elements of a parameter that one rank steps, and their places in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Parts of a parameter, from one element up to another, counted in the order of its memory."""

LOST = "gradwire_owed"
"""The key in the state of a piece for the error of codes: the part of the updates that the parameter misses."""


@dataclass
class Piece:
    """The elements of a parameter that this rank steps. tensor: the elements in `ranges`, with one dimension; a view of the
    parameter if there is one range and `lacks` is False.

    by_rank: the ranges of all ranks. lacks: whether codes lose a part of the optimizer's updates, which the parameter then
    misses. If so, the tensor has separate memory, and holds that part between steps.
    """

    parameter: Tensor
    by_rank: tuple[Ranges, ...]
    ranges: Ranges
    lacks: bool
    tensor: Tensor = field(init=False)

    def __post_init__(self) -> None:
        memory = memory_of(self.parameter)
        self.tensor = memory.new_zeros(length(self.ranges)) if self.lacks else in_place(memory, self.ranges)

    def set_lack(self, lost: Tensor | None) -> None:
        """Set the part of the updates that the parameter misses; None sets zero. Does nothing if `lacks` is False."""
        if self.lacks:
            self.tensor.zero_() if lost is None else self.tensor.copy_(lost)


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


def length(ranges: Ranges) -> int:
    """Return how many elements there are in ranges."""
    return sum(stop - start for start, stop in ranges)
