"""Files with the states of a key-value store's optimizers. Rank 0 writes and reads one file for all servers."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch

from gradwire.collectives import Communicator
from gradwire.trainer.servers.keys import Name, agreed
from gradwire.trainer.trees import broadcast, gather

FORMAT = "gradwire key-value store 1"


def write_states(path: Path, optimizer: str, states: dict[Name, Any], communicator: Communicator) -> None:
    """Write the states of all ranks to one file on rank 0. An older file is replaced only when the new one is complete.
    Collective. optimizer: the class name of the optimizers.

    If the file cannot be written, raises the error, such as OSError, on rank 0, and ValueError on the others.
    """
    parts = gather(states, 0, communicator)

    def write() -> tuple[None, None]:
        if parts is not None:
            everyones = {name: state for part in parts for name, state in part.items()}
            _replace(path, {"format": FORMAT, "optimizer": optimizer, "states": everyones})
        return None, None

    agreed(communicator, write)


def read_states(path: Path, optimizer: str, communicator: Communicator) -> dict[Name, Any]:
    """Return the states that write_states() wrote. Only rank 0 reads the file. Collective.

    If the file cannot be read, raises the error, such as OSError, on rank 0, and ValueError on the others. Raises ValueError on
    all ranks if the file is of another kind or of another optimizer.
    """

    def read() -> tuple[dict[str, Any], None]:
        if communicator.rank > 0:
            return {}, None
        data = path.read_bytes()
        try:
            saved: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
            return {key: saved[key] for key in ("format", "optimizer", "states")}, None
        except Exception as error:
            raise ValueError(f"{path} is not a file of save_optimizer_states(): {error!r}") from error

    saved = broadcast(agreed(communicator, read), 0, communicator)
    states: dict[Name, Any] = saved["states"]
    found = saved["format"], saved["optimizer"]
    if found != (FORMAT, optimizer):
        raise ValueError(f"{path} is not of {FORMAT} and {optimizer}, but of {found[0]} and {found[1]}")
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
