"""Where the ranks of a soak live: on this machine, or on simulated hosts; each world's files in a directory of its own."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from gradwire.bench import hosts
from tests.harness import TRANSPORTS, World
from tests.soak.network import Network

NAMESPACES = "namespaces"
NETWORKS = 2  # so that what befalls the ranks of one leaves those of the other alone
WORLDS_HERE = 4  # side by side on this machine: a world mostly waits
MOST_HOSTS = 4
RATE = "1gbit"
_NAMESPACES_OF_A_HOST = ("mnt", "uts", "net")


def stderr_file(directory: Path, rank: int) -> Path:
    """What a rank printed as errors."""
    return directory / f"stderr-{rank}"


@dataclass(frozen=True)
class Arrival:
    """What a rank does first: write its errors to a file, and move to its host. hosts: the process that holds the namespaces
    of each rank's host, environments: of each rank; empty where the ranks stay on this machine."""

    directory: Path
    holders: tuple[int, ...] = ()
    environments: tuple[Mapping[str, str], ...] = ()

    def __call__(self, rank: int) -> None:
        with stderr_file(self.directory, rank).open("wb") as errors:
            os.dup2(errors.fileno(), 2)
        if self.holders:
            _enter(self.holders[rank])
            os.environ.update(self.environments[rank])


def _enter(holder: int) -> None:
    """Move this process, which must have one thread yet, into the namespaces of another."""
    setns = ctypes.CDLL(None, use_errno=True).setns
    here = os.getcwd()
    for kind in _NAMESPACES_OF_A_HOST:
        with open(f"/proc/{holder}/ns/{kind}") as namespace:
            if setns(namespace.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), f"rank cannot enter the {kind} namespace of process {holder}")
    os.chdir(here)


class Place:
    """Makes fresh worlds on one transport. clusters: of simulated hosts, which take turns; none where ranks stay on this
    machine."""

    def __init__(self, transport: str, directory: Path, clusters: Sequence[hosts.Cluster] = ()) -> None:
        self.transport = transport
        self._directory = directory
        self._clusters = clusters
        self._worlds = count()

    @property
    def on_hosts(self) -> bool:
        return bool(self._clusters)

    @property
    def worlds_at_a_time(self) -> int:
        return len(self._clusters) or WORLDS_HERE

    @property
    def address(self) -> str:
        """Where rank 0 can be reached."""
        return hosts.address(0) if self.on_hosts else "127.0.0.1"

    def world(self, size: int, host_count: int) -> tuple[World, Path, Network | None]:
        """A fresh world, its directory, and its network. host_count: over how many simulated hosts, where there are any.

        worlds_at_a_time later the network is another world's, so it must be whole again.
        """
        number = next(self._worlds)
        directory = self._directory / f"{self.transport}-{number}"
        directory.mkdir()
        if not self._clusters:
            return World(size, directory, TRANSPORTS[self.transport], Arrival(directory)), directory, None
        cluster = self._clusters[number % len(self._clusters)]
        planned = hosts.plan_ranks(size, min(size, host_count), hosts.network_description(host_count, RATE))
        holders = tuple(host.pid for host in cluster.hosts)
        environments = tuple(rank.environment for rank in planned)
        arrival = Arrival(directory, tuple(holders[rank.host] for rank in planned), environments)
        return World(size, directory, {}, arrival), directory, Network(cluster.switch.pid, holders, RATE)


@contextmanager
def place(transport: str, directory: Path) -> Iterator[Place]:
    """Raises HostsError where there cannot be simulated hosts."""
    if transport != NAMESPACES:
        yield Place(transport, directory)
        return
    hosts.check_machine()
    with ExitStack() as stack:
        clusters = [stack.enter_context(hosts.Cluster(MOST_HOSTS + 1, RATE)) for _ in range(NETWORKS)]
        yield Place(transport, directory, clusters)
