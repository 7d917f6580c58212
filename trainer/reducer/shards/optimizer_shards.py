"""This rank's shards of the parameters, which the optimizer steps in place of the parameters, and their optimizer state."""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, compress
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gradwire.trainer.reducer.arguments import Sum
from gradwire.trainer.reducer.bucket import Bucket, zeros_for
from gradwire.trainer.reducer.reducer import Reducer
from gradwire.trainer.reducer.setup import Setup
from gradwire.trainer.reducer.shards.gather import CodedShardGather, ShardGather
from gradwire.trainer.reducer.shards.shard import (
    RESIDUAL,
    Ranges,
    Shard,
    in_place,
    length,
    memory_of,
    overlap,
    parts_of,
    shifted,
    split,
    taken,
)

SHARDS = "gradwire_shards"
"""The key of the description of shards in the state_dict() of a DistributedOptimizer with rules.Sharded."""

_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class OptimizerShards:
    """Holds the shards into which the shares of the buckets cut an optimizer's parameters.

    The optimizer's state belongs to the shards. If the buckets and so the shards change, the state moves to the new shards: its
    parts are summed over all ranks as integers. Ranks that do not hold a part add zeros, so no bit changes.

    A parameter in no bucket, such as a frozen one, has a shard too. If it has a gradient, which it must have on all ranks, the
    optimizer steps it, as torch does. The ranks do not compare the values: those of an exchange before it was frozen are shares.
    """

    def __init__(self, setup: Setup) -> None:
        self._optimizer = setup.optimizer
        self._combination = setup
        self._communicator = setup.communicator
        self._parameter_encoding = setup.parameter_encoding
        self._buckets: list[Bucket] = []
        self._gathers: list[ShardGather] = []
        self._cut: list[Tensor] = []
        self._of: dict[Tensor, Shard] = {}
        self.removed = WeakTensorKeyDictionary()
        """The ranges and the state of the shard of each parameter that has left the param groups: the program may put the
        parameter back, as long as it keeps it."""
        self._others: list[tuple[str, Shard]] = []
        """The names and shards of the optimizer's parameters that are in no bucket, by name, as on the other ranks."""
        self._stepped: list[Shard] = []
        """Those of the others that have a gradient in this step."""

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    @property
    def all(self) -> list[Shard]:
        """Return the shards in the order of the optimizer's parameters."""
        return [self._of[parameter] for parameter in self._parameters()]

    def cut(self, reducer: Reducer) -> None:
        """Make new shards if the shares of the Reducer's buckets have changed. Collective."""
        buckets, everything = reducer.buckets, self._parameters()
        is_same = len(everything) == len(self._cut) and all(map(operator.is_, everything, self._cut))
        if self._buckets == list(buckets) and is_same:
            return
        self._buckets, self._cut = list(buckets), everything
        wanted = {
            parameter: tuple(overlap(mine, span) for mine in bucket.shares)
            for bucket in buckets
            for parameter, span in zip(bucket.parameters, bucket.spans, strict=True)
        }
        names = dict(zip(reducer.parameters, reducer.names, strict=True))
        rest = {parameter: names.get(parameter, "") for parameter in everything if parameter not in wanted}
        others = dict(sorted(rest.items(), key=operator.itemgetter(1)))
        for parameter in [*wanted, *others]:  # in this order on the other ranks, too
            known = self._of.get(parameter)
            if parameter in others:
                size, numel = self._communicator.size, parameter.numel()
                evenly = tuple(((rank * numel // size, (rank + 1) * numel // size),) for rank in range(size))
                wanted[parameter] = evenly if known is None else known.by_rank
            if known is None or known.by_rank != wanted[parameter] or known.is_moved:
                self._recut(parameter, wanted[parameter])
            self._of[parameter].tensor.grad = None
        self._others = [(name, self._of[parameter]) for parameter, name in others.items()]
        for parameter in [each for each in self._of if each not in wanted]:
            self.removed[parameter] = self._released(self._of.pop(parameter))
        self._gathers = []  # free its memory before the next one is allocated
        self._gathers = self._new_gathers(buckets)

    def _recut(self, parameter: Tensor, by_rank: tuple[Ranges, ...]) -> None:
        """Make a new shard of a parameter, and move the existing state to it. Collective if an old shard has a state."""
        known = self._of.get(parameter)
        before = self.removed.pop(parameter, None) if known is None else self._released(known)
        has_residual = self._parameter_encoding is not None
        shard = self._of[parameter] = Shard(parameter, by_rank, by_rank[self._communicator.rank], has_residual)
        if before is None:
            state = cut_whole(shard, self._optimizer.state.pop(parameter, None) or {})
        else:
            state = self.merged(shard, before[1], [before])
        shard.set_residual(state.pop(RESIDUAL, None))
        if state:
            self._optimizer.state[shard.tensor] = state

    def _released(self, shard: Shard) -> tuple[Ranges, dict[str, Any]]:
        """Take the state of a shard out of the optimizer, and return the shard's ranges and this state, with the residual."""
        state = self._optimizer.state.pop(shard.tensor, None) or {}
        return shard.ranges, {**state, RESIDUAL: shard.tensor} if shard.has_residual else state

    def merged(
        self, shard: Shard, mine: Mapping[str, Any], held: Sequence[tuple[Ranges, Mapping[str, Any]]]
    ) -> dict[str, Any]:
        """Return the state of a shard, from the parts of its parameter's state on all ranks. Collective.

        mine: the state of any rank, for the names, the dtypes, and entries that are not by element. held: the parts that this
        rank holds; together, the ranks hold every element once. Raises ValueError for a state of other shapes.
        """
        merged: dict[str, Any] = {}
        for name in sorted(mine):
            if not is_by_element(name, mine[name]):
                merged[name] = mine[name]
                continue
            for ranges, state in held:
                if state[name].numel() != length(ranges):
                    raise ValueError(
                        f"rank {self._communicator.rank}: state {name!r} of a shard of {length(ranges)} elements has "
                        f"{state[name].numel()}: rules.Sharded is for optimizers that update every element independently"
                    )
            kind = mine[name].dtype, shard.tensor.device
            parts = [(ranges, state[name]) for ranges, state in held]
            merged[name] = taken(self._joined(shard.parameter.numel(), *kind, parts), shard.ranges)
        return merged

    def _joined(
        self, numel: int, dtype: torch.dtype, device: torch.device, held: Sequence[tuple[Ranges, Tensor]]
    ) -> Tensor:
        """Return all numbers, from those that each rank holds. Collective."""
        kind = _AS_INTEGERS[dtype.itemsize]
        whole = torch.zeros(numel, dtype=kind, device=device)
        for ranges, values in held:
            numbers = values.contiguous().view(kind).to(whole.device)
            for part, own in zip(parts_of(whole, ranges), split(numbers, ranges), strict=True):
                part.copy_(own)
        self._communicator.allreduce(whole, Sum)
        return whole.view(dtype)

    @contextmanager
    def in_place_of_parameters(self) -> Iterator[None]:
        """Replace the parameters in the optimizer's param groups with the shards, inside the with block."""
        before = [group["params"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["params"] = [self._of[parameter].tensor for parameter in group["params"]]
        try:
            yield
        finally:
            for group, parameters in zip(self._optimizer.param_groups, before, strict=True):
                group["params"] = parameters

    def gradients(self) -> list[list[Tensor]]:
        """Return views of this rank's shards of the gradients, by bucket, and those of parameters that are in no bucket."""
        found = [shard for _, shard in self._others if shard.parameter.grad is not None]
        others = [parts_of(_gradient_of(shard), shard.ranges) for shard in found]
        return [*(gather.gradients() for gather in self._gathers), *others]

    @torch.no_grad()
    def fill(self) -> None:
        """Set every shard to the values of its parameter, and set its gradient if the parameter has one. Collective. Raises
        ValueError on all ranks if a parameter that is in no bucket has a gradient on some ranks only."""
        self._stepped = self._find_stepped() if self._others else []
        for gather in self._gathers:
            gather.fill()
        for _, shard in self._others:
            shard.tensor.grad = None
        for shard in self._stepped:
            values = in_place(memory_of(shard.parameter), shard.ranges)
            shard.tensor.data = shard.tensor + values if shard.has_residual else values
            shard.tensor.grad = taken(_gradient_of(shard), shard.ranges)

    def _find_stepped(self) -> list[Shard]:
        """Return those of the others that have a gradient, the same on all ranks. Collective. Raises ValueError on all ranks if
        one has a gradient on some ranks only."""
        rank, size = self._communicator.rank, self._communicator.size
        found = [shard.parameter.grad is not None for _, shard in self._others]
        counts = torch.tensor(found, dtype=torch.int32, device=self._communicator.control_device)
        summed = self._communicator.allreduce(counts, Sum, async_op=True, awaited=True)
        summed.wait(math.inf if counts.is_cuda else None)  # without a limit, it would only enqueue the wait on a GPU
        for (name, _), count in zip(self._others, counts.tolist(), strict=True):
            if count not in (0, size):
                raise ValueError(
                    f"rank {rank}: {name!r} is not trained, and has a gradient on {count} of {size} ranks: set it on all ranks "
                    "to the same values, or on none"
                )
        return [shard for _, shard in compress(self._others, found)]

    @torch.no_grad()
    def gather(self, step: int) -> None:
        """Set the parameters to the values of all ranks' shards. Collective. step: the number of earlier gradient exchanges."""
        for gather in self._gathers:
            gather.gather(step)
        alike = defaultdict(list)
        for shard in self._stepped:
            alike[shard.tensor.dtype, shard.tensor.device].append(shard)
        for kind, shards in alike.items():
            *starts, numel = accumulate((shard.parameter.numel() for shard in shards), initial=0)
            held = [(shifted(each.ranges, start), each.tensor) for each, start in zip(shards, starts, strict=True)]
            whole = self._joined(numel, *kind, held)
            self._combination.traffic.count(sent=self._combination.traffic.wire_bytes(whole.nbytes))
            for shard, start in zip(shards, starts, strict=True):
                memory_of(shard.parameter).copy_(whole[start : start + shard.parameter.numel()])
                shard.set_residual(None)

    def _new_gathers(self, buckets: Sequence[Bucket]) -> list[ShardGather]:
        """Return the gathers of buckets. Those of one dtype and device share memory of the size of their longest bucket."""
        longest: dict[tuple[torch.dtype, torch.device], int] = {}
        for bucket in buckets:
            kind, numel = (bucket.memory.dtype, bucket.memory.device), bucket.memory.numel()
            longest[kind] = max(numel, longest.get(kind, 0))
        memory = {kind: zeros_for(self._communicator, numel, *kind) for kind, numel in longest.items()}
        gathers: list[ShardGather] = []
        for number, bucket in enumerate(buckets):
            shards = [self._of[parameter] for parameter in bucket.parameters]
            given = (bucket, shards, memory[bucket.memory.dtype, bucket.memory.device], self._combination)
            coded = self._parameter_encoding
            gathers.append(ShardGather(*given) if coded is None else CodedShardGather(*given, coded, number))
        return gathers


def cut_whole(shard: Shard, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a shard, cut from the state of its whole parameter."""
    parameter = shard.parameter
    cut = dict(state)
    for name, value in state.items():
        if isinstance(value, Tensor) and name != "step" and value.shape == parameter.shape:
            alike = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
            cut[name] = taken(memory_of(alike), shard.ranges)
    return cut


def _gradient_of(shard: Shard) -> Tensor:
    """Return the elements of the gradient of a shard's parameter, in the order of the parameter's memory."""
    parameter = shard.parameter
    gradient = parameter.grad
    assert gradient is not None
    if gradient.stride() != parameter.stride():
        parameter.grad = gradient = torch.empty_like(parameter, requires_grad=False).copy_(gradient)
    return memory_of(gradient)


def is_by_element(name: str, value: Any) -> bool:
    """Return whether a state tensor has a number for each element of a shard. (Torch's optimizers keep one number as
    "step".)"""
    return isinstance(value, Tensor) and value.dim() > 0 and name != "step"
