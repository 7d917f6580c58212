"""The hosts and workers of an elastic job, whatever the epoch: who lives, who is welcome, and where is room for more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

#: After how many failures in a row, of workers that were no rank yet, a host is not used any more.
HOST_FAILURES = 3
#: How long a host that was lost is left alone, the first time, and at most: each further loss doubles it.
LOST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 120.0


@dataclass
class Host:
    """slots: how many workers it may have now. is_failed: whether it gets no more. failures: in a row, of workers that were no
    rank. is_lost: whether its agent has ended and the host waits to be tried again, at again_at, pause_s after the loss.
    is_released: whether its agent has been let go, so that the name, if it comes again, is another host."""

    name: str
    slots: int
    is_failed: bool = False
    failures: int = 0
    is_lost: bool = False
    pause_s: float = 0.0
    again_at: float = -math.inf
    is_released: bool = False


@dataclass
class Worker:
    """is_alive: whether it has neither ended nor been given up. is_running: whether its process has not ended, and its slot is
    taken. is_leaving: whether its host is not one of the job any more."""

    node: int
    slot: int
    has_arrived: bool = False
    was_rank: bool = False
    is_alive: bool = True
    is_running: bool = True
    is_leaving: bool = False

    @property
    def is_welcome(self) -> bool:
        """Return whether the next epoch may have it."""
        return self.is_alive and not self.is_leaving


class Workers:
    """Holds hosts and workers by their numbers, which are not used twice. most: how many may be welcome; None: no limit."""

    def __init__(self, most: int | None) -> None:
        self.of: dict[int, Worker] = {}
        self.hosts: dict[int, Host] = {}
        self._most = most

    def set_hosts(self, slots: Mapping[str, int]) -> None:
        """Have these hosts, and no others. A worker on another one, or in a slot that is gone, is leaving."""
        known = {host.name for host in self.hosts.values() if not host.is_released}
        for host in self.hosts.values():
            host.slots = slots.get(host.name, 0)
        for name in [name for name in slots if name not in known]:
            self.hosts[len(self.hosts)] = Host(name, slots[name])
        for worker in self.of.values():
            is_there = worker.slot < self.hosts[worker.node].slots
            worker.is_leaving = not is_there or (worker.is_leaving and self._most_more == 0)

    def host_of(self, worker: int) -> Host:
        """Return the host of a worker."""
        return self.hosts[self.of[worker].node]

    def nodes(self) -> dict[int, int]:
        """Return the number of each worker's host."""
        return {number: worker.node for number, worker in self.of.items()}

    def running_on(self, node: int) -> list[int]:
        """Return the workers of a host whose processes have not ended."""
        return [number for number, worker in self.of.items() if worker.node == node and worker.is_running]

    def coming(self) -> list[int]:
        """Return the workers that may still arrive."""
        return [number for number, worker in self.of.items() if worker.is_alive and not worker.has_arrived]

    def free_slots(self) -> list[tuple[int, int]]:
        """Return host and slot of each worker that could be started, those of lost workers first."""
        used = {(worker.node, worker.slot) for worker in self.of.values()}
        taken = {(worker.node, worker.slot) for worker in self.of.values() if worker.is_running}
        unusable = {node for node, host in self.hosts.items() if host.is_failed or host.is_lost or host.is_released}
        usable = [(node, host.slots) for node, host in self.hosts.items() if node not in unusable]
        free = [(node, slot) for node, slots in usable for slot in range(slots) if (node, slot) not in taken]
        free.sort(key=lambda place: place not in used)
        return free[: self._most_more]

    def start(self, node: int, slot: int) -> int:
        """Note that a worker is started, and return its number."""
        number = len(self.of)
        self.of[number] = Worker(node, slot)
        return number

    def fail(self, number: int) -> str:
        """Note that a worker is lost; return what is new because of that, in words, or nothing."""
        worker, host = self.of[number], self.host_of(number)
        worker.is_alive = False
        host.failures += not worker.was_rank and not host.is_lost
        if host.failures < HOST_FAILURES or host.is_failed:
            return ""
        host.is_failed = True
        return f"host {host.name} gets no more workers, since {HOST_FAILURES} failed in a row"

    def lose_host(self, node: int, now: float) -> None:
        """Note that the agent of a host has ended. The pauses begin anew once the host has lasted longer than the longest."""
        host = self.hosts[node]
        has_lasted = now >= host.again_at + LONGEST_PAUSE_S
        host.pause_s = LOST_PAUSE_S if has_lasted else min(2 * host.pause_s, LONGEST_PAUSE_S)
        host.is_lost, host.again_at = True, now + host.pause_s

    def try_again(self, now: float) -> None:
        """Let those hosts be used again that were lost long enough ago."""
        for host in self.hosts.values():
            host.is_lost = host.is_lost and now < host.again_at

    def become_rank(self, number: int) -> None:
        """Note that a worker is a rank."""
        self.of[number].was_rank = True
        self.host_of(number).failures = 0

    @property
    def _most_more(self) -> int | None:
        """Return how many more may be welcome; None for any number."""
        return (
            None if self._most is None else max(0, self._most - sum(worker.is_welcome for worker in self.of.values()))
        )
