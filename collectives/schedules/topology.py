"""The topology of a group: which ranks share a host."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gradwire.collectives.cores import available
from gradwire.collectives.environment import HOST_ID


def host_id() -> str:
    """Return a name that two processes share if they run on one host and in one network namespace: the environment variable
    COLLECTIVES_HOST_ID, else machine_id()."""
    return os.environ.get(HOST_ID) or machine_id()


def machine_id() -> str:
    """Return a name made of the kernel's boot id and the network namespace (containers of one machine with separate networks
    are separate hosts); the host name if the kernel offers neither."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def processor_name() -> str:
    """Return the name of this host's processor: its model if Linux reports it, else its architecture."""
    lines = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


@dataclass(frozen=True)
class Machine:
    """The machine on which a rank runs. name: machine_id() without the network namespace; ranks that share cores have the same
    name. description: the processor and the number of cores that the rank may use, which a reboot does not change. cores: the
    number of ranks that can compute at the same time, at least 1."""

    name: str
    description: str
    cores: int

    @classmethod
    def here(cls) -> Machine:
        """Return the Machine of this process."""
        cores = available()
        return cls(machine_id().partition("/")[0], f"{processor_name()}, {cores:g} cores", max(1, int(cores)))


@dataclass(frozen=True)
class Topology:
    """Holds the ranks of a group by host.

    rank: this process's rank. hosts: the ranks of each host, ascending; the hosts are in the order of their lowest ranks.
    """

    rank: int
    hosts: tuple[tuple[int, ...], ...]

    @classmethod
    def from_host_ids(cls, rank: int, host_ids: Sequence[str]) -> Topology:
        """Return the Topology in which ranks with equal host_ids share a host. host_ids: that of each rank, in rank order."""
        by_host: dict[str, list[int]] = {}
        for member, name in enumerate(host_ids):
            by_host.setdefault(name, []).append(member)
        return cls(rank, tuple(tuple(members) for members in by_host.values()))

    @property
    def size(self) -> int:
        return sum(len(host) for host in self.hosts)

    def host_of(self, rank: int) -> int:
        """Return the index in `hosts` of the host on which a rank runs."""
        return next(i for i, host in enumerate(self.hosts) if rank in host)

    @property
    def local_rank(self) -> int:
        return self.hosts[self.host_of(self.rank)].index(self.rank)

    @property
    def local_size(self) -> int:
        return len(self.hosts[self.host_of(self.rank)])
