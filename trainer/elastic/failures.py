"""Count failures without a new commit. When training begins, all ranks agree on the count, and give up if it is too high."""

from __future__ import annotations

import json
import logging
import os
import signal
from contextlib import suppress
from pathlib import Path

from gradwire.trainer.elastic.memory import Agent, NamedMemory, open_own
from gradwire.trainer.world.generations import Worker, reason_of, restarts
from gradwire.trainer.world.process_sets import global_process_set
from gradwire.trainer.world.world import communicator_of, rank

_log = logging.getLogger("gradwire")


class GaveUp(RuntimeError):
    """Ranks have failed as often as allowed without a new commit."""


class Failures:
    """Counts the failures of ranks since the newest commit. memory: holds the commits. max_failures: the number of failures at
    which all ranks give up.

    A derived class defines where the count is stored between two worlds, and how to end the job.
    """

    def __init__(self, agent: Agent, memory: NamedMemory, max_failures: int) -> None:
        self.memory = memory
        self._agent = agent
        self._max_failures = max_failures
        self._is_watched = False

    def begin(self, host: tuple[int, ...], commit: int) -> None:
        """Record that ranks continue from a commit, and count the failure if one has happened since the last begin(). host: the
        ranks of this host. Collective. Raises GaveUp on all ranks, and RuntimeError if they call different functions."""
        communicator = communicator_of(global_process_set)
        everyones = communicator.allgather_record([*self._before(), self.memory.number])
        numbers = [number for *_, number in everyones]
        if len(set(numbers)) > 1:
            raise RuntimeError(
                f"rank {communicator.rank}: the ranks call different functions that hvd.elastic.run decorates: by rank, it is "
                f"number {numbers} of those that the process has called. A process that comes later begins with the first: call "
                "one only"
            )
        has_failed = any(failed for failed, *_ in everyones)
        failures = has_failed + max(count * (at == commit) for _, count, at, *_ in everyones)
        reasons = list(dict.fromkeys(reason for *_, reason, _ in everyones if reason))
        if rank() == host[0] and not self._is_watched:
            self._agent.watch()
            self._is_watched = True
        self._keep(failures, commit, host)
        if failures >= self._max_failures:
            since = f"since commit {commit}" if commit else "before the first commit"
            why = "; ".join(reasons) or "no rank reported why"
            said = f"ranks have failed {failures} times {since}, and are not started again: {why}"
            if rank() == 0:
                _log.error("gradwire: %s", said)
            communicator.barrier()
            self.end_job(said)
            raise GaveUp(f"rank {communicator.rank}: {said}")
        if has_failed and rank() == 0:
            why = next(
                iter(reasons), "none has reported an error; the launcher prints the exit code of each (-9: SIGKILL)"
            )
            _log.warning("gradwire: ranks have failed: %s", why)

    def note(self, error: Exception) -> None:
        """Record why this rank has failed."""
        self._keep_reason(reason_of(error))

    def _before(self) -> tuple[bool, int, int, str]:
        """Return whether ranks have failed since the last begin(), the number of failures before that, the commit at which they
        were counted, and the reason of the last failure."""
        raise NotImplementedError

    def end_job(self, reason: str) -> None:
        """Make the launcher end the job. Any number of ranks call this, and then raise an error."""
        raise NotImplementedError

    def _keep(self, failures: int, commit: int, host: tuple[int, ...]) -> None:
        """Store the number of failures at a commit, and clear the reason."""
        raise NotImplementedError

    def _keep_reason(self, reason: str) -> None:
        raise NotImplementedError


class FailuresOfJob(Failures):
    """Counts failures of a job whose agent restarts all processes. The count is in files next to this host's commits."""

    def __init__(self, agent: Agent, memory: NamedMemory, max_failures: int) -> None:
        super().__init__(agent, memory, max_failures)
        self._counts, self._reason = self.memory.path("failures"), self.memory.path("reason")

    def _before(self) -> tuple[bool, int, int, str]:
        before = json.loads(_read(self._counts) or '{"commit": 0, "restarts": 0, "failures": 0}')
        return restarts(os.environ) > before["restarts"], before["failures"], before["commit"], _read(self._reason)

    def _keep(self, failures: int, commit: int, host: tuple[int, ...]) -> None:
        if rank() == host[0]:
            _write(self._counts, json.dumps({"commit": commit, "restarts": restarts(os.environ), "failures": failures}))
            _write(self._reason, "")

    def _keep_reason(self, reason: str) -> None:
        with suppress(OSError):
            _write(self._reason, reason)

    def end_job(self, reason: str) -> None:
        with suppress(FileExistsError):  # another rank of this host has done so
            os.close(os.open(self.memory.path("ended"), os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            os.kill(self._agent.pid, signal.SIGTERM)


class FailuresOfGenerations(Failures):
    """Counts failures of a job whose processes stay. Each process stores the count; begin() gives it to new processes."""

    def __init__(self, agent: Agent, memory: NamedMemory, max_failures: int, worker: Worker) -> None:
        super().__init__(agent, memory, max_failures)
        self._worker = worker
        self._failures, self._commit, self._reason = 0, 0, ""

    def _before(self) -> tuple[bool, int, int, str]:
        return bool(self._reason), self._failures, self._commit, self._reason

    def _keep(self, failures: int, commit: int, host: tuple[int, ...]) -> None:
        self._failures, self._commit, self._reason = failures, commit, ""
        if rank() == 0:
            self._worker.resume(commit)

    def _keep_reason(self, reason: str) -> None:
        self._reason = reason

    def end_job(self, reason: str) -> None:
        self._worker.end_job(reason)


def _read(path: Path) -> str:
    """Return the text of a file of this user. A file that does not exist is made, and is empty."""
    with os.fdopen(open_own(path), encoding="utf-8") as file:
        return file.read()


def _write(path: Path, text: str) -> None:
    with os.fdopen(open_own(path), "w", encoding="utf-8") as file:
        file.write(text)
        file.truncate()
