"""The hub, to which every rank that arrives holds one connection. It admits processes, and forwards their reports.

The hub runs on a thread of one of the ranks. If a connection ends without a final message, the process at its other end
has ended, and the hub reports this to all other ranks.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gradwire.collectives.control.asking import POLL_S
from gradwire.collectives.control.handshake import MOST_UNVERIFIED, Arrived, Door, give_up_on_silence, listen
from gradwire.collectives.control.watch import Neighbour, poll_of
from gradwire.collectives.errors import LinkError, ranks_text

_log = logging.getLogger("gradwire")

#: How a process describes itself when it arrives: numbers, strings, and lists and dicts of them. Two keys are "rank" and "size",
#: the number of ranks that the process expects.
Card = dict[str, Any]

#: How long a rank may take to answer that it runs.
ANSWER_S = 0.5

#: How long a hub that closes waits until its last messages have been read.
_FLUSH_S = 0.2

_KEY_BYTES, _SECRET_BYTES = 16, 32


@dataclass(frozen=True)
class Failure:
    """The reason why ranks cannot connect. ranks: those at fault. why: the reason as text. ended: whether their processes have
    ended. timed_out: whether a deadline has passed."""

    ranks: tuple[int, ...]
    why: str
    ended: bool = False
    timed_out: bool = False

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Failure:
        """Return the Failure for an error on a rank: of the ranks that a LinkError names, else of this rank."""
        if isinstance(error, LinkError):
            return cls(tuple(sorted(error.awaited)), str(error), error.ended, error.timed_out)
        return cls((rank,), f"rank {rank} raised {type(error).__name__}: {error}")

    @classmethod
    def loss_of(cls, ranks: Collection[int]) -> Failure:
        """Return the Failure of ranks whose processes have ended."""
        return cls(tuple(sorted(ranks)), f"lost {ranks_text(ranks)}", ended=True)

    def as_link_error(self) -> LinkError:
        """Return the error that the other ranks raise for it."""
        return LinkError(None, timed_out=self.timed_out, detail=self.why, awaited=self.ranks, ended=self.ended)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Failure:
        """Return the Failure whose asdict() is a record."""
        return cls(tuple(record["ranks"]), record["why"], record["ended"], record["timed_out"])


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
    """Decides which processes a hub admits. This class admits the first process that arrives as each rank."""

    def judge(self, arriving: Card, members: Mapping[int, Card], *, is_complete: bool) -> Verdict:
        """Return the Verdict on a process that arrives. members: the cards of the admitted processes, by rank.
        is_complete: whether all ranks have been admitted before."""
        return Verdict(f"rank {arriving['rank']} has arrived already") if arriving["rank"] in members else Verdict()

    def settle_s(self, members: Mapping[int, Card]) -> float:
        """Return how many seconds a hub waits, once all ranks are admitted, for another process that claims the rank of one of
        them."""
        return 0.0


@dataclass
class _Inquiry:
    """A rank's inquiry which ranks do not answer. by: the rank's connection. until: time.monotonic() seconds. running:
    the ranks that have answered."""

    by: Neighbour
    until: float
    running: set[int] = field(default_factory=set)


class Hub:
    """Admits processes as ranks, forwards their reports, and reports which have ended. Runs on a separate thread.

    port: to which other processes connect. key: a random name. token: a secret with which the hub and other processes
    authenticate each other.
    """

    def __init__(self, card: Card, admission: Admission) -> None:
        """card: that of this process, with the address at which the hub listens. Raises OSError if it cannot listen there."""
        self._rank, self._size = card["rank"], card["size"]
        self._admission = admission
        self.key, self.token = secrets.token_hex(_KEY_BYTES), secrets.token_hex(_KEY_BYTES)
        listening = listen(card["address"], self._size + MOST_UNVERIFIED, small_segments=True)
        self.port: int = listening.getsockname()[1]
        self._door = Door(listening, self._rank, self.token.encode(), max(self._size, MOST_UNVERIFIED))
        self._arriving: dict[int, Neighbour] = {}
        self._members: dict[int, Neighbour] = {}
        self._cards: dict[int, Card] = {}
        self._gone: set[int] = set()
        self._sent_to_all: list[Card] = []
        self._is_complete = False
        self._complete_at: float | None = None
        self._inquiries: list[_Inquiry] = []
        self._serves = True
        self._thread = threading.Thread(target=self._serve, name="gradwire-hub", daemon=True)

    def start(self, here: socket.socket) -> None:
        """Begin to serve. here: the hub's end of a connection to this process itself."""
        self._arriving[here.fileno()] = Neighbour(here)
        self._thread.start()

    def join(self) -> None:
        """Wait briefly for the end of the hub's thread, after the end of the connection to this process itself."""
        self._thread.join(2 * _FLUSH_S)

    def disown(self) -> None:
        """Close this process's sockets. In a forked child, the parent's sockets stay open."""
        for neighbour in (*self._members.values(), *self._arriving.values()):
            neighbour.socket.close()
        self._door.close()

    def _serve(self) -> None:
        try:
            due_ms: float | None = None
            while self._serves:
                poll = poll_of(self._door.descriptors, (*self._arriving.values(), *self._members.values()))
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
        """Serve the connections that are ready. ready: their descriptors."""
        for arrived in self._door.look(ready):
            self._let_in(arrived)
        if self._door.socket.fileno() in ready:
            try:
                self._door.accept()
            except OSError:  # this process has no descriptor left
                time.sleep(POLL_S)
        for rank, neighbour in list(self._members.items()):
            if neighbour.socket.fileno() in ready:
                self._receive(rank, neighbour, neighbour.read)
        for descriptor, arriving in list(self._arriving.items()):
            if descriptor in ready:
                self._greet(descriptor, arriving)

    def _let_in(self, arrived: Arrived) -> None:
        """Take the connection of an authenticated process, unless its build of gradwire is another."""
        if arrived.error is None:
            give_up_on_silence(arrived.connection)
            self._arriving[arrived.connection.fileno()] = Neighbour(arrived.connection)
            return
        arrived.connection.close()  # it has seen our build, and raises the same error
        if not self._is_complete and arrived.rank not in self._members:
            self._fail(Failure.of(arrived.error, self._rank))

    def _greet(self, descriptor: int, arriving: Neighbour) -> None:
        """Admit or refuse a process, if its card has arrived."""
        try:
            messages, ended = arriving.read()
            if not messages and not ended:
                return
            del self._arriving[descriptor]
            if messages:
                self._admit(messages[0]["card"], arriving, messages[1:], ended)
            else:
                arriving.socket.close()
        except Exception:
            _log.exception("gradwire: the hub cannot admit a process")
            self._arriving.pop(descriptor, None)
            arriving.socket.close()

    def _admit(self, card: Card, arriving: Neighbour, messages: Sequence[Card], ended: bool) -> None:
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
        self._send_to_all({"kind": "failure", "scope": ""} | asdict(failure))

    def _do_what_is_due(self) -> float | None:
        """If it is time, send all ranks the cards, and answer inquiries. Return the milliseconds until the next such
        time, or None."""
        now = time.monotonic()
        if self._complete_at is not None and now >= self._complete_at:
            self._is_complete, self._complete_at = True, None
            cards = [self._cards[rank] | {"identity": None} for rank in range(self._size)]
            secret = secrets.token_hex(_SECRET_BYTES)
            self._send_to_all({"kind": "all", "key": self.key, "secret": secret, "cards": cards})
        for inquiry in list(self._inquiries):
            silent = sorted(set(range(self._size)) - inquiry.running - self._gone)
            if not silent or now >= inquiry.until:
                self._inquiries.remove(inquiry)
                inquiry.by.say(kind="silent", ranks=silent)
        due = [inquiry.until for inquiry in self._inquiries]
        due += [at for at in (self._complete_at, self._door.due()) if at is not None]
        return max(0.0, min(due) - now) * 1000 + 1 if due else None

    def _receive(self, rank: int, neighbour: Neighbour, read: Callable[[], tuple[Sequence[Card], bool]]) -> None:
        """Take a rank's messages. Bytes that cannot be read end its connection only."""
        try:
            neighbour.write()
            self._take(rank, neighbour, *read())
        except Exception:
            _log.exception("gradwire: the hub cannot read the messages of rank %d", rank)
            self._lose(rank, neighbour)

    def _take(self, rank: int, neighbour: Neighbour, messages: Sequence[Card], ended: bool) -> None:
        """Take a rank's messages, and note whether its connection has ended."""
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
                self._send_to_all(message)
        if ended:
            self._lose(rank, neighbour)

    def _lose(self, rank: int, neighbour: Neighbour) -> None:
        """Close the connection of a rank, and report that it has ended, unless it has left."""
        del self._members[rank]
        self._complete_at = None
        neighbour.socket.close()
        self._serves = self._serves and rank != self._rank
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
