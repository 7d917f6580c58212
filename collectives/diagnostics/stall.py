"""Warnings about an operation that waits for a long time: the missing ranks, and the lines that they execute instead.

The Monitor's thread checks about once a second whether the operation is still the same, so that operations spend no time
on checks. When a wait is long, the rank posts a question to all ranks. The Monitor's thread of each rank answers it, even
while the main thread is busy. A rank does not answer only if none of its threads can run.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from gradwire.collectives.control.channel import Channel
from gradwire.collectives.diagnostics import whereabouts
from gradwire.collectives.diagnostics.whereabouts import shortened
from gradwire.collectives.errors import ranks_text

_log = logging.getLogger("gradwire")

#: Topics of posts: the question, whose value is the time at which it was asked, and the answer, from Position.to_news.
_ASKED, _ANSWERED = "where is everyone", "whereabouts"

#: Seconds between two checks of how long an operation has waited.
_POLL_S = 1.0

#: How old an answer may be. So ranks that wait at the same time need only one question.
_FRESH_S = 0.3

#: How long a warning waits for answers, which take milliseconds where the machine is not busy with other processes.
_ANSWER_S = 3.0

#: The maximum number of ranks that a warning names.
_MOST_RANKS = 16

_UNEVEN = " (only some ranks make one of the two calls, or they have different numbers of batches: join())"

_SILENT = "does not answer: it is stopped, native code holds its interpreter's lock, or its host cannot be reached"


@dataclass(frozen=True)
class Position:
    """Holds the position of a rank in the operations of one Communicator.

    begun: the number of the last operation that the rank has begun; -1 before the first. is_running: whether it still
    runs. calls: the last operations, by number. message: the call and the other ranks of the awaited message, a new
    tuple for each message; None if there is none. elsewhere: the awaited operations and messages of other
    Communicators.
    """

    begun: int
    is_running: bool
    calls: Mapping[int, str]
    message: tuple[str, frozenset[int]] | None = None
    elsewhere: tuple[str, ...] = ()

    @property
    def call(self) -> str:
        """Return the call of the last operation that the rank has begun."""
        return self._call(self.begun)

    @property
    def waits_in(self) -> str:
        """Return the awaited operation or message, as text; empty if the rank does not wait."""
        if self.message is not None:
            return shortened(self.message[0])
        return f"operation {self.begun}, {self.call}" if self.is_running else ""

    def is_same_wait(self, earlier: Position) -> bool:
        """Return whether the rank waits in the same operation or message as at an earlier position."""
        return (
            bool(self.waits_in)
            and self.message is earlier.message
            and (self.begun, self.is_running) == (earlier.begun, earlier.is_running)
        )

    def to_news(self) -> dict[str, Any]:
        """Return the position as the answer to a question, with the place of the main thread of this process."""
        parts = [whereabouts.of_main_thread()]
        parts += [f"waits in {self.waits_in}"] if self.waits_in else []
        parts += [f"waits in {shortened(call)} of another Communicator{_UNEVEN}" for call in self.elsewhere]
        finished = self.begun - self.is_running
        last = f"the last operation that it finished is {finished}, {self._call(finished)}"
        parts.append(last if finished >= 0 else "it has finished no operation")
        return {"begun": self.begun, "call": self.call, "text": "; ".join(parts)}

    def _call(self, number: int) -> str:
        return shortened(self.calls.get(number, "unknown"))


class Stalls:
    """Logs a warning when a wait has lasted for warning_s seconds, and after each doubling of this time. warning_s:
    None for no warnings. position: returns this rank's Position; None if the Communicator is deleted."""

    def __init__(self, channel: Channel, warning_s: float | None, position: Callable[[], Position | None]) -> None:
        self._channel = channel
        self._warning_s = warning_s
        self._position = position
        self._last = Position(-1, False, {})
        self._since = 0.0  # when this rank was first seen at that position
        self._warn_after_s = 0.0
        self._asked_at: float | None = None  # when the question for the next warning was asked
        self._questions: dict[int, float] = {}
        self._question_at = self._answer_at = -math.inf
        self._answers: dict[int, tuple[float, dict[str, Any]]] = {}  # by rank: its time of arrival, and the answer
        channel.on_news(self._on_news)

    def ask(self) -> float:
        """Post the question, unless some rank has just posted it. Return the present time.monotonic()."""
        now = time.monotonic()
        if now - self._question_at > _FRESH_S / 2:
            self._question_at = now
            self._channel.post(_ASKED, now)
            self._answer(now)  # for ranks that need not ask now
        return now

    def answers(self, asked_at: float, reported: Set[int]) -> dict[int, str]:
        """Return by rank, as text, where the other ranks are, or that they do not answer. asked_at: the result of
        ask(). reported: the ranks that have reported a failure since. If they do not answer, they are left out."""
        ranks = self._answered(asked_at) | (self._channel.others - reported)
        return {rank: self._answer_of(rank, asked_at) for rank in ranks}

    def _answer_of(self, rank: int, asked_at: float) -> str:
        if rank not in self._answers:
            return _SILENT
        came, answer = self._answers[rank]
        if rank in self._answered(asked_at):
            return f"is {answer['text']}"
        return f"{_SILENT}; {asked_at - came:.0f} s before, it was {answer['text']}"

    def _answered(self, asked_at: float) -> set[int]:
        """Return the other ranks whose answer is recent enough for a question. asked_at: the result of ask()."""
        return {
            rank for rank in self._channel.others & self._answers.keys() if self._answers[rank][0] > asked_at - _FRESH_S
        }

    def _on_news(self) -> float | None:
        """Answer questions, and log a warning if it is due. Return in how many seconds to check again, or None. Log
        errors, because this runs on the Monitor's thread."""
        try:
            if (position := self._position()) is None:
                return None
            now = time.monotonic()
            for rank, answer in list(self._channel.posts.get(_ANSWERED, {}).items()):
                if rank not in self._answers or self._answers[rank][1] is not answer:
                    self._answers[rank] = now, answer
            questions = {
                r: at for r, at in list(self._channel.posts.get(_ASKED, {}).items()) if r != self._channel.rank
            }
            if questions != self._questions:
                self._questions, self._question_at = questions, now
                self._answer(now)
            return None if self._warning_s is None else self._look(position, now, self._warning_s)
        except Exception:
            _log.exception("gradwire: rank %d cannot report where the ranks are", self._channel.rank)
            return None

    def _answer(self, now: float) -> None:
        if now - self._answer_at > _FRESH_S / 2 and (position := self._position()) is not None:
            self._answer_at = now
            self._channel.post(_ANSWERED, position.to_news())

    def _look(self, position: Position, now: float, warning_s: float) -> float:
        """Log a warning if it is due. Return in how many seconds to check again."""
        poll_s = min(_POLL_S, warning_s / 4)
        last, self._last = self._last, position
        if not position.is_same_wait(last):
            self._since, self._warn_after_s, self._asked_at = now, warning_s, None
            return poll_s
        if (left_s := self._since + self._warn_after_s - now) > 0:
            return min(poll_s, left_s)
        if self._asked_at is None:
            self._asked_at = self.ask()
        if now < self._asked_at + _ANSWER_S and self._answered(self._asked_at) != self._channel.others:
            return min(poll_s, _ANSWER_S / 10)
        _log.warning("%s", self._warning(position, now - self._since, self._asked_at))
        self._asked_at = None
        while self._warn_after_s <= now - self._since:
            self._warn_after_s *= 2
        return poll_s

    def _warning(self, position: Position, waited_s: float, asked_at: float) -> str:
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - waited_s))
        text = f"gradwire: rank {self._channel.rank} has waited {waited_s:.1f} s, since {since}, in {position.waits_in}"
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
        """Return the ranks that have not begun the operation or do not answer, and those that called another one. For a
        message, return the ranks at its other end."""
        if position.message is not None:
            return set(position.message[1]), set()
        answers = {rank: self._answers[rank][1] for rank in self._answered(asked_at)}
        there = {rank for rank, answer in answers.items() if answer["begun"] >= position.begun}
        odd = {r for r in there if answers[r]["begun"] == position.begun and answers[r]["call"] != position.call}
        return self._channel.others - there, odd
