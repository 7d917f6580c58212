"""This rank's pieces of the parameters, on which the optimizer steps in place of them, and the state that goes with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from collectives import Communicator
from trainer.gradients.bucket import Bucket
from trainer.ops import Sum
from trainer.world import here

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Parts of a parameter, from one element up to another, counted in the order of its memory."""

_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Piece:
    """Holds what this rank steps of a parameter: a tensor with one dimension, of the elements that are its `ranges`.

    by_rank: everyone's ranges, of which these are this rank's.
    """

    parameter: Tensor
    by_rank: tuple[Ranges, ...]
    ranges: Ranges
    tensor: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.tensor = taken(memory_of(self.parameter), self.ranges)


@dataclass(frozen=True)
class Held:
    """Holds what somebody has of an optimizer's state of one parameter: of the elements in `ranges`, one after the other."""

    ranges: Ranges
    state: Mapping[str, Any]


class Pieces:
    """Keeps the pieces of an optimizer's parameters, as the shares of the buckets cut them.

    The optimizer's state belongs to the pieces. Where pieces change because buckets do, it moves along: each part of it is
    summed up from all ranks as integers, where the others have zeros, so that not a bit of it changes.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, communicator: Communicator) -> None:
        self._optimizer = optimizer
        self._communicator = communicator
        self._buckets: list[Bucket] = []
        self._scratch: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._of: dict[Tensor, Piece] = {}

    @property
    def all(self) -> list[Piece]:
        """Return the pieces in the order of the optimizer's parameters."""
        return [self._of[parameter] for group in self._optimizer.param_groups for parameter in group["params"]]

    def of(self, bucket: Bucket) -> list[Piece]:
        """Return the pieces of a bucket's parameters, by slot."""
        return [self._of[parameter] for parameter in bucket.parameters]

    def cut(self, buckets: Sequence[Bucket]) -> None:
        """Make the pieces what the buckets' shares say, where these are others than before. Collective."""
        everything = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        if self._buckets == list(buckets) and len(everything) == len(self._of):
            return
        self._buckets = list(buckets)
        wanted = {
            parameter: tuple(_inside(mine, span) for mine in bucket.shares)
            for bucket in buckets
            for parameter, span in zip(bucket.parameters, bucket.spans, strict=True)
        }
        for parameter in everything:
            if parameter not in wanted:  # one that is frozen
                known = self._of.get(parameter)
                wanted[parameter] = self._evenly(parameter) if known is None else known.by_rank
            if parameter not in self._of or self._of[parameter].by_rank != wanted[parameter]:
                self._recut(parameter, wanted[parameter])

    def _recut(self, parameter: Tensor, by_rank: tuple[Ranges, ...]) -> None:
        """Make a piece anew, and give it what is known of it. Collective, where it had a state."""
        before = self._of.get(parameter)
        piece = self._of[parameter] = Piece(parameter, by_rank, by_rank[self._communicator.rank])
        state = self._optimizer.state.pop(parameter if before is None else before.tensor, None)
        if not state:
            return
        if before is None:
            self._optimizer.state[piece.tensor] = cut_whole(piece, state)
        else:
            self._optimizer.state[piece.tensor] = self.merged(piece, state, [Held(before.ranges, state)])

    def _evenly(self, parameter: Tensor) -> tuple[Ranges, ...]:
        """Return the ranges of a parameter that is in no bucket."""
        size, numel = self._communicator.size, parameter.numel()
        return tuple(((rank * numel // size, (rank + 1) * numel // size),) for rank in range(size))

    def merged(self, piece: Piece, mine: Mapping[str, Any], held: Sequence[Held]) -> dict[str, Any]:
        """Return the state of a piece, of all that ranks hold of its parameter's. Collective.

        mine: any rank's, for what is not by element. held: what this rank contributes: together, the ranks hold every element
        once. Raises ValueError for a state of other shapes.
        """
        merged: dict[str, Any] = {}
        for name in sorted(mine):
            if not is_by_element(name, mine[name]):
                merged[name] = mine[name]
                continue
            kind = _AS_INTEGERS[mine[name].element_size()]
            whole = torch.zeros(piece.parameter.numel(), dtype=kind, device=piece.tensor.device)
            for each in held:
                numbers = each.state[name].contiguous().view(kind).to(whole.device)
                if numbers.numel() != _length(each.ranges):
                    raise ValueError(
                        f"{here()}state {name!r} of a piece of {_length(each.ranges)} elements has {numbers.numel()}: "
                        "shard_states=True is for optimizers that treat every element by itself"
                    )
                put(whole, each.ranges, numbers)
            self._communicator.allreduce(whole, Sum)
            merged[name] = taken(whole, piece.ranges).view(mine[name].dtype)
        return merged

    @contextmanager
    def in_place_of_parameters(self) -> Iterator[None]:
        """Have the optimizer know the pieces, inside, and not the parameters."""
        before = [group["params"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["params"] = [self._of[parameter].tensor for parameter in group["params"]]
        try:
            yield
        finally:
            for group, parameters in zip(self._optimizer.param_groups, before, strict=True):
                group["params"] = parameters

    @torch.no_grad()
    def fill(self) -> None:
        """Give every piece the values of its parameter, and its gradient where the parameter has one."""
        for piece in self._of.values():
            piece.tensor.grad = None
        for bucket in self._buckets:
            for piece, span in zip(self.of(bucket), bucket.spans, strict=True):
                piece.tensor.copy_(taken(memory_of(piece.parameter), piece.ranges))
                if piece.parameter.grad is not None:
                    piece.tensor.grad = taken(bucket.memory[span], piece.ranges)

    @torch.no_grad()
    def gather(self) -> None:
        """Give the parameters what all ranks' pieces are now. Collective."""
        for bucket in self._buckets:
            flat = self._scratch_for(bucket.memory)
            for piece, span in zip(self.of(bucket), bucket.spans, strict=True):
                put(flat[span], piece.ranges, piece.tensor)
            self._communicator.gather_shares(flat)
            for piece, span in zip(self.of(bucket), bucket.spans, strict=True):
                memory_of(piece.parameter).copy_(flat[span])
                piece.tensor.grad = None

    def _scratch_for(self, memory: Tensor) -> Tensor:
        """Return memory that is kept, as long as a bucket's."""
        key = memory.dtype, memory.device
        if key not in self._scratch or self._scratch[key].numel() < memory.numel():
            self._scratch[key] = torch.zeros_like(memory)
        return self._scratch[key][: memory.numel()]


def memory_of(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor in the order in which they lie in memory, in the same memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def taken(flat: Tensor, ranges: Ranges) -> Tensor:
    """Return a copy of some elements, one after the other."""
    return torch.cat([flat[start:stop] for start, stop in ranges]) if ranges else flat.new_empty(0)


def put(flat: Tensor, ranges: Ranges, values: Tensor) -> None:
    """Do the contrary of taken()."""
    parts = values.split([stop - start for start, stop in ranges])
    for (start, stop), part in zip(ranges, parts, strict=True):
        flat[start:stop].copy_(part)


def cut_whole(piece: Piece, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a piece, of that of its whole parameter."""
    parameter = piece.parameter
    cut: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and name != "step" and value.shape == parameter.shape:
            alike = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
            cut[name] = taken(memory_of(alike), piece.ranges)
        else:
            cut[name] = value
    return cut


def is_by_element(name: str, value: Any) -> bool:
    """Return whether a piece's state has a number for each of its elements. (Torch's optimizers keep one number as "step".)"""
    return isinstance(value, Tensor) and value.dim() > 0 and name != "step"


def _inside(shares: Sequence[slice], span: slice) -> Ranges:
    """Return what of a span of a bucket is in shares of it, counted from the span's beginning."""
    overlaps = ((max(share.start, span.start), min(share.stop, span.stop)) for share in shares)
    return tuple((start - span.start, stop - span.start) for start, stop in overlaps if start < stop)


def _length(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)
