"""Warnings of an operation that waits for long: which ranks are missing, and where in their programs they are instead.

The Watch's thread checks about once a second whether the operation is still the one that it saw before, so operations spend no
time on it. A rank that has waited for long asks all ranks where they are, and the Watch's thread of each rank answers, even
while its main thread is busy. Only a rank that lets none of its threads run does not answer.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from gradwire.collectives.diagnostics import whereabouts
from gradwire.collectives.diagnostics.whereabouts import shortened
from gradwire.collectives.errors import ranks_text
from gradwire.collectives.link.watch import Watch

_log = logging.getLogger("gradwire")

#: Topics of posts: the question, whose value is the time at which it was asked, and the answer, from Position.to_news.
_ASKED, _ANSWERED = "where is everyone", "whereabouts"

#: Seconds between two checks of how long an operation has waited.
_LOOK_S = 1.0

#: How old an answer may be; so ranks that wait together ask once, not each by itself.
_FRESH_S = 0.3

#: How long a warning waits for answers, which take milliseconds where the machine is not busy with other processes.
_ANSWER_S = 3.0

#: How many ranks a warning names.
_MOST_RANKS = 16

_SILENT = "does not answer: it is stopped, native code holds its interpreter's lock, or its host cannot be reached"


@dataclass(frozen=True)
class Position:
    """Where a rank is in the operations of one Communicator.

    begun: the number of the last operation that it began; -1 before the first. is_running: whether that one still runs. calls:
    of the last operations, by number. message: call and other ranks of the awaited message, a new tuple for each message; None
    if there is none. elsewhere: what the rank waits in on other Communicators.
    """

    begun: int
    is_running: bool
    calls: Mapping[int, str]
    message: tuple[str, frozenset[int]] | None = None
    elsewhere: tuple[str, ...] = ()

    @property
    def call(self) -> str:
        """Return the call of the last operation that the rank began."""
        return self._call(self.begun)

    @property
    def waits_in(self) -> str:
        """The awaited operation or message, as text; empty if the rank does not wait."""
        if self.message is not None:
            return shortened(self.message[0])
        return f"operation {self.begun}, {self.call}" if self.is_running else ""

    def is_same_wait(self, earlier: Position) -> bool:
        """Return whether the rank still waits for what it waited for at an earlier position."""
        return (
            bool(self.waits_in)
            and self.message is earlier.message
            and (self.begun, self.is_running) == (earlier.begun, earlier.is_running)
        )

    def to_news(self) -> dict[str, Any]:
        """Return the position as an answer to ranks that ask, with the place of this rank's main thread."""
        parts = [whereabouts.of_main_thread()]
        parts += [f"waits in {self.waits_in}"] if self.waits_in else []
        parts += [f"waits in {shortened(call)} of another Communicator" for call in self.elsewhere]
        finished = self.begun - self.is_running
        last = f"the last operation that it finished is {finished}, {self._call(finished)}"
        parts.append(last if finished >= 0 else "it has finished no operation")
        return {"begun": self.begun, "call": self.call, "text": "; ".join(parts)}

    def _call(self, number: int) -> str:
        return shortened(self.calls.get(number, "unknown"))


