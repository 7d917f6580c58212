"""The Coordinator, to which every rank that arrives holds one connection. It admits processes, and forwards their reports.

The Coordinator runs on the thread of the Monitor of one of the ranks. Until all ranks are connected to each other, it reports
to them which have ended: a connection ends without a final message when the process at its other end does.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gradwire.collectives.control.channel import Failure
from gradwire.collectives.control.handshake import Arrived, give_up_on_silence
from gradwire.collectives.control.neighbour import Neighbour
from gradwire.collectives.control.records import Connection
from gradwire.collectives.errors import ForgedMessage

_log = logging.getLogger("gradwire")

#: How a process describes itself when it arrives: numbers, strings, and lists and dicts of them. Two keys are "rank" and "size",
#: the number of ranks that the process expects.
Card = dict[str, Any]

#: How long a Coordinator that ends waits until its last messages have been read.
_FLUSH_S = 0.2

_KEY_BYTES = 16


@dataclass(frozen=True)
class Verdict:
    """A decision about a process that arrives. refused: the reason not to admit it; None to admit it. again: whether a
    refused process may try again. evicted: by rank, the reason to close the connection of a process admitted before.
    fatal: the reason why no rank can continue; None if there is none."""

    refused: str | None = None
    again: bool = False
    evicted: Mapping[int, str] = field(default_factory=dict)
    fatal: Failure | None = None


class Admission:
    """Decides which processes a Coordinator admits. This class admits the first process that arrives as each rank."""

    def judge(self, arriving: Card, members: Mapping[int, Card], *, is_complete: bool) -> Verdict:
        """Return the Verdict on a process that arrives. members: the cards of the admitted processes, by rank.
        is_complete: whether all ranks have been admitted before."""
        return Verdict(f"rank {arriving['rank']} has arrived already") if arriving["rank"] in members else Verdict()

    def settle_s(self, members: Mapping[int, Card]) -> float:
        """Return how many seconds a Coordinator waits, once all ranks are admitted, for another process that claims the rank of
        one of them."""
        return 0.0


class Coordinator:
    """Admits processes as ranks, forwards their reports, and reports which have ended. Only the Monitor's thread calls it, after
    the first add().

    key: a random name. token: a secret with which the processes authenticate each other.
    """

    def __init__(self, card: Card, admission: Admission) -> None:
        """card: that of this process."""
        self._rank, self._size = card["rank"], card["size"]
        self._admission = admission
        self.key, self.token = secrets.token_hex(_KEY_BYTES), secrets.token_hex(_KEY_BYTES)
        self._arriving: dict[int, Neighbour] = {}
        self._members: dict[int, Neighbour] = {}
        self._cards: dict[int, Card] = {}
        self._gone: set[int] = set()
        self._sent_to_all: list[Card] = []
        self._is_complete = False
        self._complete_at: float | None = None

    @property
    def neighbours(self) -> list[Neighbour]:
        """Return all connections."""
        return [*self._arriving.values(), *self._members.values()]

    def add(self, connection: Connection) -> None:
        """Take a new connection of a process, which then sends its card."""
        self._arriving[connection.fileno()] = Neighbour(connection)

    def let_in(self, arrived: Arrived) -> None:
        """Take the connection of an authenticated process, unless its build of gradwire is another."""
        if arrived.error is None:
            give_up_on_silence(arrived.connection)
            self.add(arrived.connection)
            return
        arrived.connection.close()  # it has seen our build, and raises the same error
        if not self._is_complete and arrived.rank not in self._members:
            self._fail(Failure.of(arrived.error, self._rank))

    def serve(self, ready: Collection[int]) -> float:
        """Serve the connections whose descriptors are ready, and do what is due. Return the
        time.monotonic() at which something is due next."""
        for rank, neighbour in list(self._members.items()):
            if neighbour.socket.fileno() in ready:
                self._receive(rank, neighbour, neighbour.read)
        for descriptor, arriving in list(self._arriving.items()):
            if descriptor in ready:
                self._greet(descriptor, arriving)
        if self._complete_at is not None and time.monotonic() >= self._complete_at:
            self._is_complete, self._complete_at = True, None
            cards = [self._cards[rank] | {"identity": None} for rank in range(self._size)]
            self._send_to_all({"kind": "all", "key": self.key, "cards": cards})
        return math.inf if self._complete_at is None else self._complete_at

    def flush(self) -> None:
        """Wait briefly until the last messages have been sent."""
        flush_by = time.monotonic() + _FLUSH_S
        while any(each.outgoing for each in self._members.values()) and time.monotonic() < flush_by:
            for neighbour in self._members.values():
                neighbour.write()
            time.sleep(_FLUSH_S / 40)

    def disown(self) -> None:
        """Close this process's sockets. In a forked child, the parent's sockets stay open."""
        for neighbour in self.neighbours:
            neighbour.socket.close()

    def _greet(self, descriptor: int, arriving: Neighbour) -> None:
        """Admit or refuse a process, if its card has arrived."""
        try:
            messages, ended = arriving.read()
            if not messages and not ended:
                return
            del self._arriving[descriptor]
            if messages:
                self._admit(json.loads(messages[0])["card"], arriving, messages[1:], ended)
            else:
                arriving.socket.close()
        except Exception:
            _log.exception("gradwire: the coordinator cannot admit a process")
            self._arriving.pop(descriptor, None)
            arriving.socket.close()

    def _admit(self, card: Card, arriving: Neighbour, messages: Sequence[bytes], ended: bool) -> None:
        """Admit or refuse a process. messages, ended: what follows its card."""
        rank = card["rank"]
        verdict = self._verdict(card)
        for evicted, why in verdict.evicted.items():
            if (member := self._members.pop(evicted, None)) is not None:  # it may have ended
                _refuse(member, why, again=False)
            del self._cards[evicted]
        if verdict.refused is not None:
            _refuse(arriving, verdict.refused, again=verdict.again)
        else:
            self._members[rank], self._cards[rank] = arriving, card
            arriving.say(kind="admitted")
            for message in self._sent_to_all:
                arriving.say(**message)
        if verdict.fatal is not None:
            self._fail(verdict.fatal)
        self._complete_at = None
        if len(self._members) == self._size and not self._is_complete:
            self._complete_at = time.monotonic() + self._admission.settle_s(self._cards)
        if verdict.refused is None:
            self._receive(rank, arriving, lambda: (messages, ended))

    def _verdict(self, card: Card) -> Verdict:
        """Return the Verdict on a process that arrives. One of the same job that expects another number of ranks is refused, and
        all ranks fail, unless the world has begun."""
        rank, size = card["rank"], card["size"]
        verdict = self._admission.judge(card, self._cards, is_complete=self._is_complete)
        if size == self._size or (verdict.refused is not None and not verdict.again):
            return verdict
        here, there = f"rank {self._rank} expects {self._size} ranks", f"rank {rank} on host {card['name']} {size}"
        why = f"{here}, and {there}: give all ranks the same WORLD_SIZE"
        if self._is_complete:
            _log.warning("gradwire: refused a process: %s", why)
        return Verdict(why, fatal=None if self._is_complete else Failure(tuple(sorted({self._rank, rank})), why))

    def _fail(self, failure: Failure) -> None:
        """Report to all ranks that they cannot connect."""
        self._send_to_all({"kind": "failure"} | asdict(failure))

    def _receive(self, rank: int, neighbour: Neighbour, read: Callable[[], tuple[Sequence[bytes], bool]]) -> None:
        """Take a rank's messages. Bytes that cannot be read end its connection only."""
        try:
            neighbour.write()
            self._take(rank, neighbour, *read())
        except Exception:
            _log.exception("gradwire: the coordinator cannot read the messages of rank %d", rank)
            self._lose(rank, neighbour)

    def _take(self, rank: int, neighbour: Neighbour, messages: Sequence[bytes], ended: bool) -> None:
        """Take a rank's messages, and note whether its connection has ended."""
        for message in map(json.loads, messages):
            if message["kind"] == "left":
                self._note_gone(rank, left=True)
            else:
                self._send_to_all(message)
        if ended:
            if neighbour.is_forged:
                self._fail(Failure.of(ForgedMessage(rank, self._rank), self._rank))
            self._lose(rank, neighbour)

    def _lose(self, rank: int, neighbour: Neighbour) -> None:
        """Close the connection of a rank, and report that it has ended, unless it has left."""
        del self._members[rank]
        self._complete_at = None
        neighbour.socket.close()
        self._note_gone(rank, left=False)

    def _note_gone(self, rank: int, *, left: bool) -> None:
        if rank not in self._gone:
            self._gone.add(rank)
            self._send_to_all({"kind": "gone", "rank": rank, "left": left})

    def _send_to_all(self, message: Card) -> None:
        """Send a message to all ranks, and keep it for ranks that arrive later."""
        self._sent_to_all.append(message)
        for neighbour in self._members.values():
            neighbour.say(**message)


def _refuse(neighbour: Neighbour, why: str, *, again: bool) -> None:
    neighbour.say(kind="refused", why=why, again=again)
    neighbour.socket.close()
