"""Checkpoints of a run: one file for the state that all ranks share, and one per rank for its own state."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

import gradwire as hvd

COMMON = "checkpoint.pt"
_UNFINISHED = ".partial"


class Checkpoint:
    """Saves and loads a checkpoint. The common file is written last and has the step of the others, so a crash leaves
    the last checkpoint whole."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.path = folder / COMMON
        self._device = device

    def save(self, common: dict[str, Any], mine: dict[str, Any] | None, step: int) -> None:
        """Save a checkpoint, and remove the files of earlier ones, also those that a killed process has not completed.
        common: the state of rank 0. mine: this rank's own; None on all ranks or on none. Collective."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if mine is not None:
            _write(mine, self._part(hvd.rank(), step))
        hvd.barrier()
        if hvd.rank() == 0:
            _write({**common, "parts": 0 if mine is None else hvd.size(), "step": step}, self.path)
            for part in self.path.parent.glob("checkpoint.rank*.step*"):
                if part.suffix == _UNFINISHED or (part.suffix == ".pt" and not part.stem.endswith(f".step{step}")):
                    part.unlink()
        hvd.barrier()

    def load(self) -> dict[str, Any] | None:
        """Return the common state, if there is a checkpoint."""
        if not self.path.exists():
            return None
        loaded: dict[str, Any] = torch.load(self.path, map_location=self._device, weights_only=True)
        return loaded

    def load_parts(self, number: int, step: int) -> list[dict[str, Any]]:
        """Return this rank's own state, then those of ranks that no longer exist, divided among all. A new rank gets a
        copy of another rank's. number: how many ranks saved."""
        rank, size = hvd.rank(), hvd.size()
        files = [self._part(index, step) for index in (rank % number, *range(size + rank, number, size))]
        return [torch.load(file, map_location=self._device, weights_only=True) for file in files]

    def _part(self, rank: int, step: int) -> Path:
        return self.path.with_name(f"checkpoint.rank{rank}.step{step}.pt")


def _write(state: dict[str, Any], path: Path) -> None:
    """Write a file in whole or not at all."""
    temporary = path.with_suffix(_UNFINISHED)
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
