"""How a job runs: starts an agent on each host, here as a child process and elsewhere by ssh, and ends them together."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any, BinaryIO

from gradwire.collectives.environment import HOST_ID
from gradwire.collectives.link.own_address import own_address
from gradwire.trainer.cli.agent import READY, REPORT
from gradwire.trainer.cli.failure import Failure, LastWords, exit_status, told_failures
from gradwire.trainer.cli.hosts import Host
from gradwire.trainer.cli.options import Job

_LOOK_S = 0.1
#: What the ranks of other hosts have to say themselves that a rank is lost, before they are ended.
_GRACE_S = 5.0
#: What agents have to end their ranks (torch's agent kills them after 30 s), before they are killed themselves.
_END_S = 45.0

_OF_A_RANK = re.compile(rb"\[(\d+)\]<(stdout|stderr)>: (.*)", re.DOTALL)

#: What of the environment goes to other hosts. The id of a host is its own.
_PREFIXES = ("COLLECTIVES_", "GLOO_", "HOROVOD_", "NCCL_")
_NAMES = ("LD_LIBRARY_PATH", "OMP_NUM_THREADS", "PATH", "PYTHONPATH", "VIRTUAL_ENV")
_NOT = (HOST_ID,)


class _Agent:
    """Holds the agent of one host, and its output so far."""

    def __init__(self, host: Host, command: list[str], environment: dict[str, str]) -> None:
        self.host = host
        self.is_ready = False
        self.report: dict[str, Any] | None = None
        self.words = LastWords()
        self._rests = {"stdout": b"", "stderr": b""}
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the launcher, which ends all
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.streams: dict[str, IO[bytes]] = {"stdout": self.process.stdout, "stderr": self.process.stderr}
        for stream in self.streams.values():
            os.set_blocking(stream.fileno(), False)

    def read(self, name: str) -> list[bytes]:
        """Return the new lines of a stream, all that are there."""
        if name not in self.streams:
            return []
        pieces = [self._rests[name]]
        with suppress(BlockingIOError):
            while piece := os.read(self.streams[name].fileno(), 1 << 16):
                pieces.append(piece)
            self.streams.pop(name).close()
            pieces.append(b"\n")  # at the end, what is there is a line
        *lines, self._rests[name] = b"".join(pieces).split(b"\n")
        return lines

    def ask_to_end(self) -> None:
        """Let it end its ranks and itself."""
        with suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()

    def leave(self) -> None:
        """Let go of it. An agent of this host that still runs ends its ranks first; an ssh is ended, as its agent then will."""
        self.ask_to_end()
        if self.process.poll() is None and not (self.is_ready and self.host.is_here):
            self.process.terminate()
        for stream in self.streams.values():
            stream.close()


class _Run:
    """Runs one job: hears its agents until they have ended, and decides when they must."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._agents: list[_Agent] = []
        self._running: list[_Agent] = []
        self._words: dict[int, LastWords] = {}
        self._files: dict[tuple[int, str], BinaryIO] = {}
        self._failures: list[Failure] = []
        self._signals: list[int] = []
        self._end_at: float | None = None  # when the agents are asked to
        self._kill_at: float | None = None

    def run(self) -> int:
        """Return the exit status of the job."""
        environment = {**os.environ, **self._job.settings}
        made = commands(self._job, os.environ)
        with self._signals_heard():
            try:
                for host, command in zip(self._job.hosts, made, strict=True):
                    if self._job.verbose:
                        print(f"gradwire: {shlex.join(command)}", file=sys.stderr, flush=True)
                    self._start(host, command, environment)
                self._follow(time.monotonic() + self._job.start_timeout_s)
            finally:
                for agent in self._agents:
                    agent.leave()
                for file in self._files.values():
                    file.close()
        for line in told_failures(self._failures):
            print(line, file=sys.stderr, flush=True)
        if self._signals:
            return 128 + self._signals[0]
        return exit_status(self._failures) if self._failures else 0

    def _start(self, host: Host, command: list[str], environment: dict[str, str]) -> None:
        try:
            agent = _Agent(host, command, environment)
        except OSError as error:
            self._fail(Failure(host.name, None, None, f"cannot start {command[0]}: {error.strerror}"), 0)
            return
        self._agents.append(agent)
        self._running.append(agent)

    def _follow(self, start_by: float) -> None:
        while self._running:
            wait([stream.fileno() for agent in self._running for stream in agent.streams.values()], _LOOK_S)
            now = time.monotonic()
            for agent in [*self._running]:
                has_ended = agent.process.poll() is not None  # and what it said is all there
                self._hear(agent)
                if has_ended:
                    self._running.remove(agent)
                    self._ended(agent)
            if now > start_by and self._end_at is None:
                # This computer's own agent needs no deadline: it is seen to end, and a busy computer is slow to start.
                for agent in [a for a in self._running if not a.is_ready and not a.host.is_here]:
                    why = f"did not start within {self._job.start_timeout_s} s"
                    words = f"{why}: {agent.words.text}" if agent.words.text else why
                    self._fail(Failure(agent.host.name, None, None, words), 0)
            if self._signals:
                self._end_at = now
            if self._end_at is not None and now >= self._end_at and self._kill_at is None:
                for agent in self._running:
                    agent.ask_to_end()
                    if not agent.is_ready:
                        agent.process.terminate()
                self._kill_at = now + _END_S
            if self._kill_at is not None and now >= self._kill_at:
                for agent in self._running:
                    agent.process.kill()
                return
            if len(self._signals) > 1:
                return

    def _hear(self, agent: _Agent) -> None:
        """Take what an agent has said."""
        for stream, line in [(name, line) for name in ("stdout", "stderr") for line in agent.read(name)]:
            if stream == "stdout" and (match := _OF_A_RANK.fullmatch(line)) is not None:
                self._print(int(match[1]), match[2].decode(), line, match[3])
            elif stream == "stdout" and line.startswith(READY):
                agent.is_ready = True
            elif stream == "stdout" and line.startswith(REPORT):
                agent.report = json.loads(line[len(REPORT) :])
            else:
                text = line.decode(errors="replace")
                agent.words.hear(text)
                if self._job.verbose:
                    print(f"[{agent.host.name}]: {text}", file=sys.stderr, flush=True)

    def _print(self, rank: int, stream: str, line: bytes, text: bytes) -> None:
        to = sys.stdout if stream == "stdout" else sys.stderr
        to.buffer.write(line + b"\n")  # as it came, whatever the encoding
        to.buffer.flush()
        if stream == "stderr":
            self._words.setdefault(rank, LastWords()).hear(text.decode(errors="replace"))
        if self._job.output_folder is not None:
            self._file(self._job.output_folder, rank, stream).write(text + b"\n")

    def _file(self, folder: Path, rank: int, stream: str) -> BinaryIO:
        """Return the file of a rank's stream. Ranks have equally many digits, so that their folders sort."""
        if (rank, stream) not in self._files:
            digits = len(str(sum(host.slots for host in self._job.hosts) - 1))
            path = folder / f"rank.{rank:0{digits}}" / stream
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[rank, stream] = path.open("wb", buffering=0)
        return self._files[rank, stream]

    def _ended(self, agent: _Agent) -> None:
        """Note why an agent failed, if it did, and was not asked to."""
        report = agent.report
        for rank, exit_code in (report or {}).get("failures", []):
            words = self._words.get(rank, LastWords()).text
            self._fail(Failure(agent.host.name, rank, exit_code, words), _GRACE_S)
        if self._kill_at is not None or (report is not None and (not report or "failures" in report)):
            return
        name, code = agent.host.name, agent.process.returncode
        if report is not None and "error" in report:
            self._fail(
                Failure(name, None, None, f"the ranks did not start: {report['error'].splitlines()[0]}"), _GRACE_S
            )
        elif not agent.is_ready and not agent.host.is_here:
            self._fail(Failure(name, None, None, f"by ssh: {agent.words.text or f'exit code {code}'}"), 0)
        else:
            self._fail(Failure(name, None, code, agent.words.text), _GRACE_S)

    def _fail(self, failure: Failure, grace_s: float) -> None:
        self._failures.append(failure)
        end_at = time.monotonic() + grace_s
        self._end_at = end_at if self._end_at is None else min(self._end_at, end_at)

    @contextmanager
    def _signals_heard(self) -> Iterator[None]:
        """Note Ctrl-C and SIGTERM: the first asks all to end, another one leaves at once."""
        before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        self._signals.append(number)


