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

from gradwire.collectives.control.asking import look_up
from gradwire.collectives.control.own_address import own_address
from gradwire.collectives.control.ports import listen_in, listen_on
from gradwire.collectives.environment import HOST_ID, listening_ports
from gradwire.trainer.launcher.agent import Lines
from gradwire.trainer.launcher.hosts import Host
from gradwire.trainer.launcher.options import Job
from gradwire.trainer.launcher.output import LastWords

#: The environment variables that other hosts get, except HOST_ID, of which each host has its own.
_PREFIXES = ("COLLECTIVES_", "GLOO_", "HOROVOD_", "NCCL_")
_NAMES = ("LD_LIBRARY_PATH", "OMP_NUM_THREADS", "PATH", "PYTHONPATH", "VIRTUAL_ENV")

#: ssh ends after ten seconds without an answer from the host, which is sooner than the ranks' connections fail.
_SSH_GIVES_UP = ("-o", "ServerAliveInterval=2", "-o", "ServerAliveCountMax=5")

#: What to do if ssh does not know a host's key: this ssh cannot ask whether to accept it.
_UNKNOWN_KEY = " Run `ssh {}` once by hand, and confirm the key of the host"

#: The timeout of an operation of the store.
_STORE_S = 60.0

#: The beginning of a line that an agent itself writes, and how many pieces of an agent's output are read before those of
#: others.
_OWN, _PIECES = b"[agent]<", 256


class AgentProcess:
    """Holds the agent process of one host, or the ssh to it, and its output so far. Raises OSError if the command
    cannot be started."""

    def __init__(self, host: Host, command: list[str], environment: Mapping[str, str], start_timeout_s: int) -> None:
        self.host = host
        self.is_ready = False
        self.words = LastWords()
        self._start_timeout_s, self._late_at = start_timeout_s, time.monotonic() + start_timeout_s
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # only the launcher gets Ctrl-C, and ends all agents
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._stdin = self.process.stdin
        self._streams = [Lines(self.process.stdout), Lines(self.process.stderr)]

    def pipes(self) -> list[IO[bytes]]:
        """Return the pipes that may have new lines."""
        return [stream.pipe for stream in self._streams if stream.is_open()]

    def tell(self, line: str) -> None:
        """Send the agent a request."""
        with suppress(OSError, ValueError):  # it has ended or is asked to end, which why_lost() shows
            self._stdin.write(f"{line}\n".encode())
            self._stdin.flush()

    def reports(self, take: Callable[[bytes], bool], *, prints: bool) -> Iterator[bytes]:
        """Read all new lines, and yield those that the agent itself writes. take: takes a line, and returns whether a rank
        printed it. Other lines are of torch or ssh: they are kept for errors, and printed if `prints`."""
        for stream in self._streams:
            is_stdout = stream is self._streams[0]
            for line in stream.read(_PIECES) if stream.is_open() else []:
                if is_stdout and line.startswith(_OWN):
                    yield line
                elif not (is_stdout and take(line)):
                    text = line.decode(errors="replace")
                    self.words.read(text)
                    if prints:
                        print(f"[{self.host.name}]: {text}", file=sys.stderr, flush=True)

    def why_lost(self, *, has_ended: bool) -> str:
        """Return why the agent is lost, as far as known; empty if it is not. has_ended: whether its process had ended before
        its last lines were read."""
        said = self.words.text
        if has_ended and not self.is_ready and not self.host.is_here:
            do = _UNKNOWN_KEY.format(self.host.name) if "Host key verification failed" in said else ""
            return f"by ssh: {said or f'exit code {self.process.returncode}'}{do}"
        if has_ended:
            return said or "its agent has ended"
        if self.is_ready or self.host.is_here or time.monotonic() < self._late_at:
            return ""
        return f"did not start within {self._start_timeout_s} s{': ' * bool(said)}{said}"

    def ask_to_end(self) -> None:
        """Ask the agent to end its ranks and itself. An ssh that is not connected yet ends at once."""
        with suppress(OSError):
            self._stdin.close()
        if not self.is_ready:
            self.process.terminate()

    def leave(self) -> None:
        """Close the streams. A running agent of this host then ends its ranks and itself; an ssh is terminated, which ends its
        agent."""
        self.ask_to_end()
        if self.process.poll() is None and not self.host.is_here:
            self.process.terminate()
        for pipe in self.pipes():
            pipe.close()


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
    know the name as a loopback address. Return the name if only ssh knows it. Raises LinkError if the look-up takes too
    long."""
    try:
        return look_up(host.name, time.monotonic() + job.start_timeout_s)[0]
    except (OSError, UnicodeError):
        return host.name


def ports_for(job: Job, environment: Mapping[str, str]) -> range | None:
    """Return the ports on which a job's processes may listen; None if the system chooses them. Raises ValueError."""
    return listening_ports({**environment, **job.settings})


def start_store(address: str, port: int, ports: range | None) -> TCPStore:
    """Start the store of a job in this process, and return it. port: 0 for a free one of `ports`, see ports.listen_in(). Raises
    ValueError if the port is taken."""
    try:
        listening = listen_in("", ports) if port == 0 else listen_on("", port)
    except OSError as error:
        raise ValueError(f"--master-port {port}: {error.strerror}" if port else str(error.strerror)) from error
    place, limit = listening.getsockname()[1], timedelta(seconds=_STORE_S)
    descriptor = listening.detach()  # the store closes it
    return TCPStore(address, place, is_master=True, timeout=limit, wait_for_workers=False, master_listen_fd=descriptor)


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
