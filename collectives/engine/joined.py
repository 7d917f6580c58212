"""The ranks that have joined: they have no more data, and contribute zeros to the operations that the other ranks still call.

A joined rank does not know the next call of the other ranks, so they send each call as news while any rank has joined. Before
that, they send nothing, and an operation only checks Watch.has_news. `gradwire.collectives.absence` runs the operations of a
joined rank.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any

from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.control.watch import Watch

_JOINED, _CALLS = "joined", "calls for those who have joined"


class DescribedCall(str):
    """The text of a call, the same on all ranks, with the data that a joined rank needs to make the same call with zeros.

    verb: a method of Communicator. tensors: its tensors, each as shape, dtype and kind of device. joinable: whether the result
    is correct if some rank contributes zeros. arguments: the verb's other arguments, by name.
    """

    __slots__ = ("arguments", "joinable", "tensors", "verb")
    verb: str
    tensors: Sequence[Any]
    joinable: bool
    arguments: dict[str, Any]

    def __new__(
        cls, text: str, verb: str, tensors: Sequence[Any] = (), joinable: bool = False, **arguments: Any
    ) -> DescribedCall:
        call = super().__new__(cls, text)
        call.verb, call.tensors, call.joinable, call.arguments = verb, tensors, joinable, arguments
        return call

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)  # a copy and a pickle are the plain text


class Joined:
    """The ranks of one Communicator that have joined, and the announcements of the other ranks to them.

    A round of joins ends when all ranks have joined. Attributes: allows, returns whether a joined rank may take part in a call;
    refused, the number of the last operation in which a joined rank may not; absent, the ranks that had joined before it;
    on_change, which the Watch's thread calls after each piece of news.
    """

    def __init__(self, watch: Watch) -> None:
        self.allows: Callable[[str], bool] = lambda call: isinstance(call, DescribedCall) and call.joinable
        self.refused = -1
        self.absent: tuple[int, ...] = ()
        self.on_change: Callable[[], object] | None = None
        self._watch = watch
        self._round = 0  # how many rounds have ended
        self._announced = -1
        self._lock = threading.Lock()
        self._missed: list[list[Any]] = []  # announced, and perhaps not received yet
        self._begun = 0  # the number of the first operation of this round

    def announce(self, sequence: int, calls: Iterable[tuple[int, str]]) -> None:
        """Announce this rank's running operation once to the ranks that joined before it.

        calls: the last operations that began, with their numbers. A rank that only sends may be several operations ahead of a
        joined rank.
        """
        with self._lock:  # the calling thread and the Watch's may both run this
            if sequence == self._announced or not (joined := self.ranks()) or self._watch.rank in joined:
                return
            absent = tuple(sorted(rank for rank, (first, _) in joined.items() if first <= sequence))
            if not absent:
                return
            first = min(joined[rank][0] for rank in absent)
            announced = max([first - 1, *(entry[0] for entry in self._missed)])
            news = [
                _entry_of(number, call, self.allows(call))
                for number, call in sorted(calls)
                if announced < number <= sequence
            ]
            self._missed = _since_met([entry for entry in self._missed if entry[0] >= first] + news)
            if not self._missed:  # the operation has ended meanwhile
                return
            if not self._missed[-1][-1]:
                self.absent, self.refused = absent, sequence
            self._announced = sequence
            self._watch.post(_CALLS, [self._round, self._missed])

    def note_news(self) -> None:
        """Set has_news if a rank has joined, so that every operation is announced. Call on_change."""
        if self.ranks():
            self._watch.has_news = True
        if self.on_change is not None:
            self.on_change()

    def join(self, first: int, time_s: float) -> None:
        """Post that this rank contributes zeros from operation `first` on. time_s: seconds since the epoch."""
        self._watch.post(_JOINED, [self._round + 1, first, [first - self._begun, time_s]])

    def ranks(self) -> dict[int, tuple[int, list[float]]]:
        """Return the ranks that have joined in this round. The value of each is the number of the first operation without its
        data, and its time of joining: operations since the round began, and seconds since the epoch by its own clock."""
        posted = list(self._watch.posts.get(_JOINED, {}).items())
        return {rank: (first, late) for rank, (number, first, late) in posted if number > self._round}

    def missed(self) -> dict[int, list[list[Any]]]:
        """Return by rank the operations in its last announcement of this round, each as number, text, verb, tensors, arguments,
        and whether a joined rank may take part."""
        posted = list(self._watch.posts.get(_CALLS, {}).items())
        return {rank: missed for rank, (number, missed) in posted if number == self._round}

    def resume(self, first: int) -> None:
        """End the round before operation `first`, when all ranks have joined and none needs the announcements any more."""
        self._round += 1
        self._begun = first
        self.on_change = None
        self._watch.reset_has_news()
        self.note_news()  # some may have joined the next round already


def _since_met(entries: list[list[Any]]) -> list[list[Any]]:
    """Return the entries that some rank may still need. An allowed operation needs all ranks, so if another operation follows
    it, all ranks have taken part in it and in all before it."""
    met = [place for place, entry in enumerate(entries[:-1]) if entry[-1]]
    return entries[met[-1] + 1 :] if met else entries


def _entry_of(number: int, call: str, is_allowed: bool) -> list[Any]:
    """Return the entry of an operation in a post."""
    if isinstance(call, DescribedCall):
        given = json.dumps([call.verb, call.tensors, call.arguments], default=_as_json)
        return [number, str(call), *json.loads(given), is_allowed]
    return [number, call, "", [], {}, False]


def _as_json(value: object) -> Any:
    """Return a codec or a dtype as a value that JSON can hold."""
    if isinstance(value, Codec):
        settings: Any = value
        return [value.name, {field.name: getattr(value, field.name) for field in fields(settings)}]
    return str(value)
