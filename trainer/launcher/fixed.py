"""The ranks of a job whose number of ranks is fixed: all start once the agents of all hosts are ready, and the first failure
ends the job."""

from __future__ import annotations

import random
import uuid
from collections.abc import Mapping

from gradwire.collectives.environment import AGENT_STORE, RUN_ID
from gradwire.trainer.launcher.options import Job
from gradwire.trainer.launcher.reach import address_for, address_of, ports_for, start_store
from gradwire.trainer.launcher.workers import Action, End, Start, Workers
from gradwire.trainer.world.generations import Generation
from gradwire.trainer.world.launch import MASTER_ADDR, MASTER_PORT, PORTS

#: The time that the ranks of several hosts have to raise their own errors about a lost rank before the launcher ends them.
_GRACE_S = 5.0

_MASTER_PORT = 29500


class FixedRanks:
    """Decides for one job: worker 3 is rank 3, from start to end. failed: the ranks that have failed so far.

    Raises ValueError and LinkError as rendezvous_of(), and ValueError if the rendezvous port of this host is taken.
    """

    poll_s = 0.1

    def __init__(self, job: Job, environment: Mapping[str, str]) -> None:
        self.workers = Workers(None)
        self.workers.set_hosts(job.hosts)
        places = self.workers.free_slots()
        for node, slot in places:
            self.workers.start(node, slot)
        self._generation = Generation(0, tuple(range(len(places))), tuple(node for node, _ in places))
        address, port = rendezvous_of(job, environment)
        # The launcher has the store if it is on the first host, else rank 0.
        ports = ports_for(job, environment)
        self._store = start_store(address, port, ports) if job.hosts[0].is_here else None
        self._of_all = {
            MASTER_ADDR: address,
            MASTER_PORT: str(port if self._store is None else self._store.port),
            RUN_ID: str(uuid.uuid4()),
            AGENT_STORE: str(self._store is not None),
        }
        self.failed: list[int] = []
        self._has_begun = False
        self._end_at: float | None = None

    def variables(self, rank: int) -> dict[str, str]:
        """Return the environment variables of a rank."""
        return self._generation.environment(rank) | self._of_all

    def exited(self, rank: int, exit_code: int, now: float) -> None:
        """Note that the process of a rank has ended. exit_code: negative for a signal."""
        self.workers.of[rank].is_running = False
        self._fail([rank] if exit_code != 0 else [], now)

    def host_lost(self, node: int, why: str, now: float) -> None:
        """Note that the agent of a host has ended or did not start, and so have its ranks."""
        lost = self.workers.running_on(node)
        for rank in lost:
            self.workers.of[rank].is_running = False
        self._fail(lost, now)

    def decide(self, now: float, *, is_interrupted: bool = False) -> list[Action]:
        """Return the next actions, in order."""
        have_all_ended = not any(worker.is_running for worker in self.workers.of.values())
        if is_interrupted or have_all_ended or (self._end_at is not None and now >= self._end_at):
            return [End(tuple(self.failed), "")]
        if self._has_begun or not all(host.is_ready for host in self.workers.hosts.values()):
            return []
        self._has_begun = True
        return [Start(rank, worker.node, worker.slot) for rank, worker in self.workers.of.items()]

    def close(self) -> None:
        """Close the store."""
        self._store = None

    def _fail(self, ranks: list[int], now: float) -> None:
        self.failed += ranks
        if self._end_at is None and ranks:
            self._end_at = now + (_GRACE_S if self._has_begun and len(self.workers.hosts) > 1 else 0.0)


def rendezvous_of(job: Job, environment: Mapping[str, str]) -> tuple[str, int]:
    """Return the address and the port at which the ranks of a job meet: of the first host. Port 0: a free one.

    Raises ValueError and LinkError as address_for() and address_of().
    """
    first, *others = job.hosts
    if others:
        address = address_for(job.hosts, job, environment) if first.is_here else address_of(first, job)
        return address, job.master_port or _MASTER_PORT
    return "127.0.0.1", job.master_port or (0 if first.is_here else random.choice(ports_for(job, environment) or PORTS))
