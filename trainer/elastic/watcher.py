"""Removes the memory of a job when the process that launched its ranks has ended. Runs as a script, with no other module of ours.

Arguments: id and start of that process, and how the names of the job's files begin.
"""

from __future__ import annotations

import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

FOLDER = Path("/dev/shm")
"""Where memory outlives the process that has filled it."""

_LOOK_S = 0.5


def started_at(pid: int) -> int:
    """Return when a process started, in ticks of the clock since boot; 0 for one that has ended or waits to be reaped."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if state in "ZX" else int(fields[18])


def remove(prefix: str) -> None:
    """Remove the files whose names begin so."""
    for path in FOLDER.glob(f"{prefix}*"):
        with suppress(OSError):
            path.unlink()


def main() -> None:
    """Wait for the end of the process, and remove the files; another watcher of them leaves that to the first."""
    pid, start, prefix = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    with socket.socket(socket.AF_UNIX) as lock:
        try:
            lock.bind(f"\0{prefix}")
        except OSError:
            return
        while started_at(pid) == start:
            time.sleep(_LOOK_S)
        remove(prefix)


if __name__ == "__main__":
    main()
