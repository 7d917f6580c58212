"""How hosts reach each other: the process of an agent, a child process on this host or an ssh to another host, and its output;
the store of the launcher, and addresses."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import IO

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from gradwire.collectives.environment import HOST_ID
from gradwire.collectives.link.names import look_up
from gradwire.collectives.link.own_address import own_address
from gradwire.trainer.launcher.failure import LastWords
from gradwire.trainer.launcher.hosts import Host
from gradwire.trainer.launcher.options import Job

#: The environment variables that other hosts get, except HOST_ID, of which each host has its own.
_PREFIXES = ("COLLECTIVES_", "GLOO_", "HOROVOD_", "NCCL_")
_NAMES = ("LD_LIBRARY_PATH", "OMP_NUM_THREADS", "PATH", "PYTHONPATH", "VIRTUAL_ENV")

#: ssh ends after ten seconds without an answer from the host, which is sooner than the ranks' connections fail.
_SSH_GIVES_UP = ("-o", "ServerAliveInterval=2", "-o", "ServerAliveCountMax=5")

#: The environment variable that distinguishes the ranks of a job from those of others.
RUN_ID = "TORCHELASTIC_RUN_ID"
#: The timeout of an operation of the store.
_STORE_S = 60.0

#: The beginning of a line that an agent itself writes.
_OWN = b"[agent]<"


class AgentProcess:
    """Holds the agent process of one host, or the ssh to it, and its output so far. Raises OSError if the command
    cannot be started."""

    def __init__(self, host: Host, command: list[str], environment: Mapping[str, str]) -> None:
        self.host = host
        self.is_ready = False
        self.words = LastWords()
        self._rests = {"stdout": b"", "stderr": b""}
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # only the launcher gets Ctrl-C, and ends all agents
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.streams: dict[str, IO[bytes]] = {"stdout": self.process.stdout, "stderr": self.process.stderr}
        for stream in self.streams.values():
            os.set_blocking(stream.fileno(), False)

    def reports(self, take: Callable[[bytes], bool], *, prints: bool) -> Iterator[bytes]:
        """Read all new lines, and yield those that the agent itself writes. take: takes a line, and returns whether a rank
        printed it. Other lines are of torch or ssh: they are kept for errors, and printed if `prints`."""
        for name in ("stdout", "stderr"):
            for line in self._read(name):
                if name == "stdout" and line.startswith(_OWN):
                    yield line
                elif name == "stderr" or not take(line):
                    text = line.decode(errors="replace")
                    self.words.read(text)
                    if prints:
                        print(f"[{self.host.name}]: {text}", file=sys.stderr, flush=True)

    def _read(self, name: str) -> list[bytes]:
        """Return all new lines of a stream."""
        if name not in self.streams:
            return []
        pieces = [self._rests[name]]
        with suppress(BlockingIOError):
            while piece := os.read(self.streams[name].fileno(), 1 << 16):
                pieces.append(piece)
            self.streams.pop(name).close()
            pieces.append(b"\n")  # the end of the stream ends the last line
        *lines, self._rests[name] = b"".join(pieces).split(b"\n")
        return lines

    @property
    def why_lost(self) -> str:
        """Return why the agent ended before it was ready, as far as known."""
        return f"by ssh: {self.words.text or f'exit code {self.process.returncode}'}"

    def why_late(self, start_timeout_s: int) -> str:
        """Return why the agent was not ready in time, as far as known."""
        why = f"did not start within {start_timeout_s} s"
        return f"{why}: {self.words.text}" if self.words.text else why

    def ask_to_end(self) -> None:
        """Ask the agent to end its ranks and itself. An ssh that is not connected yet ends at once."""
        with suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        if not self.is_ready:
            self.process.terminate()

    def leave(self) -> None:
        """Close the streams. A running agent of this host then ends its ranks and itself; an ssh is terminated, which ends its
        agent."""
        self.ask_to_end()
        if self.process.poll() is None and not self.host.is_here:
            self.process.terminate()
        for stream in self.streams.values():
            stream.close()


def handed_on(job: Job, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that other hosts get. Raises ValueError if a variable named by -x is not set here."""
    if missing := next((name for name in job.names if name not in environment), None):
        raise ValueError(f"-x {missing}: it is not set here; write -x {missing}=VALUE")
    names = {name for name in environment if name.startswith(_PREFIXES)} | {*_NAMES, *job.names}
    return {name: environment[name] for name in sorted(names - {HOST_ID}) if name in environment} | job.settings


def address_for(hosts: Iterable[Host], job: Job, environment: Mapping[str, str]) -> str:
    """Return the numeric address of this host for the others of `hosts`: that from which it reaches the first of them, unless a
    variable names an interface. Raises ValueError and LinkError as own_address()."""
    other = next((host.name for host in hosts if not host.is_here), None)
    return own_address({**environment, **job.settings}, time.monotonic() + job.start_timeout_s, other)


def address_of(host: Host, job: Job) -> str:
    """Return the numeric address at which this host reaches another one. The other hosts may not know its name, and itself may
    know the name as a loopback address. Return the name if only ssh knows it. Raises LinkError if the look-up takes too long."""
    try:
        return look_up(host.name, time.monotonic() + job.start_timeout_s)[0]
    except (OSError, UnicodeError):
        return host.name


def start_store(address: str, port: int) -> TCPStore:
    """Start the store of a job in this process, and return it. port: 0 for a free one. Raises ValueError if the port is taken."""
    try:
        return TCPStore(address, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_STORE_S))
    except RuntimeError as error:
        raise ValueError(f"--master-port {port}: {str(error).splitlines()[0]}") from error


def command_on(host: Host, job: Job, agent: list[str], environment: Mapping[str, str]) -> list[str]:
    """Return the command that starts an agent on a host. Raises the errors of handed_on()."""
    settings = [f"{name}={value}" for name, value in handed_on(job, environment).items()]
    if host.is_here:
        return agent
    ssh = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={job.start_timeout_s}", *_SSH_GIVES_UP]
    if job.ssh_port is not None:
        ssh += ["-p", str(job.ssh_port)]
    if job.ssh_identity_file is not None:
        ssh += ["-i", job.ssh_identity_file]
    return [*ssh, host.name, f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(['env', *settings, *agent])}"]
