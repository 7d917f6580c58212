"""Which ranks have joined: they have nothing more to give, and take part with zeros in what the others still call.

A joined rank does not know what the others call next, so these send it as news, for as long as any rank has joined. Until then
nothing is sent, and an operation looks at nothing but the flag that there are news. What a joined rank does itself is in
`gradwire.collectives.absence`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any

from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.link.watch import Watch

_JOINED, _CALLS = "joined", "calls for those who have joined"


class Call(str):
    """What ranks call, as text, the same on all; and what a joined rank needs to call the same with zeros.

    verb: a method of Communicator. tensors: its tensors, each as shape, dtype and kind of device. joinable: whether the result is
    right where a rank gives zeros. arguments: the others of the verb, by name.
    """

    __slots__ = ("arguments", "joinable", "tensors", "verb")
    verb: str
    tensors: Sequence[Any]
    joinable: bool
    arguments: dict[str, Any]

    def __new__(
        cls, text: str, verb: str, tensors: Sequence[Any] = (), joinable: bool = False, **arguments: Any
    ) -> Call:
        call = super().__new__(cls, text)
        call.verb, call.tensors, call.joinable, call.arguments = verb, tensors, joinable, arguments
        return call

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)  # what is copied or sent is the text


class Joined:
    """What one Communicator knows of ranks that have joined, and what it lets them know.

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

    def announce(self, sequence: int, calls: Iterable[tuple[int, str]]) -> None:
        """Send those who have joined what this rank is in, once, if they take no part in it by themselves.

        calls: the operations that began last, with their numbers. A rank that only sends may be ahead of one that has joined.
        """
        with self._lock:  # the thread that calls and that of the Watch may both come here
            if sequence == self._announced or not (joined := self.ranks()) or self._watch.rank in joined:
                return
            absent = tuple(sorted(rank for rank, (first, _) in joined.items() if first <= sequence))
            if not absent:
                return
            first = min(joined[rank][0] for rank in absent)
            told = max([first - 1, *(entry[0] for entry in self._missed)])
            news = [
                _told(number, call, self.allows(call)) for number, call in sorted(calls) if told < number <= sequence
            ]
            self._missed = _since_met([entry for entry in self._missed if entry[0] >= first] + news)
            if not self._missed:  # what was under way has ended meanwhile
                return
            if not self._missed[-1][-1]:
                self.absent, self.refused = absent, sequence
            self._announced = sequence
            self._watch.post(_CALLS, [self._round, self._missed])

    def hear(self) -> None:
        """Take note of news: from now on every operation is announced, where a rank has joined."""
        if self.ranks():
            self._watch.has_news = True
        if self.on_change is not None:
            self.on_change()

    def join(self, first: int, time_s: float) -> None:
        """Let the others know that this rank gives zeros from operation `first` on. time_s: since the epoch."""
        self._watch.post(_JOINED, [self._round + 1, first, [first - self._begun, time_s]])

    def ranks(self) -> dict[int, tuple[int, list[float]]]:
        """Return who has joined in this round: the first operation of each, and how late that was (in operations of the round,
        and by its clock)."""
        posted = list(self._watch.posts.get(_JOINED, {}).items())
        return {rank: (first, late) for rank, (number, first, late) in posted if number > self._round}

    def missed(self) -> dict[int, list[list[Any]]]:
        """Return, by rank that has announced anything in this round, the operations that it announced last: number, text, verb,
        tensors, arguments, and whether a joined rank may take part."""
        posted = list(self._watch.posts.get(_CALLS, {}).items())
        return {rank: missed for rank, (number, missed) in posted if number == self._round}

    def resume(self, first: int) -> None:
        """End the round, before operation `first`: all have joined, and all know what they wanted to know of it."""
        self._round += 1
        self._begun = first
        self.on_change = None
        self._watch.reset_has_news()
        self.hear()  # of those that have joined again already


def _since_met(entries: list[list[Any]]) -> list[list[Any]]:
    """Return what may still be news: when an operation that is allowed, and so needs everyone, is followed by another, everyone
    has taken part in it, and in all before it."""
    met = [place for place, entry in enumerate(entries[:-1]) if entry[-1]]
    return entries[met[-1] + 1 :] if met else entries


def _told(number: int, call: str, is_allowed: bool) -> list[Any]:
    """Return what is posted of an operation."""
    if isinstance(call, Call):
        given = json.dumps([call.verb, call.tensors, call.arguments], default=_in_words)
        return [number, str(call), *json.loads(given), is_allowed]
    return [number, call, "", [], {}, False]


def _in_words(value: object) -> Any:
    """Return what stands in JSON for a codec or a dtype."""
    if isinstance(value, Codec):
        settings: Any = value
        return [value.name, {field.name: getattr(value, field.name) for field in fields(settings)}]
    return str(value)
