"""The ranks of an elastic job: the policy, with the store that the launcher runs, in which workers and launcher write to each
other, and the script that prints the hosts."""

from __future__ import annotations

import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from gradwire.collectives.environment import AGENT_STORE, RUN_ID
from gradwire.trainer.launcher.hosts import Host, parse_hosts, place
from gradwire.trainer.launcher.options import Elastic, Job
from gradwire.trainer.launcher.output import say
from gradwire.trainer.launcher.policy import JobPolicy
from gradwire.trainer.launcher.reach import address_for, ports_for, start_store
from gradwire.trainer.launcher.workers import Action, Begin, End, Say, Update
from gradwire.trainer.world.generations import WORKER, Generations
from gradwire.trainer.world.launch import MASTER_ADDR, MASTER_PORT

#: How often the launcher reads the store during a generation, and while the generation is about to change.
_POLL_S, _CHANGING_POLL_S = 0.1, 0.01
#: The pause between two runs of the script, and the longest time that a run may take.
_AGAIN_S, _LONGEST_S = 1.0, 60.0


class ElasticRanks(JobPolicy):
    """Decides for one job. failed: the workers whose failure has ended the job. Raises ValueError and LinkError as
    run_job()."""

    def __init__(self, job: Job, wanted: Elastic, environment: Mapping[str, str]) -> None:
        super().__init__(wanted, time.monotonic() + job.start_timeout_s)
        self._job, self._environment = job, environment
        self._is_here = wanted.discovery_script is None and all(host.is_here for host in job.hosts)
        address = "127.0.0.1" if self._is_here else address_for(job.hosts, job, environment)
        run = str(uuid.uuid4())
        store = start_store(address, job.master_port or 0, ports_for(job, environment))
        self._generations = Generations(store, job.key, run)
        self._generations.limit_wait(wanted.timeout_s)
        self._of_all = {MASTER_PORT: str(store.port), RUN_ID: run, AGENT_STORE: "True"}
        self._discovery = None if wanted.discovery_script is None else Discovery(wanted.discovery_script)
        self.failed: tuple[int, ...] = ()
        self._addresses: dict[str, str] = {}
        self._recorded_lost: tuple[int, tuple[int, ...]] = -1, ()
        self.workers.set_hosts(job.hosts)

    @property
    def poll_s(self) -> float:
        """Return the longest time until the next decide()."""
        return _CHANGING_POLL_S if self.is_changing else _POLL_S

    def variables(self, worker: int) -> dict[str, str]:
        """Return the environment variables of a worker. Raises ValueError and LinkError as address_for()."""
        place = self.workers.of[worker]
        own = {
            MASTER_ADDR: self._address_at(self.workers.hosts[place.node].host),
            WORKER: str(worker),
            "LOCAL_RANK": str(place.slot),
        }
        return self._of_all | own

    def decide(self, now: float, *, is_interrupted: bool = False) -> list[Action]:
        """Carry out the next actions that concern the store or the user, and return all of them, in order."""
        self._look(now)
        actions = super().decide(now, is_interrupted=is_interrupted)
        for action in actions:
            self._do(action)
        if self.generation is not None and self.lost and self._recorded_lost != (self.generation.number, self.lost):
            self._recorded_lost = self.generation.number, self.lost  # so that no rank waits for them in a rendezvous
            self._generations.lose(*self._recorded_lost)
        return actions

    def close(self) -> None:
        """End the discovery script."""
        if self._discovery is not None:
            self._discovery.close()

    def _look(self, now: float) -> None:
        """Read the list of hosts, and the entries of the workers in the store."""
        if self._discovery is not None and (hosts := self._discovery.look()) is not None:
            self.workers.set_hosts(hosts)
        for worker in self.workers.coming():
            if self._generations.has_arrived(worker):
                self.arrived(worker)
        if self.generation is not None:
            if (commit := self._generations.resumed(self.generation.number)) is not None:
                self.resumed(commit)
            for worker in self.staying:
                if (departure := self._generations.departure(worker, self.generation.number)) is not None:
                    self.departed(worker, departure, now)

    def _do(self, action: Action) -> None:
        match action:
            case Begin(generation, news):
                self._generations.begin(generation)
                ranks = f"{len(generation.workers)} rank{'s' * (len(generation.workers) > 1)}"
                say(f"generation {generation.number}: {'; '.join([ranks, *news])}")
            case Update(number):
                self._generations.want_update(number)
            case Say(text):
                say(text)
            case End(failed, reason):
                self.failed = failed
                self._generations.end(reason or ("a worker has failed" if failed else "all ranks have finished"))

    def _address_at(self, host: Host) -> str:
        """Return the address of this host for the workers of a host. Raises as address_for()."""
        if self._is_here:
            return "127.0.0.1"
        if host.name not in self._addresses:
            others = [each.host for each in self.workers.hosts.values()] if host.is_here else [host]
            self._addresses[host.name] = address_for(others, self._job, self._environment)
        return self._addresses[host.name]


class Discovery:
    """Runs the script repeatedly. Raises ValueError if the script cannot be started."""

    def __init__(self, script: Path) -> None:
        self._script = script
        self._process: subprocess.Popen[bytes] | None = None
        self._since = -_AGAIN_S
        self._complaint = ""
        self._start()

    def look(self) -> list[Host] | None:
        """Return the hosts if a run of the script has ended since the last call. If the run failed, print why and
        return None."""
        try:
            return self._look(time.monotonic())
        except ValueError as error:
            if str(error) != self._complaint:
                say(f"{error}; the hosts stay as they are")
            self._complaint = str(error)
            return None

    def close(self) -> None:
        """End the script."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._output.close()

    def _look(self, now: float) -> list[Host] | None:
        if self._process is None:
            if now >= self._since + _AGAIN_S:
                self._start()
        elif self._process.poll() is not None:
            exit_code, self._process, self._since = self._process.returncode, None, now
            with self._output:
                return self._read(exit_code)
        elif now >= self._since + _LONGEST_S:
            self._process.kill()
        return None

    def _start(self) -> None:
        self._since = time.monotonic()
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        command = [str(self._script.absolute())]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=self._output, start_new_session=True
            )
        except OSError as error:
            self._output.close()
            raise ValueError(f"--host-discovery-script {self._script}: {error.strerror}") from error

    def _read(self, exit_code: int) -> list[Host]:
        named = f"--host-discovery-script {self._script}"
        if exit_code != 0:
            raise ValueError(f"{named} ended with exit code {exit_code}")
        self._output.seek(0)
        lines = [line.strip() for line in self._output.read().decode(errors="replace").splitlines() if line.strip()]
        try:
            found = place(None, parse_hosts(",".join(lines))) if lines else []
        except ValueError as error:
            raise ValueError(f"{named}: {error}") from None
        self._complaint = ""
        return found
