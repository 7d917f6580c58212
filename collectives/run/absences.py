"""Who of the ranks has joined: has nothing more to give, and takes part with zeros in what the others still call.

A joined rank does not know what the others call next, so they tell it: as long as anybody has joined, what a rank is in goes out
as news. Until then nothing is sent, and nothing is looked at beyond the flag that there are news.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.link.watch import Watch

_JOINED, _CALLS = "joined", "calls for those who have joined"


class Call(str):
    """What ranks call, as text, the same on all; and what a joined rank needs to call the same.

    arguments: of the verb, as far as they say what zeros are needed. joinable: whether the result is right where a rank gives
    zeros.
    """

    __slots__ = ("arguments", "joinable", "verb")
    verb: str
    arguments: dict[str, Any]
    joinable: bool

    def __new__(cls, text: str, verb: str, *, joinable: bool = False, **arguments: Any) -> Call:
        call = super().__new__(cls, text)
        call.verb, call.joinable, call.arguments = verb, joinable, arguments
        return call

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)  # what is copied or sent is the text


@dataclass(frozen=True)
class Wanted:
    """An operation in which others wait for this rank, which has joined: its number, what is called, and how."""

    sequence: int
    call: str
    verb: str
    arguments: dict[str, Any]

    @property
    def numel(self) -> int:
        """Tell how many numbers there are in all."""
        return sum(map(math.prod, self.arguments.get("shapes", [])))


class Absences:
    """What one Communicator knows of ranks that have joined.

    Joins are counted as rounds: one ends when all ranks have joined. Attributes: allows, what a joined rank may take part in;
    refused, the number of the last operation that it may not, with `absent`, the ranks that had joined; on_change, called on a
    thread of the Watch's after each piece of news.
    """

    def __init__(self, watch: Watch) -> None:
        self.allows: Callable[[str], bool] = lambda call: isinstance(call, Call) and call.joinable
        self.refused = -1
        self.absent: tuple[int, ...] = ()
        self.on_change: Callable[[], object] | None = None
        self._watch = watch
        self._round = 0  # how many are over
        self._announced = -1
        self._lock = threading.Lock()
        self._missed: list[list[Any]] = []  # what has been announced and may not have been heard
        self._begun = 0  # the number of the first operation of this round

    # Of a rank that has not joined

    def announce(self, sequence: int, calls: Iterable[tuple[int, str]]) -> None:
        """Tell those who have joined what this rank is in, once, if they take no part in it by themselves.

        calls: the operations that began last, with their numbers. A rank that only sends may be ahead of one that has joined.
        """
        with self._lock:  # the thread that calls and that of the Watch may both come here
            self._announce(sequence, calls)

    def _announce(self, sequence: int, calls: Iterable[tuple[int, str]]) -> None:
        if sequence == self._announced or not (joined := self._joined()) or self._watch.rank in joined:
            return
        absent = tuple(sorted(rank for rank, (first, _) in joined.items() if first <= sequence))
        if not absent:
            return
        first = min(joined[rank][0] for rank in absent)
        told = max([first - 1, *(entry[0] for entry in self._missed)])
        news = [_told(number, call, self.allows(call)) for number, call in sorted(calls) if told < number <= sequence]
        self._missed = _since_met([entry for entry in self._missed if entry[0] >= first] + news)
        if not self._missed:  # what was under way has ended meanwhile
            return
        if not self._missed[-1][-1]:
            self.absent, self.refused = absent, sequence
        self._announced = sequence
        self._watch.post(_CALLS, [self._round, self._missed])

    def hear(self) -> None:
        """Take note of news: from now on every operation is announced, where a rank has joined."""
        if self._joined():
            self._watch.has_news = True
        if self.on_change is not None:
            self.on_change()

    # Of a rank that joins

    def join(self, first: int, time_s: float) -> None:
        """Say that this rank gives zeros from operation `first` on. time_s: since the epoch."""
        self._watch.post(_JOINED, [self._round + 1, first, [first - self._begun, time_s]])

    def wanted(self, sequence: int) -> Wanted | None:
        """Return operation `sequence`, which this rank would begin next, if others wait for it there, or have not needed to.

        One that is not allowed counts only when all who have not joined are in it: then all of them know that it is refused.
        """
        joined = self._joined()
        posted = list(self._watch.posts.get(_CALLS, {}).items())
        told = {rank: missed for rank, (number, missed) in posted if number == self._round and rank not in joined}
        there = {rank: missed for rank, missed in told.items() if missed[-1][0] >= sequence}
        entries = [entry for missed in there.values() for entry in missed if entry[0] == sequence]
        if there and (any(entry[-1] for entry in entries) or len(there) + len(joined) == self._watch.size):
            _, call, verb, arguments, _ = entries[0] if entries else (sequence, "an unknown operation", "", {}, False)
            return Wanted(sequence, call, verb, arguments)
        return None

    @property
    def everyone_joined(self) -> bool:
        return len(self._joined()) == self._watch.size

    @property
    def firsts(self) -> Mapping[int, int]:
        """Return, by rank that has joined, the number of the first operation to which it gave zeros."""
        return {rank: first for rank, (first, _) in self._joined().items()}

    @property
    def last(self) -> int:
        """Return who joined last: who took part in most operations of the round; among equals, by the clocks."""
        joined = self._joined()
        return max(joined, key=lambda rank: (joined[rank][1], rank))

    @property
    def is_broken(self) -> bool:
        """Return whether some rank has failed here, or ended, or this rank hears nothing any more."""
        watch = self._watch
        return bool(watch.reports or watch.lost or watch.failure)

    @property
    def has_leavers(self) -> bool:
        """Return whether some rank takes part in nothing any more."""
        return bool(self._watch.left)

    def resume(self, first: int) -> None:
        """End the round, before operation `first`: all have joined, and all know what they wanted to know of it."""
        self._round += 1
        self._begun = first
        self.on_change = None
        self._watch.look_again()
        self.hear()  # of those that have joined again already

    def _joined(self) -> dict[int, tuple[int, list[float]]]:
        """Return who has joined in this round: the first operation of each, and how late that was."""
        posted = list(self._watch.posts.get(_JOINED, {}).items())
        return {rank: (first, late) for rank, (number, first, late) in posted if number > self._round}


def _since_met(entries: list[list[Any]]) -> list[list[Any]]:
    """Return what may still be news: when an operation that is allowed, and so needs everyone, is followed by another, everyone
    has taken part in it, and in all before it."""
    met = [place for place, entry in enumerate(entries[:-1]) if entry[-1]]
    return entries[met[-1] + 1 :] if met else entries


def _told(number: int, call: str, is_allowed: bool) -> list[Any]:
    """Return what is posted of an operation."""
    if isinstance(call, Call):
        return [number, str(call), call.verb, json.loads(json.dumps(call.arguments, default=_in_words)), is_allowed]
    return [number, call, "", {}, False]


def _in_words(value: object) -> Any:
    """Return what stands in JSON for a codec or a dtype."""
    if isinstance(value, Codec):
        settings: Any = value
        return [value.name, {field.name: getattr(value, field.name) for field in fields(settings)}]
    return str(value)
