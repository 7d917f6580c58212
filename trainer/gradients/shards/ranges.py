"""The elements of a parameter that a rank steps, its piece, and their places in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Parts of a parameter, from one element up to another, counted in the order of its memory."""

LOST = "gradwire_owed"
"""The name, in the state of a piece, of what codes have lost of each of its elements."""


@dataclass
class Piece:
    """The elements of a parameter that this rank steps: a tensor with one dimension, of the elements in `ranges`; in the
    parameter's own memory if that is one range.

    by_rank: the ranges of all ranks. lacks: whether codes lose a part of the optimizer's updates, so that the parameter lacks
    it. Then the tensor has separate memory, and holds that part between steps.
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
        """Set what the parameter lacks between steps; None for zero. Does nothing without `lacks`."""
        if self.lacks:
            self.tensor.zero_() if lost is None else self.tensor.copy_(lost)


def memory_of(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor in the order in which they lie in memory, in the same memory."""
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
    """Return the parts of what taken() returned."""
    return list(values.split([stop - start for start, stop in ranges]))


def overlap(shares: Sequence[slice], span: slice) -> Ranges:
    """Return the ranges of a span of a bucket that are in some shares, counted from the span's beginning."""
    overlaps = ((max(share.start, span.start), min(share.stop, span.stop)) for share in shares)
    return tuple((start - span.start, stop - span.start) for start, stop in overlaps if start < stop)


def length(ranges: Ranges) -> int:
    """Return how many elements there are in ranges."""
    return sum(stop - start for start, stop in ranges)
