"""The failures of ranks and hosts, and the lines that report them."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

#: Errors that a rank raises because another rank failed.
_CONSEQUENCES = re.compile(r"\b(PeerLost|CollectiveTimeout|Mismatch)\b|Connection (closed|reset) by peer")
#: The last line of a traceback, which torchrun may prefix with the rank.
_RAISED = re.compile(r"(\[rank\d+\]: )?[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b")
_LONGEST = 500


class LastWords:
    """Keeps the line that explains why a process ended: the error of its last traceback, or else its last line."""

    def __init__(self) -> None:
        self._line = ""
        self._error = ""
        self._in_traceback = False

    def read(self, line: str) -> None:
        """Read the next line."""
        if line.startswith("Traceback (most recent call last):"):
            self._in_traceback = True
        elif line.strip():
            self._line = line.strip()
            if self._in_traceback and not line[0].isspace():
                self._error, self._in_traceback = self._line, False

    @property
    def text(self) -> str:
        """Return the line, shortened; empty if there was none."""
        return (self._error or self._line)[:_LONGEST]


#: The beginnings of the lines in which the launcher reports failures: see failure_lines().
_REPORTED = ("gradwire: rank", "gradwire: worker")


def cause_among(lines: Sequence[str]) -> str:
    """Return the first line with an error that a rank raised, except errors that follow from the failure of another rank; empty
    if there is none. torchrun's own error is skipped: it only reports that some rank failed."""
    raised = [line.strip() for line in lines if _RAISED.match(line) or line.startswith(_REPORTED)]
    return next((line for line in raised if not _CONSEQUENCES.search(line) and "ChildFailedError" not in line), "")[
        :_LONGEST
    ]


@dataclass(frozen=True)
class JobFailure:
    """Holds the reason why a job failed on one host, as far as known. rank: in an elastic job, the number of the
    worker; None if the host itself failed. words: the text of the process's LastWords."""

    host: str
    rank: int | None
    exit_code: int | None
    words: str

    @property
    def is_consequence(self) -> bool:
        """Return whether the rank failed only because other ranks did, or the launcher ended it for that reason."""
        if self.rank is None:
            return False
        if self.exit_code == -signal.SIGTERM and not _RAISED.match(self.words):
            return True  # the launcher ended it, unless the rank had already raised an error of its own
        return _CONSEQUENCES.search(self.words) is not None

    @property
    def common(self) -> tuple[str | None, int | None, str]:
        """Return what is equal for failures that share a line of the report: None, the exit code, and the words without the
        rank's own number. If the host itself failed, return its name instead of None, so that no other failure is equal."""
        if self.rank is None:
            return self.host, self.exit_code, self.words
        raised = self.exit_code == -signal.SIGTERM and _RAISED.match(self.words)  # the rank would have ended with 1
        return (
            None,
            1 if raised else self.exit_code,
            re.sub(rf"\[rank{self.rank}\]: |\brank {self.rank}: ", "", self.words),
        )


def ending(exit_code: int) -> str:
    """Return how a process ended, in words. exit_code: as in subprocess, negative for a signal."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = "a signal"
    return f"was killed by {name} ({-exit_code})"


def _line(alike: Sequence[JobFailure], noun: str) -> str:
    """Return the report of one failure, or of several with equal `common`."""
    first = alike[0]
    by_host: dict[str, list[int]] = {}
    for failure in alike:
        by_host.setdefault(failure.host, []).extend([] if failure.rank is None else [failure.rank])
    who = " and ".join(
        f"{_numbered(ranks, noun)} on host {host}" if ranks else f"host {host}" for host, ranks in by_host.items()
    )
    _, exit_code, words = first.common
    if len(alike) == 1:
        words = first.words
    how = "" if exit_code is None else f" {ending(exit_code)}"
    return f"{who}{how}: {words}" if words else f"{who}{how}"


def failure_lines(failures: list[JobFailure], noun: str = "rank") -> list[str]:
    """Return the lines that report failures. Failures with equal `common` share a line, and so do those that are only
    consequences. noun: "rank" or "worker"."""
    causes = [failure for failure in failures if not failure.is_consequence] or failures
    alike: dict[tuple[str | None, int | None, str], list[JobFailure]] = {}
    for failure in causes:
        alike.setdefault(failure.common, []).append(failure)
    lines = [f"gradwire: {_line(group, noun)}" for group in alike.values()]
    if others := [failure.rank for failure in failures if failure not in causes and failure.rank is not None]:
        lines.append(f"gradwire: {_numbered(others, noun)} ended because of that")
    return lines


def _numbered(ranks: Sequence[int], noun: str) -> str:
    return f"{noun}{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


def exit_status(failures: list[JobFailure]) -> int:
    """Return the exit status of a job, by the convention of shells: the status of its first failure."""
    causes = sorted(failures, key=lambda failure: failure.is_consequence)
    code = next((code for failure in causes if (code := failure.common[1])), 1)
    return 128 - code if code < 0 else code
