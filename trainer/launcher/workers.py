"""The hosts of a job, its workers, which are the processes of its ranks, and the actions on them: which workers are alive,
which may take part, and which slots are free."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from gradwire.trainer.launcher.hosts import Host
from gradwire.trainer.world.generations import Generation

#: After how many failures in a row, of workers that had not become ranks, the host gets no more workers.
HOST_FAILURES = 3
#: The first pause before a lost host is used again, and the longest one: each further loss doubles the pause.
LOST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 120.0


@dataclass
class HostState:
    """A host of the job. slots: how many workers it may have now. is_ready: whether its agent has started at least once.
    is_failed: whether it gets no more workers. failures: the number of failures in a row of workers that had not become
    ranks. is_lost: whether its agent has ended and the host is not used before again_at, pause_s after the loss. is_released:
    whether its agent was asked to end; a host of the same name is then a new HostState."""

    host: Host
    slots: int
    is_ready: bool = False
    is_failed: bool = False
    failures: int = 0
    is_lost: bool = False
    pause_s: float = 0.0
    again_at: float = -math.inf
    is_released: bool = False

    @property
    def name(self) -> str:
        """Return the name of the host."""
        return self.host.name


@dataclass
class WorkerState:
    """A worker of the job. has_arrived: whether it is ready to become a rank. was_rank: whether it has become one.
    is_alive: whether it has neither ended nor counts as lost. is_running: whether its process occupies the slot.
    is_leaving: whether its host or slot is no longer part of the job."""

    node: int
    slot: int
    has_arrived: bool = False
    was_rank: bool = False
    is_alive: bool = True
    is_running: bool = True
    is_leaving: bool = False

    @property
    def is_welcome(self) -> bool:
        """Return whether the worker may be a rank of the next generation."""
        return self.is_alive and not self.is_leaving


class Workers:
    """Holds hosts and workers by number; no number is used twice. most: the maximum number of welcome workers; None: no
    limit."""

    def __init__(self, most: int | None) -> None:
        self.of: dict[int, WorkerState] = {}
        self.hosts: dict[int, HostState] = {}
        self._most = most

    def set_hosts(self, hosts: Iterable[Host]) -> None:
        """Set the hosts and their slots. A worker on a host or in a slot that is no longer there is leaving."""
        found = {host.name: host for host in hosts}
        known = {state.name for state in self.hosts.values() if not state.is_released}
        for state in self.hosts.values():
            state.slots = found[state.name].slots if state.name in found else 0
        for host in [host for name, host in found.items() if name not in known]:
            self.hosts[len(self.hosts)] = HostState(host, host.slots)
        for worker in self.of.values():
            is_there = worker.slot < self.hosts[worker.node].slots
            worker.is_leaving = not is_there or (worker.is_leaving and self._most_more == 0)

    def host_of(self, worker: int) -> HostState:
        """Return the host of a worker."""
        return self.hosts[self.of[worker].node]

    def nodes(self) -> dict[int, int]:
        """Return the number of each worker's host."""
        return {number: worker.node for number, worker in self.of.items()}

    def running_on(self, node: int) -> list[int]:
        """Return the workers of a host whose processes have not ended."""
        return [number for number, worker in self.of.items() if worker.node == node and worker.is_running]

    def coming(self) -> list[int]:
        """Return the workers that are alive and not ready yet."""
        return [number for number, worker in self.of.items() if worker.is_alive and not worker.has_arrived]

    def free_slots(self, *, later: bool = False) -> list[tuple[int, int]]:
        """Return the host and slot of each worker that could be started now, slots of lost workers first. later:
        include the slots of lost hosts, which can be used after their pause."""
        used = {(worker.node, worker.slot) for worker in self.of.values()}
        taken = {(worker.node, worker.slot) for worker in self.of.values() if worker.is_running}
        usable = [
            (node, host.slots)
            for node, host in self.hosts.items()
            if not (host.is_failed or host.is_released or (host.is_lost and not later))
        ]
        free = [(node, slot) for node, slots in usable for slot in range(slots) if (node, slot) not in taken]
        free.sort(key=lambda place: place not in used)
        return free[: self._most_more]

    def start(self, node: int, slot: int) -> int:
        """Note that a worker is started, and return its number."""
        number = len(self.of)
        self.of[number] = WorkerState(node, slot)
        return number

    def fail(self, number: int) -> str:
        """Note that a worker is lost. Return a message if its host therefore gets no more workers, else an empty string."""
        worker, host = self.of[number], self.host_of(number)
        worker.is_alive = False
        host.failures += not worker.was_rank and not host.is_lost
        if host.failures < HOST_FAILURES or host.is_failed:
            return ""
        host.is_failed = True
        return f"host {host.name} gets no more workers, since {HOST_FAILURES} failed in a row"

    def lose_host(self, node: int, now: float) -> None:
        """Note that the agent of a host has ended. If the host has lasted longer than the longest pause, the next pause is the
        first one again."""
        host = self.hosts[node]
        has_lasted = now >= host.again_at + LONGEST_PAUSE_S
        host.pause_s = LOST_PAUSE_S if has_lasted else min(2 * host.pause_s, LONGEST_PAUSE_S)
        host.is_lost, host.again_at = True, now + host.pause_s

    def try_again(self, now: float) -> None:
        """Make lost hosts usable again after their pause."""
        for host in self.hosts.values():
            host.is_lost = host.is_lost and now < host.again_at

    def become_rank(self, number: int) -> None:
        """Note that a worker is a rank."""
        self.of[number].was_rank = True
        self.host_of(number).failures = 0

    @property
    def _most_more(self) -> int | None:
        """Return how many more workers may be welcome; None: any number."""
        return (
            None if self._most is None else max(0, self._most - sum(worker.is_welcome for worker in self.of.values()))
        )


@dataclass(frozen=True)
class Start:
    """Start a worker on a host, in a slot without a running worker."""

    worker: int
    node: int
    slot: int


@dataclass(frozen=True)
class Kill:
    """Kill a worker that counts as lost."""

    worker: int


@dataclass(frozen=True)
class Stop:
    """Ask a worker to end because the job no longer needs it."""

    worker: int


@dataclass(frozen=True)
class Release:
    """Let the agent of a host end: the host has no workers and gets none."""

    node: int


@dataclass(frozen=True)
class Begin:
    """Begin a generation. news: the changes since the last generation, in words."""

    generation: Generation
    news: tuple[str, ...]


@dataclass(frozen=True)
class Update:
    """Ask the ranks of a generation to leave it after their next commit."""

    generation: int


@dataclass(frozen=True)
class Say:
    """Print a line for the user."""

    text: str


@dataclass(frozen=True)
class End:
    """End the job. failed: the workers that have failed since the last generation began. reason: why the job ends; empty if all
    ranks have finished, or if the failures are the reason."""

    failed: tuple[int, ...]
    reason: str


Action = Start | Kill | Stop | Release | Begin | Update | Say | End
"""What the ranks of a job decide on, and the launcher carries out."""
