"""The rule of sharded states: every rank steps its share of the parameters, and keeps the optimizer's state of this share only.

ZeRO stage 1 (Rajbhandari et al. 2020): gradients are reduced so that every rank gets its share of each bucket, the optimizer
steps the shards of parameters in this share, and the parameters are gathered. The buckets are those of the synchronous rule,
and the two exchanges are the halves of its allreduce, so a shard's gradient has the same bits as there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives.errors import ranks_text
from gradwire.trainer.checkpoint import Given, agree, need, need_finite, need_whole, on_all_ranks, without
from gradwire.trainer.reducer.agreement import check_order
from gradwire.trainer.reducer.arguments import Sum
from gradwire.trainer.reducer.bucket import dense_strides
from gradwire.trainer.reducer.compression import Compression, Compressor
from gradwire.trainer.reducer.dtensors import shard_of
from gradwire.trainer.reducer.setup import Setup
from gradwire.trainer.reducer.shards.gather import parameter_encoding_of
from gradwire.trainer.reducer.shards.optimizer_shards import SHARDS, OptimizerShards, cut_whole, is_by_element
from gradwire.trainer.reducer.shards.shard import RESIDUAL, length
from gradwire.trainer.reducer.shards.trial import fault_of
from gradwire.trainer.rules.synchronous import Synchronous
from gradwire.trainer.world.world import names_rank

_VERSION = 3
_RESIDUALS = {2: "owed", 3: "residuals"}
"""The key of the residuals in a checkpoint, by the version of its format."""

_CHANGED = (
    "the gradient of {!r} has been changed since backward(), but each rank has its shard of the gradients only: clip with "
    "clip_grad_norm_() of the distributed optimizer, not with torch's, and use no GradScaler with rules.Sharded"
)


@dataclass(frozen=True)
class Sharded:
    """The rule of sharded states: each rank updates only its share of the parameters, and keeps only the optimizer state of that
    share (ZeRO stage 1, Rajbhandari et al. 2020). docs/guides/shard-states.md is the guide, and lists what it does not support.

    parameter_compression: the compression of the changes of parameters that each rank sends after it has stepped its share: a
    cast, or any codec except "dgc", "powersgd", "terngrad", and "qsgd" with its default settings. Codecs always have error
    feedback here. By default, the ranks send the parameters themselves, uncompressed, and the weights are bitwise those of
    training without this rule.

    Raises ValueError or TypeError for another compression.
    """

    parameter_compression: Compressor = Compression.none

    @names_rank
    def __post_init__(self) -> None:
        parameter_encoding_of(self.parameter_compression)

    def __call__(self, setup: Setup) -> ShardedSteps:
        return ShardedSteps(replace(setup, parameter_encoding=parameter_encoding_of(self.parameter_compression)))

    @property
    def described(self) -> str:
        """Return the rule and its settings as text, which must be equal on all ranks."""
        encoding = parameter_encoding_of(self.parameter_compression)
        return f"Sharded(parameter_compression={'none' if encoding is None else encoding.identity})"


class ShardedSteps(Synchronous):
    """Exchanges gradients like the synchronous rule, and lets the optimizer step shards of the parameters.

    After backward(), parameter.grad holds the average in this rank's shard, and zeros elsewhere, so that sums over the ranks
    count every element once.
    """

    shares_state = keeps_replicas = can_stand_in = False

    def __init__(self, setup: Setup) -> None:
        super().__init__(replace(setup, in_shares=True))
        self._shards = OptimizerShards(self.setup)
        self._gathered_s = 0.0
        self._has_started = False

    @property
    def wait_s(self) -> float:
        return super().wait_s + self._gathered_s

    def add(self, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        for name, parameter in zip(names, parameters, strict=True):
            if shard_of(parameter):
                raise ValueError(f"rules.Sharded needs whole parameters, and {name!r} is sharded already")
            if parameter.stride() != dense_strides(parameter):
                raise ValueError(
                    f"rules.Sharded needs parameters without gaps in memory, and {name!r} has shape "
                    f"{list(parameter.shape)} and strides {list(parameter.stride())}"
                )
        self._try(parameters)
        super().add(names, parameters)
        if self._has_started:
            self._shards.cut(self.reducer)

    def _try(self, parameters: Sequence[Tensor]) -> None:
        """Raise ValueError on all ranks if the optimizer cannot step shards of these parameters. Collective."""
        optimizer, tried = self.setup.optimizer, self.setup.tried
        new = [parameter for parameter in parameters if parameter not in tried]

        def attempt() -> str | None:
            fault = fault_of(optimizer, new)
            return None if fault is None else f"{type(optimizer).__name__} does not: {fault}"

        for rank, fault in enumerate(on_all_ranks(self.communicator, attempt, failed="rules.Sharded: rank {}: {}")):
            if fault is not None:
                raise ValueError(
                    f"rules.Sharded is for optimizers that update every element independently; {fault} (on rank "
                    f"{rank}). Leave out rule="
                )
        tried.update(dict.fromkeys(new, True))

    def start(self) -> None:
        super().start()
        self._has_started = True
        self._shards.cut(self.reducer)

    def synchronize(self) -> None:
        super().synchronize()
        self._shards.cut(self.reducer)

    def evaluate(self, closure: Callable[[], Any]) -> Any:
        raise ValueError(
            f"rank {self.communicator.rank}: rules.Sharded does not support step(closure): call backward(), then step()"
        )

    def take_step(self) -> Any:
        """Step the shards. Raises RuntimeError if gradients have changed since backward(), and ValueError on all ranks if a
        parameter that is not trained has a gradient on some ranks only."""
        self.synchronize()
        for bucket in self.buckets:
            if (name := bucket.changed()) is not None:
                raise RuntimeError(f"rank {self.communicator.rank}: {_CHANGED.format(name)}")
            bucket.copy_slots(bucket.own_grads)
        self._shards.fill()
        with self._shards.in_place_of_parameters():
            return self.setup.optimizer.step()

    def before_method(self, name: str) -> None:
        raise self._refused(name, "this rank's optimizer has shards of the parameters only: leave out rule=")

    def after_step(self) -> None:
        begin = time.perf_counter()
        self._shards.gather(self.reducer.step - 1)
        self._gathered_s += time.perf_counter() - begin
        super().after_step()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> Tensor:
        """See Rule.clip_grad_norm_; the norm is over all ranks' shards. Collective."""
        self.synchronize()
        parts = self._shards.gradients()
        own = torch.nn.utils.get_total_norm([part for each in parts for part in each], norm_type)
        total = own.to(self.buckets[0].memory.device if self.buckets else own.device, torch.float64)
        if math.isinf(norm_type):
            self.communicator.allreduce(total, "max")
        else:
            total = total**norm_type
            self.communicator.allreduce(total, Sum)
            total = total ** (1 / norm_type)
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)  # NaN if the norm is NaN
        for each in filter(None, parts):
            torch._foreach_mul_(each, factor.to(each[0].device))
        for bucket in self.buckets:
            bucket.copy_out()
        for bucket in self.buckets:
            bucket.record_versions()
        return total.to(own.dtype)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state of this rank's shards, each with one dimension; SHARDS describes the shards."""
        states = self.setup.optimizer.state
        for parameter in self.reducer.parameters:
            if parameter in states and not states[parameter]:  # made by reading optimizer.state[parameter]
                del states[parameter]
        with self._shards.in_place_of_parameters():
            state = super().state_dict()
        shards = self._shards.all
        return {
            **state,
            SHARDS: {
                "version": _VERSION,
                "world_size": self.communicator.size,
                "rank": self.communicator.rank,
                "shapes": [list(shard.parameter.shape) for shard in shards],
                "ranges": [[list(each) for each in shard.ranges] for shard in shards],
                _RESIDUALS[_VERSION]: None
                if self.setup.parameter_encoding is None
                else [shard.tensor.clone() for shard in shards],
            },
        }

    def load_state_dict(self, state_dict: dict[str, Any], also: Sequence[dict[str, Any]]) -> None:
        """Load the state_dict()s of all ranks of a checkpoint, on any number of ranks, or an unsharded state. Collective.

        Raises ValueError on all ranks if together they were not given all parts of one checkpoint of these parameters, or list
        their parameters in different orders.
        """
        check_order(self.communicator, "load_state_dict() with rules.Sharded", self.reducer.names)
        given = self._given([state_dict, *also])
        bare = {**without(state_dict, SHARDS), "state": {}}
        super().load_state_dict(bare, also)
        self._shards.cut(self.reducer)
        self._shards.removed.clear()
        state: dict[int, dict[str, Any]] = {}
        for number, shard in enumerate(self._shards.all):
            kept = _kept(state_dict, number)
            if given is None:
                found = cut_whole(shard, kept)
            else:
                held = [(each[SHARDS]["ranges"][number], _kept(each, number)) for each in given.contributed]
                found = self._shards.merged(shard, kept, held)
            shard.set_residual(found.pop(RESIDUAL, None))
            if found:
                state[number] = found
        with self._shards.in_place_of_parameters():
            self.setup.optimizer.load_state_dict({**bare, "state": state})

    def _given(self, states: Sequence[dict[str, Any]]) -> Given | None:
        """Return the states that the ranks were given; None for an unsharded state. Collective."""
        given = agree(self.communicator, SHARDS, states, self._read)
        if given is None:
            return None
        missing = set(range(given.part["world_size"])).difference(given.saved)
        if missing:
            raise ValueError(
                f"load_state_dict: saved on {given.part['world_size']} ranks, and no rank was given the "
                f"state of {ranks_text(missing)}: give it to any rank, as load_state_dict(..., also=[...])"
            )
        return given

    def _read(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Check a state, and return what is equal in all states of one checkpoint."""
        part, shapes = state_dict[SHARDS], [list(shard.parameter.shape) for shard in self._shards.all]
        if part["version"] not in _RESIDUALS:
            raise ValueError(f"it is a {SHARDS!r} of version {part['version']!r}")
        if part["shapes"] != shapes:
            raise ValueError(f"it is of parameters of shapes {part['shapes']}, not {shapes}")
        need_whole("world_size", part["world_size"], 1)
        need_whole("rank", part["rank"], 0, part["world_size"])
        if _residuals(part) is not None and self.setup.parameter_encoding is None:
            raise ValueError("saved with parameter_compression, whose residuals need a parameter_compression here too")
        names = []
        for number, ranges in enumerate(part["ranges"]):
            numel, state = length(ranges), _kept(state_dict, number)
            by_element = {name: state[name] for name in sorted(state) if is_by_element(name, state[name])}
            for name, values in by_element.items():
                need(
                    values.numel() == numel,
                    f"{name!r} of parameter {number} has {values.numel()} elements, not {numel}",
                )
            if RESIDUAL in state:
                need_finite(f"residual of parameter {number}", state[RESIDUAL])
            names.append([[name, str(values.dtype)] for name, values in by_element.items()])
        return {"world_size": part["world_size"], "names": names, "has_residuals": _residuals(part) is not None}


def _kept(part: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the optimizer's state of a parameter in a part of a checkpoint, with the residual under RESIDUAL."""
    residuals = _residuals(part[SHARDS]) if SHARDS in part else None
    return {**part["state"].get(number, {}), **({} if residuals is None else {RESIDUAL: residuals[number]})}


def _residuals(description: dict[str, Any]) -> list[Tensor] | None:
    """Return the residuals in the description of shards; None without parameter_compression."""
    residuals: list[Tensor] | None = description[_RESIDUALS[description["version"]]]
    return residuals
