"""While an operation waits for long: which ranks have not come, and where in their programs they are instead.

The Watch's thread checks about once a second whether the operation is still the one that it saw before, so operations do nothing
for it. A rank that has waited for long asks where all are, and the Watch's thread of each rank answers, whatever its main thread
does. Only a rank that lets none of its threads run does not answer.
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

#: What ranks post: a question, which is the time at which it was asked, and an answer, which Position.to_news makes.
_ASKED, _ANSWERED = "where is everyone", "whereabouts"

#: How often to check for how long an operation has waited.
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
    of the last operations, by number. message: call and other ranks of the message that is waited for, a tuple of its own for
    each; None where there is none. elsewhere: what runs in other Communicators.
    """

    begun: int
    is_running: bool
    calls: Mapping[int, str]
    message: tuple[str, frozenset[int]] | None = None
    elsewhere: tuple[str, ...] = ()

    @property
    def call(self) -> str:
        """Return what was called as the last operation that the rank began."""
        return self._call(self.begun)

    @property
    def waits_in(self) -> str:
        """What is waited for, in words; nothing where the rank does not wait."""
        if self.message is not None:
            return shortened(self.message[0])
        return f"operation {self.begun}, {self.call}" if self.is_running else ""

    def is_same_wait(self, earlier: Position) -> bool:
        """Return whether the rank has waited for the same thing since."""
        return (
            bool(self.waits_in)
            and self.message is earlier.message
            and (self.begun, self.is_running) == (earlier.begun, earlier.is_running)
        )

    def to_news(self) -> dict[str, Any]:
        """Return it for ranks that ask, with where this rank's main thread is."""
        said = [whereabouts.of_main_thread()]
        said += [f"waits in {self.waits_in}"] if self.waits_in else []
        said += [f"waits in {shortened(call)} of another Communicator" for call in self.elsewhere]
        finished = self.begun - self.is_running
        last = f"the last operation that it finished is {finished}, {self._call(finished)}"
        said.append(last if finished >= 0 else "it has finished no operation")
        return {"begun": self.begun, "call": self.call, "text": "; ".join(said)}

    def _call(self, number: int) -> str:
        return shortened(self.calls.get(number, "unknown"))


class Stalls:
    """Warns of a wait that has lasted for warning_s seconds, and again each time it has lasted twice as long; None warns of none.
    position: tells where this rank is; None once nobody uses the Communicator any more."""

    def __init__(self, watch: Watch, warning_s: float | None, position: Callable[[], Position | None]) -> None:
        self._watch = watch
        self._warning_s = warning_s
        self._position = position
        self._last = Position(-1, False, {})
        self._since = 0.0  # since when this rank is there
        self._warn_after_s = 0.0
        self._asked_at: float | None = None  # for the next warning
        self._questions: dict[int, float] = {}
        self._question_at = self._answer_at = -math.inf
        self._answers: dict[int, tuple[float, dict[str, Any]]] = {}  # when they came, and what they are
        watch.on_news(self._on_news)

    def ask(self) -> float:
        """Ask where everyone is, if nobody has just asked; return the time (time.monotonic()) of the question."""
        now = time.monotonic()
        if now - self._question_at > _FRESH_S / 2:
            self._question_at = now
            self._watch.post(_ASKED, now)
            self._answer(now)  # to those who then do not ask
        return now

    def answers(self, asked_at: float, spoken: Set[int]) -> dict[int, str]:
        """Return where other ranks are, or that they do not answer. asked_at: from ask(). spoken: ranks that have reported
        something else meanwhile, so that it means nothing if their answers have not come."""
        told = self._answered(asked_at) | (self._watch.others - spoken)
        return {rank: self._said_by(rank, asked_at) for rank in told}

    def _said_by(self, rank: int, asked_at: float) -> str:
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
        """Answer questions, and warn if it is time to, on the Watch's thread, to which an error here must not do any harm."""
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
        """Warn if it is time to; return in how many seconds to look again."""
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
        said = f"gradwire: rank {self._watch.rank} has waited {waited_s:.1f} s, since {since}, in {position.waits_in}"
        missing, odd = self._to_blame(position, asked_at)
        if missing:
            said += f", for {ranks_text(missing)}"
        elif not odd:
            said += ": all ranks have begun it, so messages are slow or lost"
        if odd:
            said += f"; {ranks_text(odd)} called another operation"
        told = sorted(missing | odd)
        lines = [said, *(f"rank {rank} {self._said_by(rank, asked_at)}" for rank in told[:_MOST_RANKS])]
        if unsaid := told[_MOST_RANKS:]:
            lines.append(f"and {len(unsaid)} more ranks")
        return "\n    ".join(lines)

    def _to_blame(self, position: Position, asked_at: float) -> tuple[set[int], set[int]]:
        """Return who has not come yet or does not answer, and who has come to something else."""
        if position.message is not None:
            return set(position.message[1]), set()
        answers = {rank: self._answers[rank][1] for rank in self._answered(asked_at)}
        there = {rank for rank, answer in answers.items() if answer["begun"] >= position.begun}
        odd = {r for r in there if answers[r]["begun"] == position.begun and answers[r]["call"] != position.call}
        return self._watch.others - there, odd
