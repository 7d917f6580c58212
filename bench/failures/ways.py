"""The ways to survive failures: each starts a training, here or on simulated hosts, and handles lost hosts."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from gradwire.bench.hosts import Cluster

UNDISTURBED, IN_PROCESS, RESTART, DISK = WAYS = ("undisturbed", "in-process", "torchrun", "disk")
#: Started as a file, since -m would import gradwire, and with it torch, before the script's first line.
_SCRIPT = Path(__file__).with_name("training.py")
_CHECKPOINT_S = 5.0
LABELS = {
    UNDISTURBED: "no failures",
    IN_PROCESS: "gradwire run --min-np",
    RESTART: "torchrun, commits in memory",
    DISK: f"torchrun, a checkpoint on disk every {_CHECKPOINT_S:g} s",
}
"""The names of the ways in pictures and tables."""
_PORT = 29500
#: torchrun notices after 3 s that a host is lost (15 by default), and waits 2 s for more hosts than it needs (30 by default).
_RENDEZVOUS = "is_host=0,keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=2"
#: The program of a process that holds the store of torchrun's rendezvous, so that the store outlives every agent.
_STORE = (
    "import sys, time; from torch.distributed import TCPStore; "
    f"store = TCPStore(sys.argv[1], {_PORT}, is_master=True, wait_for_workers=False); time.sleep(1e9)"
)


class Hosts:
    """Holds the hosts on which ranks train, and one more that is never killed; without a cluster, only this machine.

    networks: the network namespace of each host, by number; empty without simulated hosts.
    """

    def __init__(self, cluster: Cluster | None, folder: Path) -> None:
        self.folder = folder
        self.networks: list[str] = []
        self.names = ["localhost"]
        self.control = "localhost"
        self._cluster = cluster
        # By default, an agent of torchrun keeps the address of the ranks' store from its first rendezvous, and a later agent
        # waits 60 s in vain for this store (torch 2.13).
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        if cluster is not None:
            trains = cluster.hosts[:-1]
            self.networks = [os.readlink(f"/proc/{each.pid}/ns/net") for each in trains]
            self.names = [f"host{number}" for number in range(len(trains))]
            self.control = f"host{len(trains)}"
            self._environment |= {"GLOO_SOCKET_IFNAME": "eth0", "PATH": f"{folder}:{os.environ['PATH']}"}
            cases = "".join(f"host{number}) target={each.pid};;\n" for number, each in enumerate(cluster.hosts))
            ssh = folder / "ssh"
            ssh.write_text(
                '#!/bin/sh\nwhile [ "${1#host}" = "$1" ]; do shift; done\n'
                f'case "$1" in\n{cases}esac\n'
                f'exec nsenter --target "$target" --net --uts --mount --wd="{os.getcwd()}" -- sh -c "$2"\n'
            )
            ssh.chmod(0o755)

    def start(self, command: Sequence[str], host: int, output: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start a command on a host. host: its number; -1 for the host that is never killed."""
        entered = command if self._cluster is None else self._cluster.hosts[host].enter(command)
        return subprocess.Popen(entered, stdout=output, stderr=output, env=self._environment)

    def set_link(self, host: int, state: str) -> None:
        """Take the link of a simulated host "down", after which not even packets that close connections leave it, or "up"."""
        assert self._cluster is not None
        self._cluster.hosts[host].run(f"ip link set eth0 {state}")


@contextmanager
def hosts_for(flags: argparse.Namespace, folder: Path) -> Iterator[Hosts]:
    """Make the hosts of a run. folder: for files that the hosts need. Raises HostsError if they cannot be made."""
    if flags.hosts == 1:
        yield Hosts(None, folder)
        return
    with Cluster(flags.hosts + 1, flags.rate) as cluster:
        yield Hosts(cluster, folder)


