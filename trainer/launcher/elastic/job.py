"""The ranks of an elastic job: passes the events of the job, the workers' entries in the store and the list of hosts to the
policy, and writes the epochs that the policy begins to the store, which the launcher runs."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping

from gradwire.collectives.environment import AGENT_STORE
from gradwire.trainer.launcher.actions import Action, Begin, End, Say, Update
from gradwire.trainer.launcher.elastic.discovery import Discovery
from gradwire.trainer.launcher.elastic.policy import JobPolicy
from gradwire.trainer.launcher.hosts import Host
from gradwire.trainer.launcher.options import Elastic, Job
from gradwire.trainer.launcher.output import say
from gradwire.trainer.launcher.reach import RUN_ID, address_for, start_store
from gradwire.trainer.launcher.workers import Workers
from gradwire.trainer.world.epochs import WORKER, Epochs
from gradwire.trainer.world.launch import MASTER_ADDR, MASTER_PORT

#: How often the launcher reads the store during an epoch, and while the epoch is about to change.
_POLL_S, _CHANGING_POLL_S = 0.1, 0.01


class ElasticRanks:
    """Decides for one job. failed: the workers whose failure has ended the job. Raises ValueError and LinkError as run_job()."""

    def __init__(self, job: Job, wanted: Elastic, environment: Mapping[str, str]) -> None:
        self._job, self._environment = job, environment
        self._is_here = wanted.discovery_script is None and all(host.is_here for host in job.hosts)
        address = "127.0.0.1" if self._is_here else address_for(job.hosts, job, environment)
        store = start_store(address, job.master_port or 0)
        self._epochs = Epochs(store)
        self._epochs.limit_wait(wanted.timeout_s)
        self._of_all = {MASTER_PORT: str(store.port), RUN_ID: str(uuid.uuid4()), AGENT_STORE: "True"}
        self._discovery = None if wanted.discovery_script is None else Discovery(wanted.discovery_script)
        self._policy = JobPolicy(wanted, time.monotonic() + job.start_timeout_s)
        self.failed: tuple[int, ...] = ()
        self._known: dict[str, Host] = {}
        self._addresses: dict[str, str] = {}
        self._told_lost: tuple[int, tuple[int, ...]] = -1, ()
        self._have_hosts(job.hosts)

    @property
    def workers(self) -> Workers:
        """Return the hosts and workers of the job."""
        return self._policy.workers

    @property
    def poll_s(self) -> float:
        """Return the longest time until the next decide()."""
        return _CHANGING_POLL_S if self._policy.is_changing else _POLL_S

    def host(self, node: int) -> Host:
        """Return a host by its number."""
        return self._known[self.workers.hosts[node].name]

    def variables(self, worker: int) -> dict[str, str]:
        """Return the environment variables of a worker. Raises ValueError and LinkError as address_for()."""
        place = self.workers.of[worker]
        own = {MASTER_ADDR: self._address_at(self.host(place.node)), WORKER: str(worker), "LOCAL_RANK": str(place.slot)}
        return self._of_all | own

    def exited(self, worker: int, exit_code: int, now: float) -> None:
        """See JobPolicy."""
        self._policy.exited(worker, exit_code, now)

    def host_lost(self, node: int, why: str, now: float) -> None:
        """See JobPolicy."""
        self._policy.host_lost(node, why, now)

    def decide(self, now: float, *, is_interrupted: bool) -> list[Action]:
        """Carry out the next actions that concern the store or the user, and return the others, in order."""
        self._look(now)
        interrupted: list[Action] = [End((), "it was interrupted")]
        actions = interrupted if is_interrupted else self._policy.decide(now)
        for action in actions:
            self._do(action)
        self._tell_lost()
        return actions

    def close(self) -> None:
        """End the discovery script."""
        if self._discovery is not None:
            self._discovery.close()

    def _look(self, now: float) -> None:
        """Read the list of hosts, and the entries of the workers in the store."""
        if self._discovery is not None and (hosts := self._discovery.look()) is not None:
            self._have_hosts(hosts.values())
        policy = self._policy
        for worker in policy.workers.coming():
            if self._epochs.has_arrived(worker):
                policy.arrived(worker)
        if policy.epoch is not None:
            if (commit := self._epochs.resumed(policy.epoch.number)) is not None:
                policy.resumed(commit)
            for worker in policy.staying:
                if (departure := self._epochs.departure(worker, policy.epoch.number)) is not None:
                    policy.departed(worker, departure, now)

    def _do(self, action: Action) -> None:
        match action:
            case Begin(epoch, news):
                self._epochs.begin(epoch)
                ranks = f"{len(epoch.workers)} rank{'s' * (len(epoch.workers) > 1)}"
                say(f"world {epoch.number}: {'; '.join([ranks, *news])}")
            case Update(epoch):
                self._epochs.want_update(epoch)
            case Say(text):
                say(text)
            case End(failed, reason):
                self.failed = failed
                self._epochs.end(reason or ("a worker has failed" if failed else "all ranks have finished"))

    def _tell_lost(self) -> None:
        """Write to the store which ranks of the epoch are lost, so that the others do not wait for them in a rendezvous."""
        epoch, lost = self._policy.epoch, self._policy.lost
        if epoch is not None and lost and self._told_lost != (epoch.number, lost):
            self._told_lost = epoch.number, lost
            self._epochs.lose(*self._told_lost)

    def _have_hosts(self, hosts: Iterable[Host]) -> None:
        self._known |= {host.name: host for host in hosts}
        self._policy.set_hosts({host.name: host.slots for host in hosts})

    def _address_at(self, host: Host) -> str:
        """Return the address of this host for the workers of a host. Raises as address_for()."""
        if self._is_here:
            return "127.0.0.1"
        if host.name not in self._addresses:
            others = self._known.values() if host.is_here else [host]
            self._addresses[host.name] = address_for(others, self._job, self._environment)
        return self._addresses[host.name]
