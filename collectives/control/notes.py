"""What ranks leave in the store while they arrive: where the Coordinator listens, and why a rank has failed before it reached it.

Several attempts to arrive may share a store. The key of its Coordinator names an attempt. Before there is one, the number of a
rank's attempt does, which is the same on all ranks that have tried equally often.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gradwire.collectives.control.build import build
from gradwire.collectives.control.channel import Failure
from gradwire.collectives.control.coordinator import Card
from gradwire.collectives.control.key import SEALED
from gradwire.collectives.control.texts import A_KEY, ANOTHER_KEY, NO_KEY, UNUSABLE_KEY, StrangeText, Texts
from gradwire.collectives.environment import KEY_FILE
from gradwire.collectives.errors import LinkError

#: As in release 0.2, whose ranks and those of this version fail at once when they find the record of the other.
_KEY = "hub"
_MAGIC = "gradwire-coordinator"

#: How the keys of two ranks differ.
_DIFFERENCES = {
    NO_KEY: "rank {} has no key, and rank {} has one",
    A_KEY: "rank {} has a key, and rank {} has none",
    ANOTHER_KEY: "rank {} has another key than rank {}, or is of another job, run or meeting",
}
#: How the text of a Coordinator's place begins, also an encrypted one: it names its rank, and others can replace the number.
_WRITER = re.compile(rf"(?:{_MAGIC}|{SEALED}) (\d{{1,9}}) ")


@dataclass(frozen=True)
class CoordinatorPlace:
    """Where a Coordinator listens. rank: that of its process. port: 0 if it cannot listen. key: a random name. token: the
    secret with which processes and the Coordinator authenticate each other. number: of the attempt of its rank. build: of
    gradwire there. text: the Card of its process, as JSON, for processes with the same build only. written: this place as the
    store holds it."""

    rank: int
    address: str
    port: int
    key: str
    token: str
    number: int
    build: str
    text: str
    written: bytes = field(default=b"", repr=False)

    @classmethod
    def of(cls, card: Card, port: int, key: str, token: str, number: int = 1) -> CoordinatorPlace:
        """Return the place of a Coordinator in this process. card: that of this process."""
        return cls(card["rank"], card["address"] or "-", port, key, token, number, build(), json.dumps(card))

    def to_text(self) -> str:
        """Return the text for the store. Its first line has the same format in all versions of gradwire."""
        fields = (_MAGIC, self.rank, self.address, self.port, self.key, self.token, self.number, self.build)
        return " ".join(map(str, fields)) + "\n" + self.text

    @classmethod
    def from_text(cls, text: str) -> CoordinatorPlace:
        """Return the place whose to_text() is a text. Raises LinkError for any other text."""
        line, _, card = text.partition("\n")
        try:
            magic, rank, address, port, key, token, number, name = line.split(" ", 7)
            if magic == _MAGIC:
                return cls(int(rank), address, int(port), key, token, int(number), name, card)
        except ValueError:
            pass
        detail = f"the store names a coordinator in a form that {build()} does not know: is another version installed on a host?"
        raise LinkError(None, timed_out=False, detail=detail)

    @property
    def card(self) -> Card:
        """Return the Card of the Coordinator's process."""
        card: Card = json.loads(self.text)
        return card


def _of_keys(rank: int, difference: str, coordinator_rank: int) -> Failure:
    """Return the Failure of a rank whose key differs from that of the Coordinator's rank. difference: see Texts.refuse()."""
    if difference == UNUSABLE_KEY:
        return _unusable_on(rank)
    why = _DIFFERENCES[difference].format(rank, coordinator_rank)
    return Failure(tuple(sorted({rank, coordinator_rank})), f"{why}: set {KEY_FILE} to the same key everywhere")


def _unusable_on(rank: int) -> Failure:
    """Return the Failure of a rank that cannot use its key."""
    return Failure((rank,), f"rank {rank} cannot use its key: its own error says why")


