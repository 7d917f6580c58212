"""The absence of a rank that has no more to give: it joins, and from then on calls with zeros what the others call."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gradwire.collectives import verbs
from gradwire.collectives.compression.feedback import Feedback
from gradwire.collectives.compression.registry import CODECS
from gradwire.collectives.run.absences import Wanted
from gradwire.collectives.run.engine import Engine


class Absence:
    """Lets this rank join, on one Communicator, and take part with zeros until all ranks have joined.

    Joined ranks take part in sums, averages and barriers; another verb is a PeerJoined on the ranks that have not joined, and
    does no other harm. The order: leave(); stand_in() whenever wanted() returns an operation, until everyone_left; then, when all
    ranks know of it, resume(). Nobody pays for it before the first rank leaves.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._absences = engine.absences

    @property
    def timeout_s(self) -> float:
        """Seconds that each operation may take."""
        return self._engine.timeout_s

    @property
    def is_usable(self) -> bool:
        """Whether the Communicator is neither closed nor broken, as far as this rank has noticed."""
        return self._engine.usable

    @property
    def everyone_left(self) -> bool:
        """Whether all ranks have joined."""
        return self._absences.everyone_joined

    @property
    def firsts(self) -> Mapping[int, int]:
        """By rank that has joined, the number of the first operation in which it did not take part by itself."""
        return self._absences.firsts

    @property
    def last(self) -> int:
        """Who of those that have joined took part in most operations before; among equals, who came last by the clocks."""
        return self._absences.last

    @property
    def is_broken(self) -> bool:
        """Whether some rank has failed in an operation, or ended: nothing can be run any more, and whoever tries is told why."""
        return self._absences.is_broken

    @property
    def has_leavers(self) -> bool:
        """Whether some rank closes the Communicator."""
        return self._absences.has_leavers

    def allow(self, allows: Callable[[str], bool]) -> None:
        """Decide what a joined rank may take part in, by what is called. The same on all ranks."""
        self._absences.allows = allows

    def leave(self, on_change: Callable[[], object]) -> None:
        """Finish what this rank has issued, and tell the others that it gives zeros from now on. on_change: is called on another
        thread whenever there may be something new."""
        self._engine.settle()
        self._absences.on_change = on_change
        self._absences.join(self._engine.issued, time.time())

    def fail(self) -> None:
        """Raise what has failed on other ranks, where is_broken or has_leavers says that something has."""
        self._engine.fail()

    def wanted(self) -> Wanted | None:
        """Return the next operation, if others wait for this rank in it."""
        return self._absences.wanted(self._engine.issued)

    def stand_in(self, wanted: Wanted, device: torch.device) -> None:
        """Take part in an operation with zeros. device: where they lie, if the others' numbers are on one of its kind; else
        on any of theirs. Raises what the verb raises, and RuntimeError for what cannot be told."""
        if wanted.verb not in _CALLS:
            raise RuntimeError(
                f"rank {self._engine.rank}: has joined, and cannot take part in operation {wanted.sequence}: {wanted.call}"
            )
        _CALLS[wanted.verb](self._engine, wanted.arguments, device)

    def resume(self) -> None:
        """Take part by itself again. Nothing may be under way."""
        self._absences.resume(self._engine.issued)


def _zeros(shape: list[int] | int, like: list[str], device: torch.device) -> torch.Tensor:
    dtype, device_type = like
    place = device if device.type == device_type else torch.device(device_type)
    return torch.zeros(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=place)


def _allreduce(engine: Engine, given: Mapping[str, Any], device: torch.device) -> None:
    pairs = zip(given["shapes"], given["like"], strict=True)
    tensors = [_zeros(shape, like, device) for shape, like in pairs]
    prescale, postscale = given["scales"]
    if "codec" not in given:
        verbs.grouped_allreduce(engine, tensors, given["op"], prescale, postscale, given["algorithm"], False)
        return
    name, settings = given["codec"]
    codec = CODECS[name](**settings)
    (tensor,) = tensors
    feedback = None
    if given["feedback"]:
        feedback = Feedback(codec, engine.plans.partition(codec, tensor.numel()), tensor.device)
    verbs.allreduce_compressed(
        engine,
        tensor,
        given["op"],
        codec,
        feedback=feedback,
        step=given["step"],
        seed=given["seed"],
        prescale=prescale,
        postscale=postscale,
        algorithm=given["algorithm"],
    )


def _allgather(engine: Engine, given: Mapping[str, Any], device: torch.device) -> None:
    parts = [_zeros(length, given["like"], device) for length in given["parts"]]
    verbs.allgather(engine, parts, torch.zeros_like(parts[engine.rank]), algorithm=given["algorithm"])


def _reduce_scatter(engine: Engine, given: Mapping[str, Any], device: torch.device) -> None:
    shapes = [given["first"], *given["parts"][1:]]
    parts = [_zeros(shape, given["like"], device) for shape in shapes]
    output = torch.zeros_like(parts[engine.rank])
    verbs.reduce_scatter(engine, output, parts, given["op"], algorithm=given["algorithm"])


def _broadcast(engine: Engine, given: Mapping[str, Any], device: torch.device) -> None:
    verbs.broadcast(engine, _single(given, device), given["root"], algorithm=given["algorithm"])


def _reduce(engine: Engine, given: Mapping[str, Any], device: torch.device) -> None:
    verbs.reduce(engine, _single(given, device), given["root"], given["op"], algorithm=given["algorithm"])


def _gather(engine: Engine, given: Mapping[str, Any], device: torch.device) -> None:
    mine = _single(given, device)
    verbs.gather(engine, mine, _all(engine, mine, given["root"]), given["root"], algorithm=given["algorithm"])


def _scatter(engine: Engine, given: Mapping[str, Any], device: torch.device) -> None:
    mine = _single(given, device)
    verbs.scatter(engine, mine, _all(engine, mine, given["root"]), given["root"], algorithm=given["algorithm"])


def _alltoall(engine: Engine, given: Mapping[str, Any], device: torch.device) -> None:
    if given["shapes"]:
        mine = _single(given, device)
        verbs.alltoall(engine, torch.zeros_like(mine), mine, algorithm=given["algorithm"])
        return
    nothing, splits = _zeros(0, given["like"], device), [0] * engine.size
    verbs.alltoall(engine, nothing, nothing.clone(), splits, splits, algorithm=given["algorithm"])


def _barrier(engine: Engine, given: Mapping[str, Any], device: torch.device) -> None:
    verbs.barrier(engine, algorithm=given["algorithm"])


def _single(given: Mapping[str, Any], device: torch.device) -> torch.Tensor:
    (shape,) = given["shapes"]
    return _zeros(shape, given["like"], device)


def _all(engine: Engine, mine: torch.Tensor, root: int) -> list[torch.Tensor] | None:
    """Return one such tensor for every rank, on the root."""
    return [torch.zeros_like(mine) for _ in range(engine.size)] if engine.rank == root else None


_CALLS: dict[str, Callable[[Engine, Mapping[str, Any], torch.device], None]] = {
    "allreduce": _allreduce,
    "allgather": _allgather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "alltoall": _alltoall,
    "barrier": _barrier,
}
