"""The part of a checkpoint that a DistributedOptimizer with codecs adds, and how training resumes from it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradwire.collectives import Communicator
from gradwire.trainer.reducer.agreement import on_all_ranks
from gradwire.trainer.reducer.arguments import Average, Sum
from gradwire.trainer.reducer.buffers import Exported
from gradwire.trainer.reducer.checkpoint_format import KEY, VERSION, check_part, has_residuals, label_of
from gradwire.trainer.reducer.dtensors import held_here
from gradwire.trainer.reducer.planner import BucketLayout
from gradwire.trainer.reducer.reducer import Reducer
from gradwire.trainer.reducer.setup import Setup
from gradwire.trainer.world.world import here


@dataclass(frozen=True)
class Resumption:
    """Saves and restores the state of one rank's exchange of gradients (buckets, residuals, codecs' states, number of steps),
    and the wrapped optimizer."""

    setup: Setup
    reducer: Reducer

    @property
    def _communicator(self) -> Communicator:
        return self.setup.communicator

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, and with codecs this rank's part: dicts, lists, tensors, numbers and strings.
        Raises RuntimeError while gradients are exchanged."""
        state = self.setup.optimizer.state_dict()
        if not self.reducer.planner.is_encoded:
            return state
        self._check_idle()
        return {**state, KEY: {**self._identity(), **self.reducer.state_dict()}}

    def load(self, state_dict: dict[str, Any], also: Sequence[dict[str, Any]]) -> None:
        """Load a state_dict() of this rank. also: those of ranks that no longer exist. Collective if there are codecs."""
        if self.reducer.planner.is_encoded:
            self._load_with_codecs(state_dict, also)
            return
        self.setup.optimizer.load_state_dict(_of_optimizer(state_dict))
        if self._communicator.rank == 0 and has_residuals(state_dict.get(KEY)):
            warnings.warn(f"{here()}saved with codecs, loaded without: the residuals are lost", stacklevel=4)

    def _load_with_codecs(self, state_dict: dict[str, Any], also: Sequence[dict[str, Any]]) -> None:
        """Resume exactly, or redistribute the residuals.

        Training resumes exactly if the number of ranks, the codecs and the parameters are those of the checkpoint, and each
        rank has its own part. Otherwise every rank gets the mean of the residuals (for op=Sum, an equal part). If no rank has a
        part, residuals are zero.

        Raises ValueError on all ranks, and loads nothing, if only some ranks have a part, a part is damaged or of other
        parameters, parts are of different checkpoints, or the wrapped optimizer cannot load its state.
        """
        parts: list[dict[str, Any]] = []
        layout: BucketLayout | None = None

        def look() -> tuple[list[dict[str, Any]], bool]:
            nonlocal layout
            parts.extend(_parts_of(state_dict, also))
            for part in parts:
                check_part(part, self.reducer.planner.described())
            self._check_idle()
            labels = [label_of(part) for part in parts]
            if parts and all(parts[0].get(key) == value for key, value in self._identity().items()):
                layout = self.reducer.restored(parts[0])
            return labels, layout is not None

        everyones = on_all_ranks(self._communicator, look)
        labels = [theirs for theirs, _ in everyones]
        self._check(labels)
        go_on: Callable[[], object]
        if not parts:
            go_on = functools.partial(self.reducer.restart, 0, {})
        elif layout is not None and all(exact for _, exact in everyones):
            go_on = functools.partial(self.reducer.load_state_dict, parts[0], layout)
        else:
            go_on = self._handover(parts, labels)
        optimizer = self.setup.optimizer
        before = optimizer.state, optimizer.param_groups

        def load() -> None:
            optimizer.load_state_dict(_of_optimizer(state_dict))

        def undo() -> None:
            optimizer.state, optimizer.param_groups = before

        on_all_ranks(self._communicator, load, undo)
        go_on()

    def _handover(
        self, parts: Sequence[dict[str, Any]], labels: Sequence[Sequence[dict[str, Any]]]
    ) -> Callable[[], None]:
        """Sum the residuals of all parts that the ranks were given, each part once. Return a function that loads the sums.
        Collective.

        labels: by rank, the labels of the parts that the rank was given.
        """
        mine, rank, size = parts[0], self._communicator.rank, self._communicator.size
        given = {part["rank"]: part for part in parts}
        held_by = {label["rank"]: holder for holder, held in reversed(list(enumerate(labels))) for label in held}
        contributes = sorted(saved for saved, holder in held_by.items() if holder == rank)
        carried = self._carried(mine, [given[saved] for saved in contributes], len(held_by))

        def take_over() -> None:
            self.reducer.restart(mine["step"], carried)
            if rank == 0 and has_residuals(mine):
                _warn(mine["world_size"], size, sorted(held_by))

        return take_over

    def _identity(self) -> dict[str, Any]:
        """Return the fields that identify this rank and its exchange of gradients. An exact resumption needs equal fields."""
        return {
            "version": VERSION,
            "world_size": self._communicator.size,
            "rank": self._communicator.rank,
            "op": self.setup.op,
            "predivide": self.setup.predivide,
        }

    def _check_idle(self) -> None:
        """Raise RuntimeError while gradients are exchanged."""
        if not self.reducer.is_idle:
            raise RuntimeError(
                f"{here()}gradients are still being exchanged: an earlier backward() failed "
                "midway (call synchronize(), then zero_grad())"
            )

    def _check(self, everyones: Sequence[Sequence[dict[str, Any]]]) -> None:
        """Raise ValueError if the parts given to the ranks do not belong together. everyones: the labels of the parts, by
        rank."""
        without = [rank for rank, labels in enumerate(everyones) if not labels]
        if len(without) == len(everyones):
            return
        if without:
            raise ValueError(
                f"{here()}load_state_dict: ranks {without} were given a state_dict without {KEY!r}, the others one with it"
            )
        first = everyones[0][0]
        for rank, label in ((rank, label) for rank, labels in enumerate(everyones) for label in labels):
            if label["version"] != VERSION:
                raise ValueError(
                    f"{here()}load_state_dict: rank {rank} was given a {KEY!r} of version {label['version']}"
                )
            if label["op"] != self.setup.op:
                raise ValueError(f"{here()}load_state_dict: saved with op={label['op']!r}, not {self.setup.op!r}")
            differing = [key for key in first if key != "rank" and label[key] != first[key]]
            if differing:
                raise ValueError(
                    f"{here()}load_state_dict: ranks 0 and {rank} were given parts of different checkpoints: they differ "
                    f"in {', '.join(differing)}"
                )

    def _carried(self, mine: dict[str, Any], parts: Sequence[dict[str, Any]], number: int) -> dict[int, Exported]:
        """Return the residuals that error feedback has not yet added to each parameter's gradients. parts: the parts that this
        rank contributes. number: how many parts all ranks contribute."""
        parameters = self.reducer.parameters
        carried: dict[int, Exported] = {
            index: {name: tensor.to(parameters[index].device) for name, tensor in waiting.items()}
            for index, waiting in mine["waiting"].items()
        }
        for place, entry in enumerate(mine["buckets"]):
            if not entry.get("tensors"):
                continue
            total = torch.zeros(entry["numel"], device=parameters[entry["parameters"][0]].device, dtype=torch.float32)
            for part in parts:
                shard, start = part["buckets"][place]["tensors"], part["buckets"][place]["shard_start"]
                worker, owner = shard["worker"].to(total.device), shard["owner"].to(total.device)
                total.add_(worker, alpha=1 / number if part["op"] == Average else 1.0)
                total[start : start + owner.numel()].add_(owner)
            self._communicator.allreduce(total, Sum, postscale=mine["predivide"])
            for slot, (index, start) in enumerate(zip(entry["parameters"], entry["starts"], strict=True)):
                carried[index] = {"residual": total[start : start + held_here(parameters[index]).numel()]}
                for name, tensor in entry["tensors"].items():
                    if name.endswith(f".{slot}") and name.count(".") == 1:  # the codec's state for this parameter
                        carried[index][name.partition(".")[0]] = tensor.to(total.device)
        return carried


def _parts_of(state_dict: dict[str, Any], also: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the parts in state_dict and `also`; none if `also` is empty and state_dict has none. Raises ValueError if only
    some have a part."""
    parts: list[Any] = [state_dict.get(KEY), *(other.get(KEY) for other in also)]
    if parts == [None]:
        return []
    if without := [place for place, part in enumerate(parts) if part is None]:
        raise ValueError(f"{KEY!r} is not in " + ("also" if without[0] else "the state_dict itself, but in also"))
    return parts


def _of_optimizer(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the wrapped optimizer's part of a state_dict."""
    return {key: value for key, value in state_dict.items() if key != KEY}


def _warn(saved: int, now: int, handed_over: Sequence[int]) -> None:
    lost = sorted(set(range(saved)) - set(handed_over))
    message = f"{here()}saved on {saved} ranks, loaded on {now}: the residuals of ranks {list(handed_over)} are now shared by all"
    if lost:
        message += (
            f"; those of ranks {lost}, which no rank loaded, are lost: load on every rank the state that it saved, and by "
            "load_state_dict(..., also=[...]) the states of ranks that no longer exist"
        )
    warnings.warn(message, stacklevel=7)
