"""What a DistributedOptimizer with codecs adds to a checkpoint, and how training goes on from it, on as many ranks or others."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from collectives import Communicator
from trainer.buckets import Reduction
from trainer.encoded import Owed
from trainer.exchange import GradientExchange
from trainer.layout import Layout
from trainer.ops import Average, Sum
from trainer.world import here

KEY = "gradwire"
"""In the state_dict() of a DistributedOptimizer."""

VERSION = 1


class Resumption:
    """Saves and restores what the gradients of one rank's exchange will become: layout, residuals, states, number of steps."""

    def __init__(self, layout: Layout, exchange: GradientExchange, reduction: Reduction) -> None:
        self._layout = layout
        self._exchange = exchange
        self._reduction = reduction

    @property
    def _communicator(self) -> Communicator:
        return self._reduction.communicator

    def state_dict(self) -> dict[str, Any]:
        """This rank's part: dicts, lists, tensors, numbers and strings. Raises RuntimeError while gradients are exchanged."""
        self._check_idle()
        return {
            **self._identity(),
            "step": self._exchange.step,
            "parameters": self._layout.described(),
            **self._layout.state_dict(),
        }

    def load(self, mine: dict[str, Any] | None, also: Sequence[dict[str, Any]]) -> None:
        """Go on from state_dict() of this rank, and `also` of ranks that there are no more. Collective.

        With as many ranks as there were, each with its own part, the same codecs and parameters: exactly. Otherwise what was owed
        is handed over, in the mean (sums: in all) what it was, to all ranks alike. None, on all ranks: nothing is owed.

        Raises ValueError on all ranks where some have a part and some have not, a part is damaged or of other parameters, or
        parts are of different checkpoints.
        """
        given = [] if mine is None else [mine, *also]
        fault, labels_here, buckets = "", [], None
        try:
            if mine is None and also:
                raise ValueError(f"also= without {KEY!r} in the state_dict itself")
            labels_here = [_label(part) for part in given]
            self._check_parameters(given)
            self._check_idle()
            if mine is not None and self._continues(mine):
                buckets = self._layout.restored(mine)
        # All ranks must hear of it, or they would wait.
        except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            fault = f"{type(error).__name__}: {error}"
        gathered = self._communicator.allgather_object((labels_here, buckets is not None, fault))
        for rank, (_, _, theirs) in enumerate(gathered):
            if theirs:
                raise ValueError(f"{here()}load_state_dict: rank {rank} was given what cannot be loaded ({theirs})")
        everyones = [(labels, exact) for labels, exact, _ in gathered]
        labels = [label for labels, _ in everyones for label in labels]
        self._check([labels for labels, _ in everyones])
        if mine is None:
            self._layout.restart({})
            self._exchange.step = 0
            return
        self._exchange.step = mine["step"]
        if all(exact for _, exact in everyones):
            assert buckets is not None
            self._layout.restore(mine, buckets)
            return
        lenders = {part["rank"]: part for part in given}
        held_by = {rank: holder for holder, (held, _) in reversed(list(enumerate(everyones))) for rank in _ranks(held)}
        lent = {rank for rank, holder in held_by.items() if holder == self._communicator.rank}
        refused = self._layout.restart(self._owed(mine, [lenders[rank] for rank in sorted(lent)], len(held_by)))
        if self._communicator.rank == 0 and any(entry.get("tensors") for entry in mine["buckets"]):
            _warn(labels[0]["world_size"], self._communicator.size, sorted(held_by), refused)

    def _identity(self) -> dict[str, Any]:
        """Of who saves."""
        return {
            "version": VERSION,
            "world_size": self._communicator.size,
            "rank": self._communicator.rank,
            "op": self._reduction.op,
            "predivide": self._reduction.predivide,
        }

    def _continues(self, part: dict[str, Any]) -> bool:
        """Whether this process may continue exactly as the one that saved the part. (Other versions may lack the other keys.)"""
        return part.get("version") == VERSION and all(part[key] == value for key, value in self._identity().items())

    def _check_idle(self) -> None:
        """Raise RuntimeError while gradients are exchanged."""
        if any(bucket.in_flight for bucket in self._layout.buckets):
            raise RuntimeError(
                f"{here()}gradients are being exchanged, and what that leaves is not there yet: an earlier backward() failed "
                "midway (go on with synchronize(), then zero_grad())"
            )

    def _check_parameters(self, parts: Sequence[dict[str, Any]]) -> None:
        """Raise ValueError for parts of other parameters."""
        now = self._layout.described()
        for part in parts:
            saved = [(name, tuple(shape)) for name, shape in part.get("parameters", now)]
            if saved != now:
                old, new = next((pair for pair in zip(saved, now, strict=False) if pair[0] != pair[1]), (None, None))
                raise ValueError(
                    f"saved with {len(saved)} parameters, here are {len(now)}; the first that differs was {old} and is {new}"
                )

    def _check(self, everyones: Sequence[Sequence[dict[str, Any]]]) -> None:
        """everyones: labels of the parts that each rank was given."""
        without = [rank for rank, labels in enumerate(everyones) if not labels]
        if len(without) == len(everyones):
            return
        if without:
            raise ValueError(
                f"{here()}load_state_dict: ranks {without} were given a state_dict without {KEY!r}, the others one with it"
            )
        first = everyones[0][0]
        for rank, labels in enumerate(everyones):
            for label in labels:
                if label["version"] != VERSION:
                    raise ValueError(
                        f"{here()}load_state_dict: rank {rank} was given a {KEY!r} of version {label['version']}"
                    )
                if label["op"] != self._reduction.op:
                    raise ValueError(
                        f"{here()}load_state_dict: saved with op={label['op']!r}, not {self._reduction.op!r}"
                    )
                differing = [key for key in first if key != "rank" and label[key] != first[key]]
                if differing:
                    raise ValueError(
                        f"{here()}load_state_dict: ranks 0 and {rank} were given parts of different checkpoints: they differ "
                        f"in {', '.join(differing)}"
                    )

    def _owed(self, mine: dict[str, Any], parts: Sequence[dict[str, Any]], number: int) -> dict[int, Owed]:
        """What each parameter is owed. parts: those for which this rank answers. number: of all parts."""
        owed: dict[int, Owed] = {
            index: {name: tensor.to(self._layout.parameters[index].device) for name, tensor in waiting.items()}
            for index, waiting in mine["waiting"].items()
        }
        for place, entry in enumerate(mine["buckets"]):
            if not entry.get("tensors"):
                continue
            total = torch.zeros(entry["numel"], device=self._layout.parameters[entry["parameters"][0]].device)
            for part in parts:
                _add(total, part["buckets"][place], number if part["op"] == Average else 1)
            self._communicator.allreduce(total, Sum, postscale=mine["predivide"])
            for slot, (index, start) in enumerate(zip(entry["parameters"], entry["starts"], strict=True)):
                owed[index] = {"residual": total[start : start + self._layout.parameters[index].numel()]}
                if (basis := entry["tensors"].get(f"basis.{slot}")) is not None:
                    owed[index]["basis"] = basis.to(total.device)
        return owed