class Notes:
    """Reads and writes the notes of one rank. texts: in the store. ask: calls the store, as Asking.ask with a deadline. left: the
    keys of Coordinators that the rank ignores. number: of its attempt."""

    def __init__(
        self, texts: Texts, ask: Callable[[Callable[[], Any]], Any], left: Container[str] = (), number: int = 1
    ) -> None:
        self._texts, self._ask, self._left = texts, ask, left
        self._missed = f"missed/{number}"

    def coordinator(self) -> CoordinatorPlace | None:
        """Return the newest Coordinator's place; None without one that this process has not left. Raises LinkError if the key of
        its rank differs; the Coordinator's rank can then read that too."""
        written = self._ask(lambda: self._texts.written(_KEY))
        place = None if written is None else self._place_in(written)
        return None if place is None or place.key in self._left else place

    def publish(self, place: CoordinatorPlace, *, replaces: bool) -> CoordinatorPlace:
        """Write where a Coordinator listens, and return the place that ranks will find. replaces: whether it replaces another one
        in the store; if not, the first one stays. Raises as coordinator()."""
        write = self._texts.write if replaces else self._texts.write_first
        return self._place_in(self._ask(lambda: write(_KEY, place.to_text())))

    def failure(self, place: CoordinatorPlace) -> Failure | None:
        """Return the first failure of a rank that did not come to the Coordinator at the place that this rank has found; None
        without one."""
        return self._failure(f"failure/{place.key}") or self._refusal_of(place)

    def refusal(self, place: CoordinatorPlace) -> Failure | None:
        """Return the failure of a rank that could not read the place that this rank has found, or would find none, because of its
        key; None without one. Anyone who can write to the store can write it."""
        return self._refusal_of(place) or self._unusable()

    def failure_without_coordinator(self) -> Failure | None:
        """Return the first failure of a rank that found no Coordinator in this attempt; None without one. Anyone who can write
        to the store can write that a rank cannot use its key."""
        return self._failure(self._missed) or self._unusable()

    def leave(self, failure: Failure, found: CoordinatorPlace | None) -> None:
        """Write why this rank has failed. found: the Coordinator that it has found; None for a rank that looked for one."""
        if found is None:
            self._write(self._missed, failure)  # first: a Coordinator that is published later reads it
            found = self.coordinator()
        if found is not None:
            self._write(f"failure/{found.key}", failure)

    def refuse(self) -> None:
        """Write that this rank cannot use its key, so that it can read and leave() nothing."""
        self._ask(lambda: self._texts.refuse(self._missed, b"", UNUSABLE_KEY))  # first, as in leave()
        if (written := self._ask(lambda: self._texts.written(_KEY))) is not None:
            self._ask(lambda: self._texts.refuse(_KEY, written, UNUSABLE_KEY))

    def _place_in(self, written: bytes) -> CoordinatorPlace:
        """Return the place that the store holds. Raises as coordinator()."""
        try:
            text = self._texts.open(_KEY, written)
        except StrangeText as error:
            if (writer := _WRITER.match(error.text)) is None or int(writer[1]) not in range(self._texts.size):
                raise
            difference = error.difference
            self._ask(lambda: self._texts.refuse(_KEY, written, difference))
            raise _of_keys(self._texts.rank, difference, int(writer[1])).as_link_error() from None
        return replace(CoordinatorPlace.from_text(text), written=written)

    def _refusal_of(self, place: CoordinatorPlace) -> Failure | None:
        refusal = self._ask(lambda: self._texts.refusal(_KEY, place.written))
        return None if refusal is None else _of_keys(refusal[0], refusal[1], place.rank)

    def _unusable(self) -> Failure | None:
        """Return the failure of a rank that cannot use its key, and has said so before there was a Coordinator."""
        refusal = self._ask(lambda: self._texts.refusal(self._missed, b""))
        return None if refusal is None else _unusable_on(refusal[0])

    def _failure(self, key: str) -> Failure | None:
        try:
            text = self._ask(lambda: self._texts.read(key))
        except StrangeText:  # no rank of this job has failed
            return None
        return None if text is None else Failure.from_record(json.loads(text))

    def _write(self, key: str, failure: Failure) -> None:
        self._ask(lambda: self._texts.write_first(key, json.dumps(asdict(failure))))
