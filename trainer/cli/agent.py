"""The agent of one host: starts the ranks of the host with torchrun's agent, and reports their output and how they end.

The launcher starts the agent, on other hosts by ssh, and reads its stdout. The agent writes lines: READY once its modules are
imported; `[3]<stdout>: text` for each line that rank 3 prints; REPORT with JSON at the end. Only torch and ssh write to stderr.
The end of stdin means that the launcher has ended, or wants the ranks to end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

READY, REPORT = b"[agent]<ready>", b"[agent]<report>: "

#: How often the agent checks for new output of ranks.
_POLL_S = 0.05
#: The time that torch's agent has to end the ranks (it kills them after 30 s) and itself.
_END_S = 40.0


class _OutputCopier:
    """Copies the output of ranks from their files to stdout, line by line, each prefixed with rank and stream."""

    def __init__(self, folder: Path, first_rank: int) -> None:
        self._folder = folder
        self._first_rank = first_rank
        self._files: dict[Path, Any] = {}
        self._rests: dict[Path, bytes] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="gradwire.output", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Copy the rest, including a last line without a line end. All ranks must have ended."""
        self._ended.set()
        self._thread.join()
        self._copy()
        for path, rest in self._rests.items():
            if rest:
                self._write(path, [rest])
        for file in self._files.values():
            file.close()

    def _follow(self) -> None:
        with suppress(BrokenPipeError):  # the launcher has ended, so stdin ends too
            while not self._ended.wait(_POLL_S):
                self._copy()

    def _copy(self) -> None:
        for path in sorted(self._folder.glob("*/attempt_*/*/std*.log")):
            if path not in self._files:
                self._files[path] = path.open("rb")
            new = self._files[path].read().replace(b"\r\n", b"\n").replace(b"\r", b"\n")  # progress bars use \r
            *lines, self._rests[path] = (self._rests.get(path, b"") + new).split(b"\n")
            if lines:
                self._write(path, lines)

    def _write(self, path: Path, lines: list[bytes]) -> None:
        rank = self._first_rank + int(path.parent.name)
        prefix = f"[{rank}]<{path.stem}>: ".encode()
        say(b"\n".join(prefix + line for line in lines))


def say(text: bytes) -> None:
    """Write lines to the launcher."""
    sys.stdout.buffer.write(text + b"\n")
    sys.stdout.buffer.flush()


def _end_with_the_launcher() -> None:
    """End the ranks when stdin ends. The ranks get an empty stdin."""
    stdin = os.dup(0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)

    def wait_for_the_end() -> None:
        with suppress(OSError):
            while os.read(stdin, 1):
                pass
        os.kill(
            os.getpid(), signal.SIGTERM
        )  # torch's agent ends the ranks, unless it waits in a call that handles no signal
        time.sleep(_END_S)
        os._exit(1)

    threading.Thread(target=wait_for_the_end, name="gradwire.launcher", daemon=True).start()


def main() -> int:
    """Run this host's ranks, and return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoint", help="where the agents of several hosts meet")
    for name in ("--nodes", "--node", "--slots", "--first-rank", "--timeout"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    flags = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONUNBUFFERED"] = "1"  # lines are to appear when they are printed
    _end_with_the_launcher()
    say(READY)
    with tempfile.TemporaryDirectory(prefix="gradwire-") as folder:
        output = _OutputCopier(Path(folder), flags.first_rank)
        try:
            report = _run(flags, folder)
        finally:
            output.finish()
    say(REPORT + json.dumps(report).encode())
    return 1 if report else 0


def _run(flags: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Run the ranks until they end. Return the failures: the exit codes of ranks, a signal or an error of the agent."""
    logs = DefaultLogsSpecs(log_dir=folder, redirects=Std.ALL)
    alone = flags.endpoint is None
    config = LaunchConfig(
        min_nodes=flags.nodes,
        max_nodes=flags.nodes,
        nproc_per_node=flags.slots,
        logs_specs=logs,
        run_id=str(uuid.uuid4()) if alone else "gradwire",
        rdzv_backend="c10d" if alone else "static",
        rdzv_endpoint="localhost:0" if alone else flags.endpoint,
        rdzv_configs={"timeout": flags.timeout} if alone else {"timeout": flags.timeout, "rank": flags.node},
        local_addr="127.0.0.1" if alone else None,  # whatever this host's name resolves to
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
    )
    try:
        elastic_launch(config, flags.command[0])(*flags.command[1:])
    except ChildFailedError as error:
        return {"failures": [[rank, failure.exitcode] for rank, failure in sorted(error.failures.items())]}
    except SignalException as error:
        return {"signal": int(error.sigval)}
    except Exception as error:  # the launcher reports any error of torch's agent
        return {"error": f"{type(error).__name__}: {error}"}
    return {}


if __name__ == "__main__":
    sys.exit(main())
