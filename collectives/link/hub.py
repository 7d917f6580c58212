"""The hub, to which every rank that arrives holds one connection: it admits processes, and passes on what they report.

The hub runs on a thread of one of the ranks. A connection that ends without a goodbye means that the process at its other end
has ended, and the hub reports that to all others.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from gradwire.collectives.errors import LinkError, ranks_text
from gradwire.collectives.link.handshake import MOST_STRANGERS, give_up_on_silence, listen, set_up
from gradwire.collectives.link.watch import Neighbour, poll_of

#: What a process says of itself when it arrives: numbers, strings, and lists and dicts of them; "rank" among them.
Card = dict[str, Any]

#: How long a rank may take to answer whether it runs.
ANSWER_S = 0.5

#: How long the hub waits when it cannot accept a connection.
_LOOK_AGAIN_S = 0.02

#: How long a hub that closes waits until its last messages have been read.
_FLUSH_S = 0.2

_SECRET_BYTES = 32


@dataclass(frozen=True)
class Failure:
    """Says why ranks cannot connect. ranks: those at fault. why: in words, what keeps them. ended: whether their processes have
    ended. timed_out: whether a deadline has passed."""

    ranks: tuple[int, ...]
    why: str
    ended: bool = False
    timed_out: bool = False

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Failure:
        """Return what an error, raised on this rank, says of the others, or of this rank itself."""
        if isinstance(error, LinkError):
            return cls(tuple(sorted(error.awaited)), str(error), error.ended, error.timed_out)
        return cls((rank,), f"rank {rank} raised {type(error).__name__}: {error}")

    @classmethod
    def loss_of(cls, ranks: Collection[int]) -> Failure:
        """Return that of ranks whose processes have ended."""
        return cls(tuple(sorted(ranks)), f"lost {ranks_text(ranks)}", ended=True)

    def as_link_error(self) -> LinkError:
        """Return the error for it on the other ranks."""
        return LinkError(None, timed_out=self.timed_out, detail=self.why, awaited=self.ranks, ended=self.ended)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Failure:
        """Return what a record holds, as asdict makes it."""
        return cls(tuple(record["ranks"]), record["why"], record["ended"], record["timed_out"])


@dataclass(frozen=True)
class Verdict:
    """Says what a hub does when a process arrives. refused: why it turns this process away; None where it admits it. again:
    whether the process may try again. evicted: by rank, why the hub now turns away a process that it has admitted before. fatal:
    why no rank can go on."""

    refused: str | None = None
    again: bool = False
    evicted: Mapping[int, str] = field(default_factory=dict)
    fatal: Failure | None = None


class Admission:
    """Decides which processes a hub admits: here the first that arrives as each rank."""

    def judge(self, arriving: Card, members: Mapping[int, Card], *, is_complete: bool) -> Verdict:
        """Return what to do when a process arrives. members: the cards of the admitted ones, by rank. is_complete: whether all
        ranks have been admitted at once."""
        return Verdict(f"rank {arriving['rank']} has arrived already") if arriving["rank"] in members else Verdict()

    def settle_s(self, members: Mapping[int, Card]) -> float:
        """Return for how many seconds a hub waits for another process that may claim the place of one of these."""
        return 0.0


@dataclass
class _Inquiry:
    """Asks which ranks do not answer. by: the rank that asks. until: time.monotonic() seconds. running: who has answered."""

    by: Neighbour
    until: float
    running: set[int] = field(default_factory=set)


class Hub:
    """Admits processes, each as a rank, and passes on what they report and that they have ended, on a thread of its own.

    card: by which other processes find it.
    """

    def __init__(self, card: Card, size: int, admission: Admission) -> None:
        """card: of this process, with a new "key" and "token". Raises OSError where its address cannot be listened on."""
        self._size = size
        self._admission = admission
        self._listener = listen(card["address"], size + MOST_STRANGERS, small_segments=True)
        self.card = card | {"port": self._listener.getsockname()[1]}
        self._strangers: dict[int, Neighbour] = {}
        self._members: dict[int, Neighbour] = {}
        self._cards: dict[int, Card] = {}
        self._gone: set[int] = set()
        self._said: list[Card] = []
        self._is_complete = False
        self._complete_at: float | None = None
        self._inquiries: list[_Inquiry] = []
        self._serves = True
        self._thread = threading.Thread(target=self._serve, name="gradwire-hub", daemon=True)

    def start(self, here: socket.socket) -> None:
        """Begin to serve. here: a connection to this process itself, beside those that will be made."""
        self._strangers[here.fileno()] = Neighbour(here)
        self._thread.start()

    def join(self) -> None:
        """Wait until all connections have ended, as they do soon after that to this process itself."""
        self._thread.join(2 * _FLUSH_S)

    def disown(self) -> None:
        """Close this process's sockets; those of the rank that forked it stay open."""
        for neighbour in (*self._members.values(), *self._strangers.values()):
            neighbour.socket.close()
        self._listener.close()

    def _serve(self) -> None:
        try:
            due_ms: float | None = None
            while self._serves:
                poll = poll_of(self._listener, (*self._strangers.values(), *self._members.values()))
                self._look({descriptor for descriptor, _ in poll.poll(due_ms)})
                due_ms = self._do_what_is_due()
            flush_by = time.monotonic() + _FLUSH_S
            while any(each.outgoing for each in self._members.values()) and time.monotonic() < flush_by:
                for neighbour in self._members.values():
                    neighbour.write()
                time.sleep(_FLUSH_S / 40)
        finally:
            self.disown()

    def _look(self, ready: set[int]) -> None:
        """Read and write what can be. ready: descriptors."""
        if self._listener.fileno() in ready:
            self._accept()
        for rank, neighbour in list(self._members.items()):
            if neighbour.socket.fileno() in ready:
                self._hear(rank, neighbour)
        for descriptor, stranger in list(self._strangers.items()):
            if descriptor in ready:
                self._meet(descriptor, stranger)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has ended already, or this process has no descriptor left
            time.sleep(_LOOK_AGAIN_S)
            return
        connection.setblocking(False)
        set_up(connection)
        give_up_on_silence(connection)
        self._strangers[connection.fileno()] = Neighbour(connection)
        if len(self._strangers) > MOST_STRANGERS:
            self._strangers.pop(next(iter(self._strangers))).socket.close()

    def _meet(self, descriptor: int, stranger: Neighbour) -> None:
        """Admit a process, or turn it away, once it has said who it is."""
        card: Card | None = None
        with suppress(ValueError):  # raised where a program of another kind has connected
            messages, ended = stranger.read()
            if not messages and not ended:
                return
            card = None if ended else self._card_of(messages)
        del self._strangers[descriptor]
        if card is None:
            stranger.socket.close()
            return
        verdict = self._admission.judge(card, self._cards, is_complete=self._is_complete)
        for rank, why in verdict.evicted.items():
            _refuse(self._members.pop(rank), why, again=False)
            del self._cards[rank]
        if verdict.refused is not None:
            _refuse(stranger, verdict.refused, again=verdict.again)
        else:
            self._members[card["rank"]], self._cards[card["rank"]] = stranger, card
            for message in self._said:
                stranger.say(**message)
        if verdict.fatal is not None:
            self._tell({"kind": "failure", "scope": ""} | asdict(verdict.fatal))
        self._complete_at = None
        if len(self._members) == self._size and not self._is_complete:
            self._complete_at = time.monotonic() + self._admission.settle_s(self._cards)

    def _card_of(self, messages: Sequence[Card]) -> Card | None:
        """Return the card with which a process arrives; None for anything else that may have connected."""
        with suppress(AttributeError, IndexError, KeyError, TypeError):  # raised by what another program has sent
            card: Card = messages[0]["card"]
            if hmac.compare_digest(messages[0]["token"], self.card["token"]) and card["rank"] in range(self._size):
                return card
        return None

    def _do_what_is_due(self) -> float | None:
        """Complete the meeting and answer inquiries where it is time to; return in how many milliseconds to look again."""
        now = time.monotonic()
        if self._complete_at is not None and now >= self._complete_at:
            self._is_complete, self._complete_at = True, None
            cards = [self._cards[rank] | {"identity": None} for rank in range(self._size)]
            secret = secrets.token_hex(_SECRET_BYTES)
            self._tell({"kind": "all", "key": self.card["key"], "secret": secret, "cards": cards})
        for inquiry in list(self._inquiries):
            silent = sorted(set(range(self._size)) - inquiry.running - self._gone)
            if not silent or now >= inquiry.until:
                self._inquiries.remove(inquiry)
                inquiry.by.say(kind="silent", ranks=silent)
        due = [inquiry.until for inquiry in self._inquiries]
        due += [] if self._complete_at is None else [self._complete_at]
        return max(0.0, min(due) - now) * 1000 + 1 if due else None

    def _hear(self, rank: int, neighbour: Neighbour) -> None:
        neighbour.write()
        messages, ended = neighbour.read()
        for message in messages:
            if message["kind"] == "who is silent":
                self._inquiries.append(_Inquiry(neighbour, time.monotonic() + ANSWER_S))
                for member in self._members.values():
                    member.say(kind="do you run")
            elif message["kind"] == "runs":
                for inquiry in self._inquiries:
                    inquiry.running.add(rank)
            elif message["kind"] == "left":
                self._note_gone(rank, left=True)
            else:
                self._tell(message)
        if ended:
            del self._members[rank]
            self._complete_at = None
            neighbour.socket.close()
            self._serves = self._serves and rank != self.card["rank"]
            self._note_gone(rank, left=False)

    def _note_gone(self, rank: int, *, left: bool) -> None:
        if rank not in self._gone:
            self._gone.add(rank)
            self._tell({"kind": "gone", "rank": rank, "left": left})

    def _tell(self, message: Card) -> None:
        """Pass a message on to all ranks, and to those that arrive later."""
        self._said.append(message)
        for neighbour in self._members.values():
            neighbour.say(**message)


def _refuse(neighbour: Neighbour, why: str, *, again: bool) -> None:
    neighbour.say(kind="refused", why=why, again=again)
    neighbour.socket.close()
