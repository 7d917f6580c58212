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
from gradwire.trainer.world.world import here

FORMAT = "gradwire key-value store 1"

_Result = TypeVar("_Result")


def write_states(path: Path, optimizer: str, states: dict[Name, Any], communicator: Communicator | None) -> None:
    """Write the states of all ranks to one file on rank 0. An older file is replaced only when the new one is complete.
    Collective. optimizer: the class name of the optimizers.

    If the file cannot be written, raises the error, such as OSError, on rank 0, and ValueError on the others.
    """
    parts = []
    if communicator is not None:
        mine = _packed(states)
        sizes = communicator.allgather_record(mine.numel())
        if communicator.rank > 0:
            communicator.send(mine, 0)
        else:
            for rank in range(1, communicator.size):
                theirs = torch.empty(sizes[rank], dtype=torch.uint8, device="cpu")
                communicator.recv(theirs, rank)
                parts.append(theirs)

    def write() -> None:
        everyones = dict(states)
        for part in parts:
            everyones |= _unpacked(part)
        _replace(path, {"format": FORMAT, "optimizer": optimizer, "states": everyones})

    _by_first(write, f"could not write {path}", communicator)


def read_states(path: Path, optimizer: str, communicator: Communicator | None) -> dict[Name, Any]:
    """Return the states that write_states() wrote. Only rank 0 reads the file. Collective.

    If the file cannot be read, raises the error, such as OSError, on rank 0, and ValueError on the others. Raises ValueError on
    all ranks if the file is of another kind or of another optimizer.
    """
    read = _by_first(path.read_bytes, f"could not read {path}", communicator) or b""
    data = (
        torch.frombuffer(bytearray(read), dtype=torch.uint8)
        if read
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    if communicator is not None:
        size = communicator.allgather_record(data.numel())[0]
        data = data if communicator.rank == 0 else torch.empty(size, dtype=torch.uint8, device="cpu")
        communicator.broadcast(data, 0)
    try:
        saved = _unpacked(data)
        states: dict[Name, Any] = saved["states"]
        found = (saved["format"], saved["optimizer"])
    except Exception as error:
        raise ValueError(f"{here()}{path} is not a file of save_optimizer_states(): {error!r}") from error
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


def _packed(states: dict[Name, Any]) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(states, file)
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


def _unpacked(data: torch.Tensor) -> dict[Any, Any]:
    loaded: dict[Any, Any] = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
    return loaded