class Stalls:
    """Logs a warning when a wait has lasted for warning_s seconds, and whenever that time has doubled; None turns this off.
    position: returns where this rank is; None once the Communicator is deleted."""

    def __init__(self, watch: Watch, warning_s: float | None, position: Callable[[], Position | None]) -> None:
        self._watch = watch
        self._warning_s = warning_s
        self._position = position
        self._last = Position(-1, False, {})
        self._since = 0.0  # since when this rank is at that position
        self._warn_after_s = 0.0
        self._asked_at: float | None = None  # for the next warning
        self._questions: dict[int, float] = {}
        self._question_at = self._answer_at = -math.inf
        self._answers: dict[int, tuple[float, dict[str, Any]]] = {}  # by rank, when it came, and the answer
        watch.on_news(self._on_news)

    def ask(self) -> float:
        """Ask all ranks where they are, unless some rank has just asked; return the time (time.monotonic()) of the question."""
        now = time.monotonic()
        if now - self._question_at > _FRESH_S / 2:
            self._question_at = now
            self._watch.post(_ASKED, now)
            self._answer(now)  # for ranks that do not ask themselves now
        return now

    def answers(self, asked_at: float, reported: Set[int]) -> dict[int, str]:
        """Return by rank where the others are, or that they do not answer. asked_at: from ask(). reported: ranks that have
        reported a failure meanwhile, so a missing answer of theirs means nothing, and they are left out."""
        ranks = self._answered(asked_at) | (self._watch.others - reported)
        return {rank: self._answer_of(rank, asked_at) for rank in ranks}

    def _answer_of(self, rank: int, asked_at: float) -> str:
        if rank not in self._answers:
            return _SILENT
        came, answer = self._answers[rank]
        if rank in self._answered(asked_at):
            return f"is {answer['text']}"
        return f"{_SILENT}; {asked_at - came:.0f} s before, it was {answer['text']}"

    def _answered(self, asked_at: float) -> set[int]:
        """Return which other ranks have answered a question."""
        return {
            rank for rank in self._watch.others & self._answers.keys() if self._answers[rank][0] > asked_at - _FRESH_S
        }

    def _on_news(self) -> float | None:
        """Answer questions, and warn if it is time to. Errors are logged, because this runs on the Watch's thread."""
        try:
            if (position := self._position()) is None:
                return None
            now = time.monotonic()
            for rank, answer in list(self._watch.posts.get(_ANSWERED, {}).items()):
                if rank not in self._answers or self._answers[rank][1] is not answer:
                    self._answers[rank] = now, answer
            questions = {r: at for r, at in list(self._watch.posts.get(_ASKED, {}).items()) if r != self._watch.rank}
            if questions != self._questions:
                self._questions, self._question_at = questions, now
                self._answer(now)
            return None if self._warning_s is None else self._look(position, now, self._warning_s)
        except Exception:
            _log.exception("gradwire: rank %d cannot report where the ranks are", self._watch.rank)
            return None

    def _answer(self, now: float) -> None:
        if now - self._answer_at > _FRESH_S / 2 and (position := self._position()) is not None:
            self._answer_at = now
            self._watch.post(_ANSWERED, position.to_news())

    def _look(self, position: Position, now: float, warning_s: float) -> float:
        """Warn if it is time to; return in how many seconds to check again."""
        look_s = min(_LOOK_S, warning_s / 4)
        last, self._last = self._last, position
        if not position.is_same_wait(last):
            self._since, self._warn_after_s, self._asked_at = now, warning_s, None
            return look_s
        if (left_s := self._since + self._warn_after_s - now) > 0:
            return min(look_s, left_s)
        if self._asked_at is None:
            self._asked_at = self.ask()
        if now < self._asked_at + _ANSWER_S and self._answered(self._asked_at) != self._watch.others:
            return min(look_s, _ANSWER_S / 10)
        _log.warning("%s", self._warning(position, now - self._since, self._asked_at))
        self._asked_at = None
        while self._warn_after_s <= now - self._since:
            self._warn_after_s *= 2
        return look_s

    def _warning(self, position: Position, waited_s: float, asked_at: float) -> str:
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - waited_s))
        text = f"gradwire: rank {self._watch.rank} has waited {waited_s:.1f} s, since {since}, in {position.waits_in}"
        missing, odd = self._to_blame(position, asked_at)
        if missing:
            text += f", for {ranks_text(missing)}"
        elif not odd:
            text += ": all ranks have begun it, so messages are slow or lost"
        if odd:
            text += f"; {ranks_text(odd)} called another operation"
        named = sorted(missing | odd)
        lines = [text, *(f"rank {rank} {self._answer_of(rank, asked_at)}" for rank in named[:_MOST_RANKS])]
        if unnamed := named[_MOST_RANKS:]:
            lines.append(f"and {len(unnamed)} more ranks")
        return "\n    ".join(lines)

    def _to_blame(self, position: Position, asked_at: float) -> tuple[set[int], set[int]]:
        """Return the ranks that have not begun the operation or do not answer, and those that called another one."""
        if position.message is not None:
            return set(position.message[1]), set()
        answers = {rank: self._answers[rank][1] for rank in self._answered(asked_at)}
        there = {rank for rank, answer in answers.items() if answer["begun"] >= position.begun}
        odd = {r for r in there if answers[r]["begun"] == position.begun and answers[r]["call"] != position.call}
        return self._watch.others - there, odd
