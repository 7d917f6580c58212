"""The launcher of a job: starts an agent on each host, here as a child process and elsewhere by ssh, and ends all together."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import wait
from typing import Any

from gradwire.trainer.cli.agent import READY, REPORT
from gradwire.trainer.cli.failure import JobFailure, exit_status, failure_lines
from gradwire.trainer.cli.hosts import Host
from gradwire.trainer.cli.options import Job
from gradwire.trainer.cli.output import Output
from gradwire.trainer.cli.reach import AgentProcess, address_for, address_of, command_on
from gradwire.trainer.cli.signals import signals_heard

#: The longest time between two checks of signals and deadlines.
_POLL_S = 0.1
#: The time that the ranks of other hosts have to raise their own errors about a lost rank before the launcher ends them.
_GRACE_S = 5.0
#: The time that agents have to end their ranks (torch's agent kills them after 30 s) before the launcher kills the agents.
_END_S = 45.0

_MASTER_PORT = 29500


class _JobRun:
    """Runs one job: reads the output of its agents until they have ended, and ends them if one fails."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._agents: list[AgentProcess] = []
        self._running: list[AgentProcess] = []
        self._reports: dict[AgentProcess, dict[str, Any]] = {}
        self._output = Output(job.output_folder, len(str(sum(host.slots for host in job.hosts) - 1)))
        self._failures: list[JobFailure] = []
        self._end_at: float | None = None  # when to ask the agents to end
        self._kill_at: float | None = None

    def run(self) -> int:
        """Run the job, and return its exit status."""
        environment = {**os.environ, **self._job.settings}
        made = commands(self._job, os.environ)
        with signals_heard() as signals:
            try:
                for host, command in zip(self._job.hosts, made, strict=True):
                    if self._job.verbose:
                        print(f"gradwire: {shlex.join(command)}", file=sys.stderr, flush=True)
                    self._start(host, command, environment)
                self._follow(time.monotonic() + self._job.start_timeout_s, signals)
            finally:
                for agent in self._agents:
                    agent.leave()
                self._output.close()
        for line in failure_lines(self._failures):
            print(line, file=sys.stderr, flush=True)
        if signals:
            return 128 + signals[0]
        return exit_status(self._failures) if self._failures else 0

    def _start(self, host: Host, command: list[str], environment: dict[str, str]) -> None:
        try:
            agent = AgentProcess(host, command, environment)
        except OSError as error:
            self._fail(JobFailure(host.name, None, None, f"cannot start {command[0]}: {error.strerror}"), 0)
            return
        self._agents.append(agent)
        self._running.append(agent)

    def _follow(self, start_by: float, signals: list[int]) -> None:
        while self._running:
            wait([stream.fileno() for agent in self._running for stream in agent.streams.values()], _POLL_S)
            now = time.monotonic()
            for agent in [*self._running]:
                has_ended = agent.process.poll() is not None  # before its last lines are read, so that none is missed
                self._hear(agent)
                if has_ended:
                    self._running.remove(agent)
                    self._ended(agent)
            if now > start_by and self._end_at is None:
                # The agent of this host needs no deadline: the launcher sees its end, and a busy host starts it slowly.
                for agent in [a for a in self._running if not a.is_ready and not a.host.is_here]:
                    self._fail(JobFailure(agent.host.name, None, None, agent.why_late(self._job.start_timeout_s)), 0)
            if signals:
                self._end_at = now
            if self._end_at is not None and now >= self._end_at and self._kill_at is None:
                for agent in self._running:
                    agent.ask_to_end()
                self._kill_at = now + _END_S
            if self._kill_at is not None and now >= self._kill_at:
                for agent in self._running:
                    agent.process.kill()
                return
            if len(signals) > 1:
                return

    def _hear(self, agent: AgentProcess) -> None:
        """Read the new lines of an agent."""
        for line in agent.reports(self._output.take, prints=self._job.verbose):
            if line.startswith(READY):
                agent.is_ready = True
            elif line.startswith(REPORT):
                self._reports[agent] = json.loads(line[len(REPORT) :])

    def _ended(self, agent: AgentProcess) -> None:
        """Note why an agent ended, if it failed and was not asked to end."""
        report = self._reports.get(agent)
        for rank, exit_code in (report or {}).get("failures", []):
            self._fail(JobFailure(agent.host.name, rank, exit_code, self._output.words(rank)), _GRACE_S)
        if self._kill_at is not None or (report is not None and (not report or "failures" in report)):
            return
        name, code = agent.host.name, agent.process.returncode
        if report is not None and "error" in report:
            self._fail(
                JobFailure(name, None, None, f"the ranks did not start: {report['error'].splitlines()[0]}"), _GRACE_S
            )
        elif not agent.is_ready and not agent.host.is_here:
            self._fail(JobFailure(name, None, None, agent.why_lost), 0)
        else:
            self._fail(JobFailure(name, None, code, agent.words.text), _GRACE_S)

    def _fail(self, failure: JobFailure, grace_s: float) -> None:
        self._failures.append(failure)
        end_at = time.monotonic() + grace_s
        self._end_at = end_at if self._end_at is None else min(self._end_at, end_at)


def commands(job: Job, environment: Mapping[str, str]) -> list[list[str]]:
    """Return the command that starts the agent of each host. Raises ValueError if a variable of -x is not set, or, with
    other hosts, if this host has no address for them."""
    return [_command(job, node, environment) for node in range(len(job.hosts))]


def _command(job: Job, node: int, environment: Mapping[str, str]) -> list[str]:
    host = job.hosts[node]
    agent = [sys.executable, "-m", "gradwire.trainer.cli.agent"]
    numbers = {"nodes": len(job.hosts), "node": node, "slots": host.slots, "first-rank": host.first_rank}
    for name, number in (numbers | {"timeout": job.start_timeout_s}).items():
        agent += [f"--{name}", str(number)]
    if len(job.hosts) > 1:
        agent += ["--endpoint", f"{_master(job, environment)}:{job.master_port or _MASTER_PORT}"]
    return command_on(host, job, agent + job.command, environment)


def _master(job: Job, environment: Mapping[str, str]) -> str:
    """Return the address of the first host for all hosts."""
    first = job.hosts[0]
    address = address_for(job.hosts, job, environment) if first.is_here else address_of(first, job)
    return f"[{address}]" if ":" in address else address


def run_job(job: Job) -> int:
    """Run a job to its end, and return its exit status.

    Raises ValueError if the output folder cannot be made, if a variable of -x is not set, or, with other hosts, if this
    host has no address for them; LinkError if the look-up of a host takes too long.
    """
    return _JobRun(job).run()
