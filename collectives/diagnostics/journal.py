"""The files that a rank writes for `gradwire report`: JSON lines, which remain if the rank is killed."""

from __future__ import annotations

import json
import logging
import platform
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO
from uuid import uuid4

import torch

from gradwire.collectives.schedules.topology import Machine

_log = logging.getLogger("gradwire")

#: The least time between two lines of a tally: a second, or this share of its age if that is longer, so that the files
#: of a long run stay short. A killed rank loses the operations of this time at most.
_EVERY_S, _EVERY_SHARE = 1.0, 0.02

OPERATIONS, STEPS = "operations", "steps"
"""The kinds of journals, with which the names of their files begin."""


class Journal:
    """Appends lines to a new file in a folder. If that fails, it logs one warning and writes nothing more, so that
    training goes on. kind: the beginning of the file's name. header: the first line; its key "rank" is this process's
    rank."""

    def __init__(self, folder: Path, kind: str, header: Mapping[str, Any]) -> None:
        self._rank = header["rank"]
        self._file: TextIO | None = None
        try:
            self._file = (folder / f"{kind}-{uuid4().hex}.jsonl").open("w", buffering=1)
        except OSError as error:
            self._give_up(error)
        self.append(header)

    def append(self, line: Any) -> None:
        """Write a line. line: a value that JSON can represent."""
        if self._file is not None:
            try:
                self._file.write(f"{json.dumps(line)}\n")
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._file = None
        _log.warning("gradwire: the report will not contain rank %d: %s", self._rank, error)


class OperationTally:
    """Sums the calls, bytes and seconds of one Communicator's operations by verb, codec, algorithm, device type and bit
    length of the message's bytes, and writes the sums from time to time.

    folder: that of the journal, whose header describes this process. rank: that among all processes. size, routes:
    those of the Communicator. A line is a list of [verb, codec, algorithm, device type, bit length, calls, bytes of the
    messages, seconds, most bytes per second of one call]. Each line replaces the one before.
    """

    def __init__(self, folder: Path, rank: int, size: int, routes: Sequence[str]) -> None:
        is_on_gpu = torch.cuda.is_initialized()
        header = {
            "rank": rank,
            "size": size,
            "routes": routes,
            "host": socket.gethostname(),
            "device": torch.cuda.get_device_name() if is_on_gpu else Machine.here().description,
            "threads": torch.get_num_threads(),
            "versions": [f"torch {torch.__version__}", f"Python {platform.python_version()}"],
        }
        self._journal = Journal(folder, OPERATIONS, header)
        self._rows: dict[tuple[str, str, str, str, int], list[float]] = {}
        self._lock = threading.RLock()  # the garbage collector may call write() inside of add()
        self._began_s = self._written_s = time.monotonic()

    def add(self, name: str, duration_ns: int, notes: Mapping[str, Any]) -> None:
        """Add an operation. notes: its bytes, codec, algorithm and device, as far as it has them."""
        nbytes, seconds = notes.get("bytes", 0), max(1, duration_ns) / 1e9
        with self._lock:
            kind = notes.get("codec", "none"), notes.get("algorithm", ""), notes.get("device", "cpu")
            key = name, *kind, nbytes.bit_length()
            row = self._rows.setdefault(key, [0, 0, 0.0, 0.0])
            row[:3] = row[0] + 1, row[1] + nbytes, row[2] + seconds
            row[3] = max(row[3], nbytes / seconds)
            now_s = time.monotonic()
            is_due = now_s - self._written_s > max(_EVERY_S, _EVERY_SHARE * (now_s - self._began_s))
        if is_due:
            self.write()

    def write(self) -> None:
        """Write the sums so far."""
        with self._lock:
            self._written_s = time.monotonic()
            self._journal.append([[*key, *row] for key, row in self._rows.items()])
