"""A rank's piece of a parameter: which elements it steps, and where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Parts of a parameter, from one element up to another, counted in the order of its memory."""

OWED = "gradwire_owed"
"""The name, among what there is of each of a piece's elements, of what codes have lost of it."""


@dataclass
class Piece:
    """Holds what this rank steps of a parameter: a tensor with one dimension, of the elements that are its `ranges`, in the
    parameter's own memory where these are one.

    by_rank: everyone's ranges, of which these are this rank's. owes: whether the parameter lacks something of what the
    optimizer has made of the piece, because codes lose it: then the tensor has memory of its own, and is that between steps.
    """

    parameter: Tensor
    by_rank: tuple[Ranges, ...]
    ranges: Ranges
    owes: bool
    tensor: Tensor = field(init=False)

    def __post_init__(self) -> None:
        memory = memory_of(self.parameter)
        self.tensor = memory.new_zeros(length(self.ranges)) if self.owes else lying(memory, self.ranges)

    @property
    def owed(self) -> dict[str, Tensor]:
        """Return by the name OWED what the parameter lacks, between steps; nothing where it never lacks anything."""
        return {OWED: self.tensor} if self.owes else {}

    def owe(self, owed: Tensor | None) -> None:
        """Take for what the parameter lacks, between steps, what owed() has said; None for nothing."""
        if self.owes:
            self.tensor.zero_() if owed is None else self.tensor.copy_(owed)


def memory_of(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor in the order in which they lie in memory, in the same memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def taken(flat: Tensor, ranges: Ranges) -> Tensor:
    """Return a copy of some elements, one after the other."""
    return torch.cat(parts_of(flat, ranges)) if ranges else flat.new_empty(0)


def put(flat: Tensor, ranges: Ranges, values: Tensor) -> None:
    """Do the contrary of taken()."""
    for part, value in zip(parts_of(flat, ranges), split(values, ranges), strict=True):
        part.copy_(value)


def lying(flat: Tensor, ranges: Ranges) -> Tensor:
    """Return some elements, one after the other: themselves where they lie so, else a copy."""
    return flat[slice(*ranges[0])] if len(ranges) == 1 else taken(flat, ranges)


def parts_of(flat: Tensor, ranges: Ranges) -> list[Tensor]:
    """Return some elements where they lie."""
    return [flat[start:stop] for start, stop in ranges]


def split(values: Tensor, ranges: Ranges) -> list[Tensor]:
    """Return the parts of what taken() returned."""
    return list(values.split([stop - start for start, stop in ranges]))


def outside(inside: tuple[int, int], numel: int) -> Ranges:
    """Return what is before a range, and after."""
    start, stop = inside
    return tuple(each for each in ((0, start), (stop, numel)) if each[0] < each[1])


def inside(shares: Sequence[slice], span: slice) -> Ranges:
    """Return what of a span of a bucket is in shares of it, counted from the span's beginning."""
    overlaps = ((max(share.start, span.start), min(share.stop, span.stop)) for share in shares)
    return tuple((start - span.start, stop - span.start) for start, stop in overlaps if start < stop)


def length(ranges: Ranges) -> int:
    """Return how many elements there are in ranges."""
    return sum(stop - start for start, stop in ranges)
