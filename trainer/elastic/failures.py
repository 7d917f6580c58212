"""How often ranks have failed without getting any further, as all of them agree when they begin: too often, and they give up."""

from __future__ import annotations

import json
import logging
import os
import signal
from contextlib import suppress
from pathlib import Path

from gradwire.trainer.elastic.memory import Agent, NamedMemory, open_own
from gradwire.trainer.world.epochs import RESTART_COUNT
from gradwire.trainer.world.process_sets import global_process_set
from gradwire.trainer.world.worker import Worker, reason_of
from gradwire.trainer.world.world import communicator_of, here, rank

_log = logging.getLogger("gradwire")


class GaveUp(RuntimeError):
    """Is raised where ranks have failed as often as allowed without getting any further."""


class Failures:
    """Counts how often ranks have failed at one commit. memory: where commits are kept. max_failures: so often, and no more.

    A derived class says where the count is kept from one world to the next, and how the job is ended.
    """

    def __init__(self, agent: Agent, memory: NamedMemory, max_failures: int) -> None:
        self.memory = memory
        self._agent = agent
        self._max_failures = max_failures
        self._is_watched = False

    def begin(self, host: tuple[int, ...], commit: int) -> None:
        """Note that ranks go on from a commit; host: those of this agent. Raises GaveUp on all ranks alike. Collective."""
        communicator = communicator_of(global_process_set)
        everyones = communicator.allgather_record([*self._before(), self.memory.number])
        numbers = [number for *_, number in everyones]
        if len(set(numbers)) > 1:
            raise RuntimeError(
                f"{here()}the ranks do not call the same function that hvd.elastic.run decorates: by rank, it is number "
                f"{numbers} of those that the process has called. A process that comes later begins with the first: call one only"
            )
        has_failed = any(failed for failed, *_ in everyones)
        failures = has_failed + max(count * (at == commit) for _, count, at, *_ in everyones)
        reasons = list(dict.fromkeys(reason for *_, reason, _ in everyones if reason))
        if rank() == host[0] and not self._is_watched:
            self._agent.watch()
            self._is_watched = True
        self._keep(failures, commit, is_first=rank() == host[0])
        if failures >= self._max_failures:
            since = f"since commit {commit}" if commit else "before the first commit"
            why = "; ".join(reasons) or "no rank reported why"
            said = f"ranks have failed {failures} times {since}, and are not started again: {why}"
            if rank() == 0:
                _log.error("gradwire: %s", said)
            communicator.barrier()
            self._end_job(said, is_first=rank() == host[0])
            raise GaveUp(here() + said)
        if has_failed and rank() == 0:
            _log.warning("gradwire: ranks have failed: %s", reasons[0] if reasons else "no rank reported why")

    def note(self, error: Exception) -> None:
        """Keep why this rank has failed."""
        self._keep_reason(reason_of(error))

    def _before(self) -> tuple[bool, int, int, str]:
        """Return whether ranks have failed since the last begin(), how often they had before, at which commit, and why last."""
        raise NotImplementedError

    def _keep(self, failures: int, commit: int, *, is_first: bool) -> None:
        """Keep how often ranks have failed at a commit. is_first: whether this is the first rank of its host."""
        raise NotImplementedError

    def _keep_reason(self, reason: str) -> None:
        raise NotImplementedError

    def _end_job(self, reason: str, *, is_first: bool) -> None:
        raise NotImplementedError


class FailuresOfJob(Failures):
    """Counts them where the agent starts all processes again: in files beside the commits of this host."""

    def __init__(self, agent: Agent, memory: NamedMemory, max_failures: int) -> None:
        super().__init__(agent, memory, max_failures)
        self._counts, self._reason = self.memory.path("failures"), self.memory.path("reason")

    def _before(self) -> tuple[bool, int, int, str]:
        before = json.loads(_read(self._counts) or '{"commit": 0, "restarts": 0, "failures": 0}')
        return _restarts() > before["restarts"], before["failures"], before["commit"], _read(self._reason)

    def _keep(self, failures: int, commit: int, *, is_first: bool) -> None:
        if is_first:
            _write(self._counts, json.dumps({"commit": commit, "restarts": _restarts(), "failures": failures}))
            _write(self._reason, "")

    def _keep_reason(self, reason: str) -> None:
        with suppress(OSError):
            _write(self._reason, reason)

    def _end_job(self, reason: str, *, is_first: bool) -> None:
        if is_first:
            os.kill(self._agent.pid, signal.SIGTERM)


class FailuresOfEpochs(Failures):
    """Counts them where processes stay: each remembers, and one that comes later is told."""

    def __init__(self, agent: Agent, memory: NamedMemory, max_failures: int, worker: Worker) -> None:
        super().__init__(agent, memory, max_failures)
        self._worker = worker
        self._failures, self._commit, self._reason = 0, 0, ""

    def _before(self) -> tuple[bool, int, int, str]:
        return bool(self._reason), self._failures, self._commit, self._reason

    def _keep(self, failures: int, commit: int, *, is_first: bool) -> None:
        self._failures, self._commit, self._reason = failures, commit, ""
        if rank() == 0:
            self._worker.resume(commit)

    def _keep_reason(self, reason: str) -> None:
        self._reason = reason

    def _end_job(self, reason: str, *, is_first: bool) -> None:
        self._worker.end_job(reason)


def _restarts() -> int:
    return int(os.environ.get(RESTART_COUNT, "0"))


def _read(path: Path) -> str:
    """Return the text of a file of this user; nothing where there is none."""
    with os.fdopen(open_own(path), encoding="utf-8") as file:
        return file.read()


def _write(path: Path, text: str) -> None:
    with os.fdopen(open_own(path), "w", encoding="utf-8") as file:
        file.write(text)
        file.truncate()
