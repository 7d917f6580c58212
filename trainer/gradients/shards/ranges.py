"""Which elements of a parameter a rank steps, its piece, and where they lie."""

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
    """Holds what this rank steps of a parameter: a tensor with one dimension, of the elements that are its `ranges`, in the
    parameter's own memory where these are one.

    by_rank: everyone's ranges, of which these are this rank's. lacks: whether the parameter lacks a part of what the
    optimizer has made of the piece, because codes lose it: then the tensor has memory of its own, and is that part between
    steps.
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
        """Set what the parameter lacks, between steps, where it may lack anything; None for nothing."""
        if self.lacks:
            self.tensor.zero_() if lost is None else self.tensor.copy_(lost)


def memory_of(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor in the order in which they lie in memory, in the same memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def parts_of(flat: Tensor, ranges: Ranges) -> list[Tensor]:
    """Return some elements where they lie."""
    return [flat[start:stop] for start, stop in ranges]


def taken(flat: Tensor, ranges: Ranges) -> Tensor:
    """Return a copy of some elements, one after the other."""
    return torch.cat(parts_of(flat, ranges)) if ranges else flat.new_empty(0)


def in_place(flat: Tensor, ranges: Ranges) -> Tensor:
    """Return some elements, one after the other: themselves where they lie so, else a copy."""
    return flat[slice(*ranges[0])] if len(ranges) == 1 else taken(flat, ranges)


def split(values: Tensor, ranges: Ranges) -> list[Tensor]:
    """Return the parts of what taken() returned."""
    return list(values.split([stop - start for start, stop in ranges]))


def overlap(shares: Sequence[slice], span: slice) -> Ranges:
    """Return what of a span of a bucket is in shares of it, counted from the span's beginning."""
    overlaps = ((max(share.start, span.start), min(share.stop, span.stop)) for share in shares)
    return tuple((start - span.start, stop - span.start) for start, stop in overlaps if start < stop)


def length(ranges: Ranges) -> int:
    """Return how many elements there are in ranges."""
    return sum(stop - start for start, stop in ranges)
