"""The launcher of an elastic job: passes the reports of agents, the workers' entries in the store and the list of hosts to the
policy, and carries out the actions that the policy returns."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import wait

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from gradwire.collectives.environment import AGENT_STORE
from gradwire.collectives.errors import LinkError
from gradwire.trainer.cli.elastic import agent as agent_script
from gradwire.trainer.cli.elastic.actions import Action, Begin, End, Kill, Release, Say, Start, Stop, Update
from gradwire.trainer.cli.elastic.discovery import Discovery
from gradwire.trainer.cli.elastic.policy import JobPolicy
from gradwire.trainer.cli.failure import JobFailure, exit_status, failure_lines
from gradwire.trainer.cli.hosts import Host
from gradwire.trainer.cli.options import Elastic, Job
from gradwire.trainer.cli.output import Output
from gradwire.trainer.cli.reach import AgentProcess, address_for, command_on, handed_on
from gradwire.trainer.cli.signals import signals_heard
from gradwire.trainer.world.epochs import WORKER, Epochs
from gradwire.trainer.world.launch import MASTER_ADDR, MASTER_PORT

#: How often the launcher reads the store during an epoch, and while the epoch is about to change.
_POLL_S, _CHANGING_POLL_S = 0.1, 0.01
#: The time that agents have to end their workers (they kill them after 30 s) before the launcher kills the agents.
_END_S = 45.0
#: The timeout of an operation of the store.
_STORE_S = 60.0

#: Variables that may describe this process as a rank of another job. Workers must not inherit them.
_LOCAL_RANK = "LOCAL_RANK"
_OF_OTHERS = ("RANK", "WORLD_SIZE", _LOCAL_RANK, "LOCAL_WORLD_SIZE", "GROUP_RANK", MASTER_ADDR, MASTER_PORT)
_OF_TORCHRUN = "TORCHELASTIC_"


class _ElasticJobRun:
    """Runs one job. Raises ValueError and LinkError as run_elastic_job() does."""

    def __init__(self, job: Job, wanted: Elastic) -> None:
        self._job = job
        outside = {name: value for name, value in os.environ.items() if name not in _OF_OTHERS}
        self._environment = {name: value for name, value in outside.items() if not name.startswith(_OF_TORCHRUN)}
        handed_on(job, os.environ)  # raises for a missing variable before any process starts
        self._is_here = wanted.discovery_script is None and all(host.is_here for host in job.hosts)
        address = "127.0.0.1" if self._is_here else address_for(job.hosts, job, os.environ)
        self._output = Output(job.output_folder, digits=1, name="worker")
        self._store = _store(address, job.master_port)
        self._epochs = Epochs(self._store)
        self._epochs.limit_wait(wanted.timeout_s)
        self._of_all = {
            MASTER_PORT: str(self._store.port),
            "TORCHELASTIC_RUN_ID": str(uuid.uuid4()),
            AGENT_STORE: "True",
        }
        self._discovery = None if wanted.discovery_script is None else Discovery(wanted.discovery_script)
        self._policy = JobPolicy(wanted, time.monotonic() + job.start_timeout_s)
        self._known: dict[str, Host] = {}
        self._addresses: dict[str, str] = {}
        self._agents: dict[int, AgentProcess] = {}
        self._late_at: dict[int, float] = {}
        self._exit_codes: dict[int, int] = {}
        self._lost: dict[int, JobFailure] = {}
        self._told_lost: tuple[int, tuple[int, ...]] = -1, ()
        self._end: End | None = None
        self._is_ending = False
        self._have_hosts(job.hosts)

    def run(self) -> int:
        """Run the job, and return its exit status."""
        with signals_heard() as signals:
            try:
                while self._end is None and not signals:
                    self._hear(_CHANGING_POLL_S if self._policy.is_changing else _POLL_S)
                    self._look()
                    for action in self._policy.decide(time.monotonic()):
                        self._do(action)
                    self._tell_lost()
                self._end_all(signals)
            finally:
                for agent in self._agents.values():
                    agent.leave()
                if self._discovery is not None:
                    self._discovery.close()
                self._output.close()
        return self._tell_end(signals)

    def _hear(self, at_most_s: float) -> None:
        """Read the lines of the agents, and note which agents have ended. Wait at most at_most_s seconds for new
        lines."""
        wait([stream.fileno() for agent in self._agents.values() for stream in agent.streams.values()], at_most_s)
        now = time.monotonic()
        for node, agent in [*self._agents.items()]:
            has_ended = agent.process.poll() is not None  # before its last lines are read, so that none is missed
            for line in agent.reports(self._output.take, prints=self._job.verbose):
                if line.startswith(agent_script.READY):
                    agent.is_ready = True
                elif line.startswith(agent_script.EXITED):
                    worker, self._exit_codes[worker] = map(int, line[len(agent_script.EXITED) :].split())
                    self._policy.exited(worker, self._exit_codes[worker], now)
            if has_ended:
                is_ssh = not agent.is_ready and not agent.host.is_here
                self._lose(node, agent.why_lost if is_ssh else agent.words.text or "its agent has ended")
            elif not agent.is_ready and now >= self._late_at[node] and not agent.host.is_here:
                self._lose(node, agent.why_late(self._job.start_timeout_s))

    def _look(self) -> None:
        """Read the list of hosts, and the entries of the workers in the store."""
        if self._discovery is not None and (hosts := self._discovery.look()) is not None:
            self._have_hosts(hosts.values())
        policy, now = self._policy, time.monotonic()
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
            case Start(worker, node, slot):
                self._start(worker, node, slot)
            case Kill(worker):
                self._tell(worker, f"kill {worker}")
            case Stop(worker):
                self._tell(worker, f"stop {worker}")
            case Release(node) if node in self._agents:
                self._agents[node].ask_to_end()
            case Begin(epoch, news):
                self._epochs.begin(epoch)
                ranks = f"{len(epoch.workers)} rank{'s' * (len(epoch.workers) > 1)}"
                _say(f"world {epoch.number}: {'; '.join([ranks, *news])}")
            case Update(epoch):
                self._epochs.want_update(epoch)
            case Say(text):
                _say(text)
            case End():
                self._end = action

    def _tell_lost(self) -> None:
        """Write to the store which ranks of the epoch are lost, so that the others do not wait for them in a rendezvous."""
        epoch, lost = self._policy.epoch, self._policy.lost
        if epoch is not None and lost and self._told_lost != (epoch.number, lost):
            self._told_lost = epoch.number, lost
            self._epochs.lose(*self._told_lost)

    def _have_hosts(self, hosts: Iterable[Host]) -> None:
        self._known |= {host.name: host for host in hosts}
        self._policy.set_hosts({host.name: host.slots for host in hosts})

    def _start(self, worker: int, node: int, slot: int) -> None:
        if not self._policy.workers.of[worker].is_running:
            return  # the host was lost when another worker was started there
        host = self._known[self._policy.workers.hosts[node].name]
        try:
            variables = {MASTER_ADDR: self._address_at(host), WORKER: str(worker), _LOCAL_RANK: str(slot)}
        except (LinkError, ValueError) as error:
            self._lose(node, str(error))
            return
        if node not in self._agents:
            script = [sys.executable, "-I", "-S", agent_script.__file__, *self._job.command]
            command = command_on(host, self._job, script, os.environ)
            if self._job.verbose:
                _say(shlex.join(command))
            try:
                self._agents[node] = AgentProcess(host, command, self._environment | self._job.settings)
            except OSError as error:
                self._lose(node, f"cannot start {command[0]}: {error.strerror}")
                return
            self._late_at[node] = time.monotonic() + self._job.start_timeout_s
        self._tell(worker, f"start {worker} {json.dumps(self._of_all | variables)}")

    def _address_at(self, host: Host) -> str:
        """Return the address of this host for the workers of a host. Raises as address_for()."""
        if self._is_here:
            return "127.0.0.1"
        if host.name not in self._addresses:
            others = self._known.values() if host.is_here else [host]
            self._addresses[host.name] = address_for(others, self._job, os.environ)
        return self._addresses[host.name]

    def _tell(self, worker: int, line: str) -> None:
        agent = self._agents.get(self._policy.workers.of[worker].node)
        if agent is not None and agent.process.stdin is not None:
            with suppress(OSError):  # the agent has ended, which the next _hear() notes
                agent.process.stdin.write(f"{line}\n".encode())
                agent.process.stdin.flush()

    def _lose(self, node: int, why: str) -> None:
        """Remove an agent that has ended or did not start. Its workers are lost, unless the agent was asked to end."""
        if (agent := self._agents.pop(node, None)) is not None:
            agent.leave()
        host = self._policy.workers.hosts[node]
        if not self._is_ending and not host.is_released:
            self._lost |= dict.fromkeys(self._policy.workers.running_on(node), JobFailure(host.name, None, None, why))
            self._policy.host_lost(node, why, time.monotonic())

    def _end_all(self, signals: list[int]) -> None:
        """Wait until all workers and agents have ended. Return at once after a second signal."""
        end_at = time.monotonic() + _END_S
        self._is_ending = True
        if self._end is None:
            reason = "it was interrupted"
        else:
            reason = self._end.reason or ("a worker has failed" if self._end.failed else "all ranks have finished")
        self._epochs.end(reason)
        for agent in self._agents.values():
            agent.ask_to_end()
        while self._agents and len(signals) < 2:
            self._hear(_POLL_S)
            if time.monotonic() >= end_at:
                for agent in self._agents.values():
                    agent.process.kill()
                return

    def _tell_end(self, signals: list[int]) -> int:
        """Print why the job has failed, if it has, and return its exit status."""
        if self._end is None:
            return 128 + signals[0]
        failures = list(dict.fromkeys(self._failure(worker) for worker in self._end.failed))
        for line in failure_lines(failures, "worker"):
            print(line, file=sys.stderr, flush=True)
        if self._end.reason:
            _say(self._end.reason)
        return exit_status(failures) if failures else int(bool(self._end.reason))

    def _failure(self, worker: int) -> JobFailure:
        """Return the failure of a worker, or of its host."""
        if worker in self._lost:
            return self._lost[worker]
        host = self._policy.workers.host_of(worker)
        return JobFailure(host.name, worker, self._exit_codes.get(worker, -signal.SIGKILL), self._output.words(worker))


def run_elastic_job(job: Job, wanted: Elastic) -> int:
    """Run an elastic job to its end, and return its exit status.

    Raises ValueError if this host has no address for other hosts, the port is taken, a variable of -x is not set, the
    output folder cannot be made, or the discovery script cannot be started; LinkError if the look-up of a host
    takes too long.
    """
    return _ElasticJobRun(job, wanted).run()


def _store(address: str, port: int | None) -> TCPStore:
    """Start the store of a job in this process, and return it. Raises ValueError if the port is taken."""
    try:
        return TCPStore(address, port or 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_STORE_S))
    except RuntimeError as error:
        raise ValueError(f"--master-port {port}: {str(error).splitlines()[0]}") from error


def _say(text: str) -> None:
    print(f"gradwire: {text}", file=sys.stderr, flush=True)