def commands(job: Job, environment: Mapping[str, str]) -> list[list[str]]:
    """Return what starts the agent of each host. Raises ValueError where this host has no address for the others."""
    return [_command(job, node, environment) for node in range(len(job.hosts))]


def handed_on(job: Job, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that go to other hosts. Raises ValueError for a name given with -x that is not set here."""
    if missing := next((name for name in job.names if name not in environment), None):
        raise ValueError(f"-x {missing}: it is not set here; write -x {missing}=VALUE")
    names = {name for name in environment if name.startswith(_PREFIXES)} | {*_NAMES, *job.names}
    return {name: environment[name] for name in sorted(names - {*_NOT}) if name in environment} | job.settings


def _command(job: Job, node: int, environment: Mapping[str, str]) -> list[str]:
    host = job.hosts[node]
    agent = [sys.executable, "-m", "gradwire.trainer.cli.agent"]
    numbers = {"nodes": len(job.hosts), "node": node, "slots": host.slots, "first-rank": host.first_rank}
    for name, number in (numbers | {"timeout": job.start_timeout_s}).items():
        agent += [f"--{name}", str(number)]
    if len(job.hosts) > 1:
        agent += ["--endpoint", f"{_master(job, environment)}:{job.master_port}"]
    agent += job.command
    return agent if host.is_here else _by_ssh(job, host, agent, environment)


def _master(job: Job, environment: Mapping[str, str]) -> str:
    """Return the address of the first host, as all hosts know it."""
    first = job.hosts[0]
    address = own_address({**environment, **job.settings}) if first.is_here else first.name
    return f"[{address}]" if ":" in address else address


def _by_ssh(job: Job, host: Host, agent: list[str], environment: Mapping[str, str]) -> list[str]:
    settings = [f"{name}={value}" for name, value in handed_on(job, environment).items()]
    ssh = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={job.start_timeout_s}", "-o", "ServerAliveInterval=15"]
    if job.ssh_port is not None:
        ssh += ["-p", str(job.ssh_port)]
    if job.ssh_identity_file is not None:
        ssh += ["-i", job.ssh_identity_file]
    return [*ssh, host.name, f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(['env', *settings, *agent])}"]


def run_job(job: Job) -> int:
    """Run a job to its end, and return its exit status.

    Raises ValueError where this host has no address for others, lacks a variable to hand on, or a folder cannot be made.
    """
    if job.notice is not None:
        print(job.notice, file=sys.stderr, flush=True)
    if job.output_folder is not None:
        try:
            job.output_folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--output-filename {job.output_folder}: {error.strerror}") from error
    return _Run(job).run()
