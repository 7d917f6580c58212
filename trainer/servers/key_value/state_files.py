"""Files with the states of a key-value store's optimizers. Rank 0 writes and reads one file for all servers."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from gradwire.collectives import Communicator
from gradwire.trainer.servers.key_value.catalogue import Name
from gradwire.trainer.trees import broadcast, gather
from gradwire.trainer.world.world import here

FORMAT = "gradwire key-value store 1"

_Result = TypeVar("_Result")


def write_states(path: Path, optimizer: str, states: dict[Name, Any], communicator: Communicator | None) -> None:
    """Write the states of all ranks to one file on rank 0. An older file is replaced only when the new one is complete.
    Collective. optimizer: the class name of the optimizers.

    If the file cannot be written, raises the error, such as OSError, on rank 0, and ValueError on the others.
    """
    parts = [states] if communicator is None else gather(states, 0, communicator)

    def write() -> None:
        everyones = {name: state for part in parts or [] for name, state in part.items()}
        _replace(path, {"format": FORMAT, "optimizer": optimizer, "states": everyones})

    _by_first(write, f"could not write {path}", communicator)


def read_states(path: Path, optimizer: str, communicator: Communicator | None) -> dict[Name, Any]:
    """Return the states that write_states() wrote. Only rank 0 reads the file. Collective.

    If the file cannot be read, raises the error, such as OSError, on rank 0, and ValueError on the others. Raises ValueError on
    all ranks if the file is of another kind or of another optimizer.
    """

    def read() -> dict[str, Any]:
        data = path.read_bytes()
        try:
            saved: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
            return {key: saved[key] for key in ("format", "optimizer", "states")}
        except Exception as error:
            raise ValueError(f"{here()}{path} is not a file of save_optimizer_states(): {error!r}") from error

    saved = _by_first(read, f"could not read {path}", communicator)
    if communicator is not None:
        saved = broadcast(saved, 0, communicator)
    assert saved is not None
    states: dict[Name, Any] = saved["states"]
    found = saved["format"], saved["optimizer"]
    if found != (FORMAT, optimizer):
        raise ValueError(f"{here()}{path} is not of {FORMAT} and {optimizer}, but of {found[0]} and {found[1]}")
    return states


def _replace(path: Path, saved: dict[str, Any]) -> None:
    """Write a temporary file, and rename it to path when it is complete. Leave no temporary file behind."""
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            torch.save(saved, file)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _by_first(act: Callable[[], _Result], what: str, communicator: Communicator | None) -> _Result | None:
    """Call act() on rank 0 and return its result; return None on the other ranks. If act() fails, raises its error on rank 0,
    and ValueError with its text on the others. what: the failed action, for that text."""
    if communicator is None:
        return act()
    result, fault = None, None
    try:
        result = act() if communicator.rank == 0 else None
    except Exception as error:  # the other ranks wait for this rank's record
        fault = error
    failed = communicator.allgather_record(None if fault is None else f"{what}: {fault}")[0]
    if fault is not None:
        raise fault
    if failed is not None:
        raise ValueError(f"{here()}rank 0 {failed}")
    return result
