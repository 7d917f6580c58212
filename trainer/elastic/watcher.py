"""Remove the memory of a job once the process that launched its ranks has ended. A script that imports nothing from gradwire.

Arguments: the id and the start of that process, and the prefix of the names of the job's files.
"""

from __future__ import annotations

import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

FOLDER = Path("/dev/shm")
"""The folder of files in memory, which survive the process that wrote them."""

#: Seconds between two checks whether the agent has ended.
_POLL_S = 0.5


def started_at(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 if it has ended, also as a zombie."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if state in "ZX" else int(fields[18])


def remove(prefix: str) -> None:
    """Remove the files whose names begin with a prefix."""
    for path in FOLDER.glob(f"{prefix}*"):
        with suppress(OSError):
            path.unlink()


def main() -> None:
    """Wait until the process ends, and remove the files. Return at once if another watcher waits to remove them."""
    pid, start, prefix = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    with socket.socket(socket.AF_UNIX) as lock:
        try:
            lock.bind(f"\0{prefix}")
        except OSError:
            return
        while started_at(pid) == start:
            time.sleep(_POLL_S)
        remove(prefix)


if __name__ == "__main__":
    main()
