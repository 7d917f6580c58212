"""How ranks save and load one checkpoint: which parts belong together, and who contributes which.

A state_dict() is that of torch's optimizer, with the *part* of this rank under a key of gradwire's. docs/guides/checkpoints.md
lists the keys, and what each part holds. The modules that save a part: trainer/reducer/checkpoint.py, rules/sharded.py,
rules/local_steps.py, ddp.py and servers/. Whoever saves a part checks it when it is loaded, and labels it: the label must be
equal in all parts of one checkpoint. All ranks load it, or all of them raise the same ValueError.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from gradwire.collectives import Communicator

T = TypeVar("T")


def on_all_ranks(
    communicator: Communicator,
    attempt: Callable[[], T],
    undo: Callable[[], object] | None = None,
    failed: str = "load_state_dict: rank {} was given a state that cannot be loaded ({})",
) -> list[T]:
    """Call attempt() on every rank, and return its results by rank. A result must be JSON. Collective.

    If attempt() raises on any rank, all ranks call undo() and raise ValueError with the text `failed`, filled with the first
    such rank and its error.
    """
    value, fault = None, ""
    try:
        value = attempt()
        json.dumps(value)  # so that an invalid record raises before anything is sent
    except Exception as error:  # the other ranks would wait for this one if they did not get its error
        fault = f"{type(error).__name__}: {error}"
    gathered = communicator.allgather_record((value, fault))
    for rank, (_, theirs) in enumerate(gathered):
        if theirs:
            if undo is not None:
                undo()
            raise ValueError(f"rank {communicator.rank}: " + failed.format(rank, theirs))
    return [theirs for theirs, _ in gathered]


@dataclass(frozen=True)
class Given:
    """The states of one checkpoint that the ranks were given.

    part: that of this rank's own state. contributed: the states that this rank contributes where all ranks redistribute them:
    each state counts once, also if several ranks were given it. saved: the ranks whose states some rank was given.
    """

    part: dict[str, Any]
    contributed: list[dict[str, Any]]
    saved: list[int]


def agree(
    communicator: Communicator,
    key: str,
    states: Sequence[dict[str, Any]],
    read: Callable[[dict[str, Any]], dict[str, Any]],
) -> Given | None:
    """Return what the ranks were given, if all of it is of one checkpoint; None if no state has a part. Collective.

    states: this rank's state, and those of ranks that no longer exist. key: of the parts. read: checks the part of a state, and
    returns its label, in JSON; raises ValueError for a part that cannot be loaded. Raises ValueError on all ranks if it does so
    on any, if only some states have a part, or if their labels differ.
    """

    def labels() -> list[tuple[Any, dict[str, Any]] | None]:
        with damage_named(key):
            return [None if state.get(key) is None else (state[key].get("rank"), read(state)) for state in states]

    everyones = on_all_ranks(communicator, labels)
    lacking = sorted({rank for rank, theirs in enumerate(everyones) if None in theirs})
    labelled = [(rank, *pair) for rank, theirs in enumerate(everyones) for pair in theirs if pair is not None]
    if not labelled:
        return None
    begin = f"rank {communicator.rank}: load_state_dict: "
    if lacking:
        raise ValueError(f"{begin}ranks {lacking} were given a state_dict without {key!r}, others one with it")
    first = labelled[0][2]
    holders: dict[int, int] = {}
    for rank, saved, label in labelled:
        if differing := [name for name in first if label.get(name) != first[name]]:
            raise ValueError(
                f"{begin}ranks 0 and {rank} were given parts of different checkpoints: they differ in {', '.join(differing)}"
            )
        holders.setdefault(saved, rank)
    by_rank = {state[key].get("rank"): state for state in reversed(states)}
    mine = sorted(saved for saved, rank in holders.items() if rank == communicator.rank)
    return Given(states[0][key], [by_rank[saved] for saved in mine], sorted(holders))


def without(state_dict: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return a state_dict without the part under this key."""
    return {name: value for name, value in state_dict.items() if name != key}


# Checks of parts


@contextmanager
def damage_named(key: str) -> Iterator[None]:
    """Raise ValueError if the with block finds that something in a part is missing, or of another type."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"{key!r} is damaged: {type(error).__name__}: {error}") from error


def need(condition: bool, fault: str) -> None:
    """Raise ValueError with this fault of a part unless the condition holds."""
    if not condition:
        raise ValueError(f"the state is damaged: {fault}")


def need_whole(name: str, value: object, least: int, end: int | None = None) -> None:
    """Raise ValueError unless this is a whole number, and least <= value < end."""
    need(type(value) is int and least <= value and (end is None or value < end), f"{name} is {value!r}")


def need_finite(name: str, tensor: Tensor) -> None:
    """Raise ValueError for a tensor with a NaN or Inf, which would spoil the parameters at the next step."""
    need(bool(tensor.isfinite().all()), f"{name} has numbers that are not finite")
