"""The agent of one host of a job: starts and ends workers at the launcher's request. A worker is the process of a rank. The
agent is a script that imports no other module of the package.

The agent reads lines from stdin: `key` and the key of the job, if it has one; `start 3` and the environment variables of worker 3
as JSON; `kill 3` to kill the worker at once; `stop 3` to let it end by itself. The end of stdin means that the launcher has
ended, or wants all workers to end. The agent writes lines to stdout: READY; `[3]<stdout>: text` for each line that worker 3
prints; EXITED with a worker's number and exit code. Arguments: the command of a worker.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from typing import IO

#: As in gradwire.collectives.environment.
KEY_FILE = "GRADWIRE_KEY_FILE"

READY, EXITED = b"[agent]<ready>", b"[agent]<exited>: "

#: The time that workers have to end by themselves before the agent kills them.
_STOP_S = 30.0
#: How long, after the last worker has ended, the agent still reads the output of processes that workers started.
_OUTPUT_S = 1.0
#: The bytes that the agent reads from one output before it serves others, and how many times as many after the worker has
#: ended: more than a pipe holds.
_PIECE_BYTES, _LAST_PIECES = 1 << 16, 64
#: The longest time between two checks of all workers, in case no signal announces an end.
_POLL_S = 60.0
_PR_SET_PDEATHSIG = 1


class Lines:
    """Reads whole lines from a pipe, which does not block. The launcher reads its agents by it too. A carriage return, as
    progress bars print, ends a line too if `splits_at_returns`."""

    def __init__(self, pipe: IO[bytes], *, splits_at_returns: bool = False) -> None:
        self.pipe = pipe
        self._splits_at_returns = splits_at_returns
        self._rest = b""
        os.set_blocking(pipe.fileno(), False)

    def is_open(self) -> bool:
        """Return whether more lines may come."""
        return not self.pipe.closed

    def read(self, pieces: int) -> list[bytes]:
        """Read at most `pieces` pieces, and return their whole lines; at the end of the stream, also its last line. Then close
        the pipe."""
        found = [self._rest]
        with suppress(BlockingIOError):
            for _ in range(pieces):
                found.append(os.read(self.pipe.fileno(), _PIECE_BYTES))
                if not found[-1]:
                    self.pipe.close()
                    break
        text = b"".join(found)
        if self._splits_at_returns:
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = text.split(b"\n")
        return lines if self.is_open() else lines + self.last()

    def last(self) -> list[bytes]:
        """Return the line that has no line end yet, if any."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []


