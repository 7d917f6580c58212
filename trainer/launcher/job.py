"""The launcher of a job: starts an agent on each host, here as a child process and elsewhere by ssh, passes the agents' reports
to the ranks of the job, FixedRanks or ElasticRanks, and carries out the actions that these decide on."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import threading
import time
from multiprocessing.connection import wait

from gradwire.collectives.errors import LinkError
from gradwire.trainer.launcher import agent as agent_script
from gradwire.trainer.launcher.elastic import ElasticRanks
from gradwire.trainer.launcher.fixed import FixedRanks
from gradwire.trainer.launcher.options import Job
from gradwire.trainer.launcher.output import JobFailure, Output, exit_status, failure_lines, say
from gradwire.trainer.launcher.reach import AgentProcess, command_on, handed_on
from gradwire.trainer.launcher.workers import Action, End, Kill, Release, Start, Stop

#: The time that agents have to end their workers (they kill them after 30 s) before the launcher kills the agents.
_END_S = 45.0
#: The longest time between two checks of signals while the job ends.
_POLL_S = 0.1

#: Variables that may describe this process as a rank of another job. Workers must not inherit them.
_OF_OTHERS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
_OF_TORCHRUN = "TORCHELASTIC_"


class _JobRun:
    """Runs one job. Raises ValueError and LinkError as run_job() does."""

    def __init__(self, job: Job) -> None:
        self._job = job
        outside = {name: value for name, value in os.environ.items() if name not in _OF_OTHERS}
        self._environment = {name: value for name, value in outside.items() if not name.startswith(_OF_TORCHRUN)}
        handed_on(job, os.environ)  # raises for a missing variable before any process starts
        self._noun = "rank" if job.elastic is None else "worker"
        digits = len(str(sum(host.slots for host in job.hosts) - 1)) if job.elastic is None else 1
        self._output = Output(job.output_folder, digits, self._noun)
        self._ranks = FixedRanks(job, os.environ) if job.elastic is None else ElasticRanks(job, job.elastic, os.environ)
        self._agents: dict[int, AgentProcess] = {}
        self._exit_codes: dict[int, int] = {}
        self._lost: dict[int, JobFailure] = {}
        self._end: End | None = None

    def run(self) -> int:
        """Run the job, and return its exit status. The job ends after the first SIGINT or SIGTERM, and at once after the
        second. Only the main thread of a process gets signals."""
        signals: list[int] = []
        before = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                before[number] = signal.signal(number, lambda number, frame: signals.append(number))
        try:
            for node in self._ranks.workers.hosts if self._job.elastic is None else ():
                self._reach(node)  # before any rank starts
            while self._end is None:
                self._read_agents(self._ranks.poll_s)
                for action in self._ranks.decide(time.monotonic(), is_interrupted=bool(signals)):
                    self._do(action)
            self._end_all(signals)
        finally:
            for agent in self._agents.values():
                agent.leave()
            self._ranks.close()
            self._output.close()
            for number, handler in before.items():
                signal.signal(number, handler)
        return self._report_end(self._end, signals)

    def _read_agents(self, at_most_s: float) -> None:
        """Read the lines of the agents, and note which agents have ended. Wait at most at_most_s seconds for new
        lines."""
        wait([pipe.fileno() for agent in self._agents.values() for pipe in agent.pipes()], at_most_s)
        now = time.monotonic()
        for node, agent in [*self._agents.items()]:
            has_ended = agent.process.poll() is not None  # before its last lines are read, so that none is missed
            for line in agent.reports(self._output.take, prints=self._job.verbose):
                if line.startswith(agent_script.READY):
                    agent.is_ready = self._ranks.workers.hosts[node].is_ready = True
                elif line.startswith(agent_script.EXITED):
                    worker, self._exit_codes[worker] = map(int, line[len(agent_script.EXITED) :].split())
                    self._ranks.exited(worker, self._exit_codes[worker], now)
            if why := agent.why_lost(has_ended=has_ended):
                self._lose(node, why)

    def _do(self, action: Action) -> None:
        match action:
            case Start(worker, node, _):
                self._start(worker, node)
            case Kill(worker):
                self._send(worker, f"kill {worker}")
            case Stop(worker):
                self._send(worker, f"stop {worker}")
            case Release(node) if node in self._agents:
                self._agents[node].ask_to_end()
            case End():
                self._end = action

    def _reach(self, node: int) -> None:
        """Start the agent of a host, unless it runs already."""
        if node in self._agents:
            return
        host = self._ranks.workers.hosts[node].host
        script = [sys.executable, "-I", "-S", agent_script.__file__, *self._job.command]
        command = command_on(host, self._job, script, os.environ)
        if self._job.verbose:
            say(shlex.join(command))
        try:
            environment = self._environment | self._job.settings
            self._agents[node] = agent = AgentProcess(host, command, environment, self._job.start_timeout_s)
        except OSError as error:
            self._lose(node, f"cannot start {command[0]}: {error.strerror}")
            return
        if self._job.key is not None:
            agent.tell(f"key {self._job.key.to_text()}")

    def _start(self, worker: int, node: int) -> None:
        if not self._ranks.workers.of[worker].is_running:
            return  # the host was lost when another worker was started there
        try:
            variables = self._ranks.variables(worker)
        except (LinkError, ValueError) as error:
            self._lose(node, str(error))
            return
        self._reach(node)
        self._send(worker, f"start {worker} {json.dumps(variables)}")

    def _send(self, worker: int, line: str) -> None:
        if (agent := self._agents.get(self._ranks.workers.of[worker].node)) is not None:
            agent.tell(line)

    def _lose(self, node: int, why: str) -> None:
        """Remove an agent that has ended or did not start. Its workers are lost, unless the agent was asked to end."""
        if (agent := self._agents.pop(node, None)) is not None:
            agent.leave()
        host = self._ranks.workers.hosts[node]
        if self._end is None and not host.is_released:
            lost = self._ranks.workers.running_on(node)
            self._lost |= dict.fromkeys(lost, JobFailure(host.name, None, None, why))
            self._ranks.host_lost(node, why, time.monotonic())

    def _end_all(self, signals: list[int]) -> None:
        """Wait until all workers and agents have ended. Return at once after a second signal."""
        end_at = time.monotonic() + _END_S
        for agent in self._agents.values():
            agent.ask_to_end()
        while self._agents and len(signals) < 2:
            self._read_agents(_POLL_S)
            if time.monotonic() >= end_at:
                for agent in self._agents.values():
                    agent.process.kill()
                return

    def _report_end(self, end: End, signals: list[int]) -> int:
        """Print why the job has failed, if it has, and return its exit status."""
        failed = end.failed if signals else self._ranks.failed  # without those that the end has made fail
        failures = list(dict.fromkeys(self._failure(worker) for worker in failed))
        for line in failure_lines(failures, self._noun):
            print(line, file=sys.stderr, flush=True)
        if signals:
            return 128 + signals[0]
        if end.reason:
            say(end.reason)
        return exit_status(failures) if failures else int(bool(end.reason))

    def _failure(self, worker: int) -> JobFailure:
        """Return the failure of a worker, or of its host."""
        if worker in self._lost:
            return self._lost[worker]
        host = self._ranks.workers.host_of(worker)
        return JobFailure(host.name, worker, self._exit_codes.get(worker, -signal.SIGKILL), self._output.words(worker))


def run_job(job: Job) -> int:
    """Run a job to its end, and return its exit status.

    Raises ValueError if this host has no address for other hosts, the port is taken, a variable of -x is not set, the
    output folder cannot be made, or the discovery script cannot be started; LinkError if the look-up of a host
    takes too long.
    """
    return _JobRun(job).run()
