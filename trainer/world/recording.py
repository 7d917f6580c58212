"""One timeline of all ranks: rank 0 gathers the recordings of all ranks, converts their times to its clock, and writes it."""

from __future__ import annotations

import json
import logging
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch

from gradwire.collectives import CollectiveError, Communicator
from gradwire.collectives.diagnostics.timeline import (
    Offset,
    Recording,
    Timeline,
    measure,
    now_ns,
    trace_of,
    write_trace,
)

_log = logging.getLogger("gradwire")


class Recorder:
    """Records the operations of a world's Communicators from start() to stop(). path: the timeline's file; None if stopped."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self._timeline: Timeline | None = None
        self._communicators: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()
        self._added = 0

    def add(self, communicator: Communicator) -> None:
        """Add a Communicator to the present recording, if any, and to all later ones."""
        if communicator not in self._communicators.values():
            self._communicators[self._added] = communicator
            self._record(self._added, communicator)
            self._added += 1

    def start(self, path: Path, *, marks_cycles: bool) -> None:
        """Start recording."""
        self.path = path
        self._timeline = Timeline(marks_cycles=marks_cycles)
        for number, communicator in self._communicators.items():
            self._record(number, communicator)

    def stop(self, communicator: Communicator, timeout_s: float | None = None) -> None:
        """Stop recording. Rank 0 writes the recordings of all ranks. communicator: that of all ranks. Collective.

        timeout_s: the limit of the wait for the other ranks, besides the operations' own deadline. If they cannot be reached,
        each rank writes its own file, path followed by ".rank" and its rank, and raises CollectiveError.
        """
        assert self.path is not None
        assert self._timeline is not None
        recording, path = self._timeline.recording(), self.path
        self.path = self._timeline = None
        for recorded in self._communicators.values():
            recorded.record(None)
        try:
            work = communicator.barrier(async_op=True)
            work.wait(timeout_s)
            offsets = measure(now_ns, lambda row: _rows(communicator, row))
            recordings = _gathered(communicator, recording)
        except CollectiveError:
            mine = communicator.rank
            alone = path.with_name(f"{path.name}.rank{mine}")
            write_trace(alone, trace_of({mine: recording}, [Offset(0, 0)] * (mine + 1)))
            _log.warning("gradwire: rank %d: the timeline of this rank alone is in %s", mine, alone)
            raise
        if recordings:
            write_trace(path, trace_of(dict(enumerate(recordings)), offsets))

    def _record(self, number: int, communicator: Communicator) -> None:
        if self._timeline is not None:
            communicator.record(self._timeline, f"communicator {number}" if number else "verbs")


def _rows(communicator: Communicator, row: Sequence[int]) -> list[list[int]]:
    """Return every rank's row of numbers."""
    mine = torch.tensor(row, dtype=torch.int64, device=communicator.control_device)
    everyones = mine.new_empty(communicator.size, len(row))
    communicator.allgather(everyones.view(-1), mine)
    rows: list[list[int]] = everyones.tolist()
    return rows


def _gathered(communicator: Communicator, recording: Recording) -> list[Recording]:
    """Return every rank's recording on rank 0, and an empty list on the other ranks."""
    data = zlib.compress(json.dumps(recording.to_record()).encode(), 1)
    lengths = [length for (length,) in _rows(communicator, [len(data)])]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    mine = padded.to(communicator.control_device)
    parts = [torch.empty_like(mine) for _ in lengths] if communicator.rank == 0 else None
    communicator.gather(mine, parts)
    pieces = zip(parts or (), lengths, strict=bool(parts))
    return [
        Recording.from_record(json.loads(zlib.decompress(part[:length].cpu().numpy().tobytes())))
        for part, length in pieces
    ]
