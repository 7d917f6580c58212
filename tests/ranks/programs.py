"""Programs as a user runs them: on ranks with the environment and the store that torchrun gives them."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.interpreter import python
from tests.pages import ROOT

DEADLINE_S = 100.0

#: What the other ranks have to end, when one has failed.
GRACE_S = 15.0

#: What a process has to print its stacks.
ABORT_S = 5.0


def launch(program: Path | str, folder: Path, *arguments: str, processes: int = 2) -> str:
    """Run a script, or a module by its name, on several ranks in a folder; return what they print. Raises AssertionError, with
    that, where one fails or does not end."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=DEADLINE_S))
    environment = {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": f"{os.getpid()}-{store.port}",
    }
    command = [python(), *(["-m"] if isinstance(program, str) else []), str(program), *arguments]
    with tempfile.TemporaryFile("w+") as output:
        ranks = [
            start(command, folder, output.fileno(), **environment, RANK=str(rank), LOCAL_RANK=str(rank))
            for rank in range(processes)
        ]
        deadline = time.monotonic() + DEADLINE_S
        try:
            while None in (codes := [rank.poll() for rank in ranks]) and time.monotonic() < deadline:
                if any(codes):
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                time.sleep(0.01)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        output.seek(0)
        said = output.read()
    assert codes == [0] * processes, said
    return said


def launch_text(script: str, folder: Path, processes: int = 2) -> str:
    """Run the text of a script, as launch() does."""
    path = folder / "train.py"
    path.write_text(script)
    return launch(path, folder, processes=processes)


def start(command: list[str], folder: Path, output: int = subprocess.PIPE, **environment: str) -> subprocess.Popen[str]:
    """Start a command whose ranks find gradwire in this clone, with stdout and stderr as one output."""
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1", **environment},
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process: subprocess.Popen[str], deadline_s: float = DEADLINE_S) -> tuple[int, str]:
    """Return the exit code of a process, and what it printed. Raises AssertionError if it does not end, with the stacks of its
    threads and of those of its descendants, which SIGABRT ends."""
    with process:
        try:
            said, _ = process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            pids = [process.pid, *started_by(process.pid)]
            ranks = [pid for pid in pids if not started_by(pid)]
            abort(ranks)
            time.sleep(1.0)  # a launcher passes on what its ranks print
            abort([pid for pid in pids if pid not in ranks])
            try:
                said, _ = process.communicate(timeout=ABORT_S)
            except subprocess.TimeoutExpired as late:
                said = (late.stdout or b"").decode(errors="replace")
            raise AssertionError(f"{process.args} has not ended after {deadline_s:g} s:\n{said}") from None
        finally:
            process.kill()
    return process.returncode, said


def abort(pids: list[int]) -> None:
    """End processes by SIGABRT, without core dumps."""
    for pid in pids:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
            os.kill(pid, signal.SIGABRT)


def started_by(pid: int) -> list[int]:
    """Return the descendants of a process."""
    children = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):  # it has ended
            if f"\nPPid:\t{pid}\n" in status.read_text():
                children.append(int(status.parent.name))
    return children + [each for child in children for each in started_by(child)]
