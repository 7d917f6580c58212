"""This rank's pieces of the parameters, on which the optimizer steps in place of them, and the state that goes with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from collectives import Communicator
from trainer.gradients.bucket import Bucket, zeros_for
from trainer.ops import Sum
from trainer.world import here

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Parts of a parameter, from one element up to another, counted in the order of its memory."""

_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Piece:
    """Holds what this rank steps of a parameter: a tensor with one dimension, of the elements that are its `ranges`, in the
    parameter's own memory where these are one.

    by_rank: everyone's ranges, of which these are this rank's.
    """

    parameter: Tensor
    by_rank: tuple[Ranges, ...]
    ranges: Ranges
    tensor: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.tensor = _lying(memory_of(self.parameter), self.ranges)


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
        self._ways: list[_Way] = []
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
            self._of[parameter].tensor.grad = None
        self._ways = []  # and its memory, before there is another
        self._ways = self._ways_of(buckets)

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

    def gradients(self) -> list[list[Tensor]]:
        """Return where this rank's pieces of the gradients lie, by bucket."""
        return [way.gradients() for way in self._ways]

    @torch.no_grad()
    def fill(self) -> None:
        """Give every piece the values of its parameter, and its gradient where the parameter has one."""
        for way in self._ways:
            way.fill()

    @torch.no_grad()
    def gather(self) -> None:
        """Give the parameters what all ranks' pieces are now. Collective."""
        for way in self._ways:
            way.take()
            self._communicator.gather_shares(way.flat)
            way.give()

    def _ways_of(self, buckets: Sequence[Bucket]) -> list[_Way]:
        """Return the ways for buckets, all of whose parameters pass through the same memory, as long as the longest needs it."""
        longest: dict[tuple[torch.dtype, torch.device], int] = {}
        for bucket in buckets:
            kind, numel = (bucket.memory.dtype, bucket.memory.device), bucket.memory.numel()
            longest[kind] = max(numel, longest.get(kind, 0))
        flat = {kind: zeros_for(self._communicator, numel, *kind) for kind, numel in longest.items()}
        return [_Way(each, self.of(each), flat[each.memory.dtype, each.memory.device]) for each in buckets]


class _Way:
    """The way of a bucket's parameters to the optimizer, and of what becomes of them to all ranks: through views, made once.

    flat: memory that is laid out as the bucket's, for others to use too between give() and take().
    """

    def __init__(self, bucket: Bucket, pieces: Sequence[Piece], flat: Tensor) -> None:
        self.flat = flat[: bucket.memory.numel()]
        self._pieces = pieces
        self._spans = bucket.spans
        memories = [bucket.memory[span] for span in bucket.spans]
        self._parts = [_parts(each, piece.ranges) for each, piece in zip(memories, pieces, strict=True)]
        self._gradients = [_lying(each, piece.ranges) for each, piece in zip(memories, pieces, strict=True)]
        self._look()

    def gradients(self) -> list[Tensor]:
        """Return where the pieces of the gradients lie that there are."""
        pairs = zip(self._pieces, self._parts, strict=True)
        return [part for piece, parts in pairs if piece.parameter.grad is not None for part in parts]

    def _look(self) -> None:
        """Make the views of the parameters where they lie now."""
        self._addresses = [piece.parameter.data_ptr() for piece in self._pieces]
        self._homes: list[Tensor] = []
        """Where each piece belongs; an optimizer may give it other memory."""
        self._filled, self._taken, self._given = _Copies(), _Copies(), _Copies()
        for piece, span, parts, gradient in zip(self._pieces, self._spans, self._parts, self._gradients, strict=True):
            whole, place, ranges = memory_of(piece.parameter), self.flat[span], piece.ranges
            if len(ranges) == 1 and piece.tensor.data_ptr() != whole[slice(*ranges[0])].data_ptr():
                piece.tensor.data = whole[slice(*ranges[0])]
            home = piece.tensor.detach()
            self._homes.append(home)
            self._taken.add(_parts(place, ranges), _split(home, ranges))
            if len(ranges) == 1:
                others = _outside(ranges[0], whole.numel())
                self._given.add(_parts(whole, others), _parts(place, others))
            else:
                self._filled.add(_split(home, ranges), _parts(whole, ranges))
                self._filled.add(_split(gradient, ranges), parts)
                self._given.add([whole], [place])

    def fill(self) -> None:
        """Give the pieces what the optimizer is to see."""
        if self._addresses != [piece.parameter.data_ptr() for piece in self._pieces]:
            self._look()
        self._filled.run()
        for piece, gradient in zip(self._pieces, self._gradients, strict=True):
            piece.tensor.grad = gradient if piece.parameter.grad is not None else None

    def take(self) -> None:
        """Bring to `flat` what the optimizer has made of the pieces."""
        for piece, home in zip(self._pieces, self._homes, strict=True):
            if piece.tensor.data_ptr() != home.data_ptr():
                home.copy_(piece.tensor)
                piece.tensor.data = home
        self._taken.run()

    def give(self) -> None:
        """Bring to the parameters what all ranks' pieces are, from `flat`."""
        self._given.run()


class _Copies:
    """Copies tensors to others, the same ones as often as wanted: add() says which, run() copies."""

    def __init__(self) -> None:
        self._destinations: list[Tensor] = []
        self._sources: list[Tensor] = []

    def add(self, destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Have run() copy each source to the destination at its place, from now on."""
        self._destinations += destinations
        self._sources += sources

    def run(self) -> None:
        """Copy all that was added, as it is now."""
        if self._destinations:
            torch._foreach_copy_(self._destinations, self._sources)


def memory_of(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor in the order in which they lie in memory, in the same memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def taken(flat: Tensor, ranges: Ranges) -> Tensor:
    """Return a copy of some elements, one after the other."""
    return torch.cat(_parts(flat, ranges)) if ranges else flat.new_empty(0)


def put(flat: Tensor, ranges: Ranges, values: Tensor) -> None:
    """Do the contrary of taken()."""
    for part, value in zip(_parts(flat, ranges), _split(values, ranges), strict=True):
        part.copy_(value)


def _lying(flat: Tensor, ranges: Ranges) -> Tensor:
    """Return some elements, one after the other: themselves where they lie so, else a copy."""
    return flat[slice(*ranges[0])] if len(ranges) == 1 else taken(flat, ranges)


def _parts(flat: Tensor, ranges: Ranges) -> list[Tensor]:
    return [flat[start:stop] for start, stop in ranges]


def _split(values: Tensor, ranges: Ranges) -> list[Tensor]:
    """Return the parts of what taken() returned."""
    return list(values.split([stop - start for start, stop in ranges]))


def _outside(inside: tuple[int, int], numel: int) -> Ranges:
    """Return what is before a range, and after."""
    start, stop = inside
    return tuple(each for each in ((0, start), (stop, numel)) if each[0] < each[1])


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