def _label(part: dict[str, Any]) -> dict[str, Any]:
    """What parts of one checkpoint must have in common; and the rank."""
    known = part.get("version") == VERSION
    layout = [(entry["parameters"], entry.get("encoding")) for entry in part["buckets"]] if known else None
    keys = ("version", "world_size", "rank", "op", "predivide", "step")
    return {key: part.get(key) for key in keys} | {"buckets": layout}


def _ranks(labels: Sequence[dict[str, Any]]) -> list[int]:
    return [label["rank"] for label in labels]


def _add(total: Tensor, entry: dict[str, Any], workers: int) -> None:
    """Add what one rank's part of a bucket contributes to the result that is owed, of which that of workers is an average."""
    for name, tensor in entry["tensors"].items():
        if name == "worker":
            total.add_(tensor.to(total.device), alpha=1 / workers)
        elif name == "owner":
            start = entry["shard_start"]
            total[start : start + tensor.numel()].add_(tensor.to(total.device))
        elif name.startswith("error."):
            start = entry["starts"][int(name.removeprefix("error."))]
            total[start : start + tensor.numel()].add_(tensor.to(total.device).reshape(-1), alpha=1 / workers)


def _warn(saved: int, now: int, handed_over: Sequence[int], refused: Sequence[str]) -> None:
    lost = sorted(set(range(saved)) - set(handed_over))
    message = (
        f"{here()}saved on {saved} ranks, loaded on {now}: what compression owed on ranks {list(handed_over)} was handed over "
        "to all"
    )
    if lost:
        message += f"; that of ranks {lost}, which no rank was given, is lost (load_state_dict(..., also=[...]))"
    if refused:
        message += (
            f"; but nothing can be owed to {', '.join(refused)}, whose codec has no error feedback now: that is lost"
        )
    warnings.warn(message, stacklevel=4)
