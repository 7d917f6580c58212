"""What ranks print: shown with the number of the rank, optionally written to files, and kept to report why ranks and hosts
fail."""

from __future__ import annotations

import re
import signal
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

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
    name = signal.Signals(-exit_code).name if -exit_code in set(signal.Signals) else "a signal"
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


_OF_A_RANK = re.compile(rb"\[(\d+)\]<(stdout|stderr)>: (.*)", re.DOTALL)


class Output:
    """Prints the lines of ranks. folder: gets the files NAME.NUMBER/stdout and NAME.NUMBER/stderr of each rank; None:
    no files. digits: the minimum number of digits of NUMBER, so that folders sort.

    Raises ValueError if the folder cannot be made.
    """

    def __init__(self, folder: Path | None, digits: int, name: str = "rank") -> None:
        self._folder = folder
        self._digits = digits
        self._name = name
        self._words: defaultdict[int, LastWords] = defaultdict(LastWords)
        self._files: dict[tuple[int, str], BinaryIO] = {}
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(f"--output-filename {folder}: {error.strerror}") from error

    def take(self, line: bytes) -> bool:
        """Print a line of an agent if a rank printed it. Return whether a rank did."""
        if (match := _OF_A_RANK.fullmatch(line)) is None:
            return False
        number, stream, text = int(match[1]), match[2].decode(), match[3]
        to = sys.stdout if stream == "stdout" else sys.stderr
        to.buffer.write(line + b"\n")  # unchanged, in any encoding
        to.buffer.flush()
        if stream == "stderr":
            self._words[number].read(text.decode(errors="replace"))
        if self._folder is not None:
            self._file(self._folder, number, stream).write(text + b"\n")
        return True

    def words(self, number: int) -> str:
        """Return the last words of a rank (see LastWords)."""
        return self._words[number].text

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def _file(self, folder: Path, number: int, stream: str) -> BinaryIO:
        if (number, stream) not in self._files:
            path = folder / f"{self._name}.{number:0{self._digits}}" / stream
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[number, stream] = path.open("wb", buffering=0)
        return self._files[number, stream]


def say(text: str) -> None:
    """Print a line of the launcher's own."""
    print(f"gradwire: {text}", file=sys.stderr, flush=True)
