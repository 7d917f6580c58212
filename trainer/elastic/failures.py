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
from gradwire.trainer.world.world import communicator_of

_log = logging.getLogger("gradwire")


class GaveUp(RuntimeError):
    """Ranks have failed as often as allowed without a new commit."""


class Failures:
    """Counts the failures of ranks since the newest commit, in files beside the commits of this host.

    memory: holds the commits. max_failures: the number of failures at which all ranks give up. worker: that of this process in a
    job that keeps its processes, in which a failure is an error that a rank has noted; elsewhere, each restart is one.
    """

    def __init__(self, agent: Agent, memory: NamedMemory, max_failures: int, worker: Worker | None) -> None:
        self.memory = memory
        self._agent, self._worker = agent, worker
        self._max_failures = max_failures
        self._is_watched = False

    def begin(self, host: tuple[int, ...], commit: int) -> None:
        """Record that ranks continue from a commit, and count the failure if one has happened since the last begin(). host: the
        ranks of this host. Collective. Raises GaveUp on all ranks, and RuntimeError if they call different functions."""
        communicator = communicator_of(global_process_set)
        before = json.loads(_read(self.memory.path("failures")) or '{"commit": 0, "restarts": 0, "failures": 0}')
        reasons, number = self._reasons(), restarts(os.environ)
        failed = bool(reasons) if self._worker is not None else number > before["restarts"]
        everyones = communicator.allgather_record(
            [failed, before["failures"], before["commit"], reasons, self.memory.number]
        )
        numbers = [number for *_, number in everyones]
        if len(set(numbers)) > 1:
            raise RuntimeError(
                f"rank {communicator.rank}: the ranks call different functions that hvd.elastic.run decorates: by rank, it is "
                f"number {numbers} of those that the process has called. A process that comes later begins with the first: call "
                "one only"
            )
        has_failed = any(failed for failed, *_ in everyones)
        failures = has_failed + max(count * (at == commit) for _, count, at, *_ in everyones)
        reasons = list(dict.fromkeys(reason for *_, theirs, _ in everyones for reason in theirs))
        is_first, is_first_of_host = communicator.rank == 0, communicator.rank == host[0]
        if is_first_of_host and not self._is_watched:
            self._agent.watch()
            self._is_watched = True
        if is_first_of_host:
            record = {"commit": commit, "restarts": number, "failures": failures}
            _write(self.memory.path("failures"), json.dumps(record))
            _write(self._path_of_reasons, "")
        if is_first and self._worker is not None:
            self._worker.resume(commit)
        communicator.barrier()  # or a rank could fail and note why before the reasons of the last failure are cleared
        if failures >= self._max_failures:
            since = f"since commit {commit}" if commit else "before the first commit"
            why = "; ".join(reasons) or "no rank reported why"
            said = f"ranks have failed {failures} times {since}, and are not started again: {why}"
            if is_first:
                _log.error("gradwire: %s", said)
            communicator.barrier()  # or rank 0 could be ended before it logs
            self.end_job(said)
            raise GaveUp(f"rank {communicator.rank}: {said}")
        if has_failed and is_first:
            none = "none has reported an error; the launcher prints the exit code of each (-9: SIGKILL)"
            _log.warning("gradwire: ranks have failed: %s", next(iter(reasons), none))

    def note(self, error: Exception) -> None:
        """Record why this rank has failed, after the reasons of other ranks of this host."""
        line = json.dumps(reason_of(error)) + "\n"
        with suppress(OSError), os.fdopen(open_own(self._path_of_reasons, os.O_APPEND), "ab", buffering=0) as file:
            file.write(line.encode())  # in one piece, since other ranks of this host may write at the same time

    @property
    def _path_of_reasons(self) -> Path:
        return self.memory.path("reasons")

    def _reasons(self) -> list[str]:
        """Return why ranks of this host have failed since the last begin() of all ranks, in the order in which they noted it."""
        return [json.loads(line) for line in _read(self._path_of_reasons).splitlines()]

    def end_job(self, reason: str) -> None:
        """Make the launcher end the job. Any number of ranks call this, and then raise an error."""
        if self._worker is not None:
            self._worker.end_job(reason)
            return
        with suppress(FileExistsError):  # another rank of this host has done so
            os.close(os.open(self.memory.path("ended"), os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            os.kill(self._agent.pid, signal.SIGTERM)


def _read(path: Path) -> str:
    """Return the text of a file of this user. A file that does not exist is made, and is empty."""
    with os.fdopen(open_own(path), encoding="utf-8") as file:
        return file.read()


def _write(path: Path, text: str) -> None:
    with os.fdopen(open_own(path), "w", encoding="utf-8") as file:
        file.write(text)
        file.truncate()