class InProcess:
    """Runs `gradwire run --min-np`. Like a cluster's scheduler, its discovery script does not list a lost host until
    the host comes back. The launcher reaches hosts by pipes instead of ssh, and so notices at once that an agent has
    ended."""

    def __init__(self, hosts: Hosts, flags: argparse.Namespace, script: Sequence[str], output: IO[bytes]) -> None:
        self._hosts, self._each = hosts, flags.ranks // flags.hosts
        self._listed = set(hosts.names)
        run = [sys.executable, "-m", "gradwire", "run", "-np", str(flags.ranks), "--max-np", str(flags.ranks)]
        run += ["--min-np", str(self._each if flags.hosts > 1 else flags.ranks // 2)]
        if flags.hosts > 1:
            discover = hosts.folder / "discover"
            discover.write_text(f"#!/bin/sh\ncat {hosts.folder}/hosts\n")
            discover.chmod(0o755)
            self._list()
            run += ["--host-discovery-script", str(discover)]
        self._launcher = hosts.start([*run, *script], -1, output)

    def lose(self, host: int) -> None:
        """Remove a host, whose processes were killed, from the list of hosts."""
        self._listed.discard(self._hosts.names[host])
        self._list()

    def bring_back(self, host: int) -> None:
        """Add a host to the list of hosts again."""
        self._listed.add(self._hosts.names[host])
        self._list()

    def status(self) -> int | None:
        """Return the exit status of the launcher; None while it runs."""
        return self._launcher.poll()

    def _list(self) -> None:
        new = self._hosts.folder / "hosts.new"
        new.write_text("".join(f"{name}:{self._each}\n" for name in sorted(self._listed)))
        new.rename(self._hosts.folder / "hosts")


class Restart:
    """Runs torchrun, with one agent on each host. When a lost host comes back, its agent is started again."""

    def __init__(self, hosts: Hosts, flags: argparse.Namespace, script: Sequence[str], output: IO[bytes]) -> None:
        self._hosts, self._output = hosts, output
        each = str(flags.ranks // flags.hosts)
        restarts = ["--nproc-per-node", each, "--max-restarts", "100000", "--monitor-interval", "0.1"]
        meets = ["--standalone"]
        self._lost: set[int] = set()
        if flags.hosts > 1:
            hosts.start([sys.executable, "-c", _STORE, hosts.control, *script], -1, output)
            at = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts.control}:{_PORT}", "--rdzv-id", "failures"]
            meets = ["--nnodes", f"1:{flags.hosts}", *at, "--rdzv-conf", _RENDEZVOUS]
        self._command = [sys.executable, "-m", "torch.distributed.run", *meets, *restarts, *script]
        self._agents = [hosts.start(self._command, host, output) for host in range(flags.hosts)]

    def lose(self, host: int) -> None:
        """Record that all processes of a host were killed."""
        self._lost.add(host)

    def bring_back(self, host: int) -> None:
        """Start the agent of a host again."""
        self._lost.discard(host)
        self._agents[host] = self._hosts.start(self._command, host, self._output)

    def status(self) -> int | None:
        """Return the exit status: an agent's, if not 0; None while any agent runs or any host is lost."""
        statuses = [agent.poll() for agent in self._agents]
        if self._lost or None in statuses:
            return None
        return next((status for status in statuses if status), 0)


def start(
    way: str, hosts: Hosts, flags: argparse.Namespace, log: Path, until: float, output: IO[bytes]
) -> InProcess | Restart:
    """Start the training of a way. until: its end, as time.time()."""
    script = [str(_SCRIPT), "--into", str(log), "--until", str(until)]
    if way == DISK:
        script += ["--checkpoint-s", str(_CHECKPOINT_S)]
    return (Restart if way in (RESTART, DISK) else InProcess)(hosts, flags, script, output)


def processes_of(log: Path, network: str | None = None) -> list[int]:
    """Return the IDs of processes with a log as argument: launchers, agents, ranks. network: only of this namespace."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_one = str(log).encode() in (folder / "cmdline").read_bytes().split(b"\0")
            if is_one and network in (None, os.readlink(folder / "ns" / "net")):
                found.append(int(folder.name))
    return sorted(found)


def ranks_of(log: Path) -> list[int]:
    """Return the IDs of the ranks that train for a log, in whose environment launchers set TORCHELASTIC_RUN_ID."""
    ranks = []
    for process in processes_of(log):
        with suppress(OSError):
            if b"TORCHELASTIC_RUN_ID=" in Path(f"/proc/{process}/environ").read_bytes():
                ranks.append(process)
    return ranks


def kill_all(log: Path, within_s: float) -> None:
    """Kill all processes of a log, and those that they start. Raises RuntimeError if some are left after within_s."""
    end = time.monotonic() + within_s
    while processes := processes_of(log):
        if time.monotonic() > end:
            raise RuntimeError(f"processes {processes} of {log} cannot be killed")
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, 9)
        time.sleep(0.05)
