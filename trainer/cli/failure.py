"""The failures of ranks and hosts, and the lines that report them."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

#: Errors by which a rank says that another one failed.
_CONSEQUENCES = re.compile(r"\b(PeerLost|CollectiveTimeout|Mismatch)\b|Connection (closed|reset) by peer")
#: The last line of a traceback, perhaps with torchrun's word for the rank before it.
_RAISED = re.compile(r"(\[rank\d+\]: )?[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b")
_LONGEST = 500


class LastWords:
    """Keeps what a process printed last that says why it ended: the error of its last traceback, else its last line."""

    def __init__(self) -> None:
        self._line = ""
        self._error = ""
        self._in_traceback = False

    def hear(self, line: str) -> None:
        """Take the next line."""
        if line.startswith("Traceback (most recent call last):"):
            self._in_traceback = True
        elif line.strip():
            self._line = line.strip()
            if self._in_traceback and not line[0].isspace():
                self._error, self._in_traceback = self._line, False

    @property
    def text(self) -> str:
        """Return the line, shortened; nothing where there was none."""
        return (self._error or self._line)[:_LONGEST]


def cause_among(lines: Sequence[str]) -> str:
    """Return the first line that says which error a rank raised, other than that another failed; nothing where none does.
    torchrun's own error says no more than that a rank failed."""
    raised = [line.strip() for line in lines if _RAISED.match(line) or line.startswith("gradwire: rank")]
    return next((line for line in raised if not _CONSEQUENCES.search(line) and "ChildFailedError" not in line), "")[
        :_LONGEST
    ]


@dataclass(frozen=True)
class Failure:
    """Holds why a job failed on one host, as far as it is known. rank: in an elastic job that of a worker; None where the host
    itself failed."""

    host: str
    rank: int | None
    exit_code: int | None
    words: str

    @property
    def is_consequence(self) -> bool:
        """Tell whether the rank only says that others failed, or was ended for it by torch's agent."""
        if self.rank is None:
            return False
        if self.exit_code == -signal.SIGTERM and not _RAISED.match(self.words):
            return True  # torch's agent ended it; but not a rank that was on its way out by an error of its own
        return _CONSEQUENCES.search(self.words) is not None

    @property
    def common(self) -> tuple[str | None, int | None, str]:
        """Return what is equal for failures that one line reports together: None, the exit code, and the words without the rank's
        own number. In place of None the host's name where the host itself failed, which is
        like no other failure."""
        if self.rank is None:
            return self.host, self.exit_code, self.words
        raised = self.exit_code == -signal.SIGTERM and _RAISED.match(self.words)  # and would have ended with 1
        return (
            None,
            1 if raised else self.exit_code,
            re.sub(rf"\[rank{self.rank}\]: |\brank {self.rank}: ", "", self.words),
        )


def ending(exit_code: int) -> str:
    """Return how a process ended, in words. exit_code: negative for a signal, as subprocess has it."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = "a signal"
    return f"was killed by {name} ({-exit_code})"


def _line(alike: Sequence[Failure], noun: str) -> str:
    """Return the report of a failure, or of several that have all in common."""
    first = alike[0]
    by_host: dict[str, list[int]] = {}
    for failure in alike:
        by_host.setdefault(failure.host, []).extend([] if failure.rank is None else [failure.rank])
    who = " and ".join(
        f"{_numbered(ranks, noun)} on host {host}" if ranks else f"host {host}" for host, ranks in by_host.items()
    )
    _, exit_code, words = first.common if len(alike) > 1 else (None, first.exit_code, first.words)
    how = "" if exit_code is None else f" {ending(exit_code)}"
    return f"{who}{how}: {words}" if words else f"{who}{how}"


def told_failures(failures: list[Failure], noun: str = "rank") -> list[str]:
    """Return a line for each failure; those that are alike, and those that only follow from others, share one. noun: what has
    failed."""
    causes = [failure for failure in failures if not failure.is_consequence] or failures
    alike: dict[tuple[str | None, int | None, str], list[Failure]] = {}
    for failure in causes:
        alike.setdefault(failure.common, []).append(failure)
    lines = [f"gradwire: {_line(group, noun)}" for group in alike.values()]
    if others := [failure.rank for failure in failures if failure not in causes and failure.rank is not None]:
        lines.append(f"gradwire: {_numbered(others, noun)} ended because of that")
    return lines


def _numbered(ranks: Sequence[int], noun: str) -> str:
    return f"{noun}{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


def exit_status(failures: list[Failure]) -> int:
    """Return the exit status of a job, as a shell has it: that of its first failure."""
    causes = sorted(failures, key=lambda failure: failure.is_consequence)
    code = next((code for failure in causes if (code := failure.common[1])), 1)
    return 128 - code if code < 0 else code