class _HostAgent:
    """Runs the workers of this host."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        self._streams: dict[int, list[tuple[bytes, Lines]]] = {}
        self._kill_at: dict[int, float] = {}
        self._selector = selectors.DefaultSelector()
        self._libc = ctypes.CDLL(None)
        self._told = b""
        self._is_ending = False

    def run(self) -> None:
        """Carry out the launcher's requests until all workers have ended."""
        woken, wakes = os.pipe()
        for descriptor in (woken, wakes):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._be_ending)
        self._stdin = stdin = os.dup(0)
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)  # the stdin of workers
        self._selector.register(stdin, selectors.EVENT_READ, self._listen)
        self._selector.register(woken, selectors.EVENT_READ, lambda: self._drain(woken))
        say(READY)
        end_at = None
        while end_at is None or (self._selector.get_map().keys() - {stdin, woken} and time.monotonic() < end_at):
            deadline = min([*self._kill_at.values(), math.inf if end_at is None else end_at])
            for key, _ in self._selector.select(min(_POLL_S, max(0.0, deadline - time.monotonic()))):
                key.data()
            if self._is_ending:
                for worker in self._workers:
                    self._stop(worker)
            self._reap()
            for worker, deadline in self._kill_at.items():
                if time.monotonic() >= deadline:
                    self._kill_at[worker] = math.inf
                    self._signal(worker, signal.SIGKILL)
            if self._is_ending and not self._workers and end_at is None:
                end_at = time.monotonic() + _OUTPUT_S

    def _drain(self, descriptor: int) -> None:
        with suppress(BlockingIOError):
            os.read(descriptor, 1 << 12)

    def _listen(self) -> None:
        """Carry out the requests that have arrived on stdin."""
        piece = os.read(self._stdin, 1 << 16)
        if not piece:
            self._selector.unregister(self._stdin)
            self._is_ending = True
        *lines, self._told = (self._told + piece).split(b"\n")
        for line in lines:
            what, number, *rest = line.decode().split(" ", 2)
            if what == "key":
                self._keep(number)
            elif what == "start" and not self._is_ending:
                self._start(int(number), json.loads(rest[0]))
            elif what == "kill":
                self._signal(int(number), signal.SIGKILL)
            elif what == "stop":
                self._stop(int(number))

    def _keep(self, key: str) -> None:
        """Keep the key of the job in memory, as a file that only this user can open, and name it to the workers."""
        descriptor = os.memfd_create("gradwire-key")
        os.fchmod(descriptor, 0o600)
        os.write(descriptor, key.encode())
        os.environ[KEY_FILE] = f"/proc/{os.getpid()}/fd/{descriptor}"

    def _start(self, worker: int, variables: dict[str, str]) -> None:
        agent, environment = os.getpid(), {**os.environ, **variables}

        def die_with_the_agent() -> None:
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != agent:
                os._exit(1)

        try:
            process = subprocess.Popen(
                self._command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=die_with_the_agent,
            )
        except OSError as error:
            say(
                b"[%d]<stderr>: cannot start %s: %s"
                % (worker, os.fsencode(self._command[0]), str(error.strerror).encode())
            )
            say(EXITED + b"%d 127" % worker)
            return
        self._workers[worker] = process
        self._streams[worker] = []
        for name, pipe in (("stdout", process.stdout), ("stderr", process.stderr)):
            assert pipe is not None
            prefix, lines = f"[{worker}]<{name}>: ".encode(), Lines(pipe, splits_at_returns=True)
            self._streams[worker].append((prefix, lines))
            self._selector.register(pipe, selectors.EVENT_READ, partial(self._copy, prefix, lines))

    def _copy(self, prefix: bytes, stream: Lines, pieces: int = 1) -> None:
        """Write the next lines of a worker to the launcher."""
        if stream.is_open():
            descriptor = stream.pipe.fileno()
            _say_all(prefix, stream.read(pieces))
            if not stream.is_open():
                self._selector.unregister(descriptor)

    def _reap(self) -> None:
        """Report the workers that have ended, after the rest of their output."""
        for worker, process in [*self._workers.items()]:
            if (code := process.poll()) is not None:
                del self._workers[worker]
                self._kill_at.pop(worker, None)
                for prefix, stream in self._streams.pop(worker):
                    self._copy(prefix, stream, _LAST_PIECES)
                    _say_all(prefix, stream.last())
                say(EXITED + b"%d %d" % (worker, code))

    def _stop(self, worker: int) -> None:
        """Ask a worker to end, unless the agent has asked it already."""
        if worker in self._workers and worker not in self._kill_at:
            self._kill_at[worker] = time.monotonic() + _STOP_S
            self._signal(worker, signal.SIGTERM)

    def _signal(self, worker: int, number: signal.Signals) -> None:
        """Send a signal to a worker that has not been reaped, and to all processes of its group."""
        if worker in self._workers:
            with suppress(ProcessLookupError):
                os.killpg(self._workers[worker].pid, number)

    def _be_ending(self, number: int, frame: object) -> None:
        self._is_ending = True


def _say_all(prefix: bytes, lines: list[bytes]) -> None:
    if lines:
        say(b"\n".join(prefix + line for line in lines))


def say(text: bytes) -> None:
    """Write lines to the launcher. If it has ended, drop them: the end of stdin then ends the agent."""
    text += b"\n"
    with suppress(OSError):
        while text:
            text = text[os.write(1, text) :]


def main() -> None:
    """Run the workers of this host."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONUNBUFFERED"] = "1"  # lines are to appear when they are printed
    _HostAgent(sys.argv[1:]).run()


if __name__ == "__main__":
    main()
