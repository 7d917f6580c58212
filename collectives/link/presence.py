"""Which ranks have arrived to connect, whether their processes still run, and what keeps one of them from connecting.

A Watch does this for the ranks of a Communicator, but only once they are connected. Until then every rank holds one connection
to a hub, which runs on a thread of one of the ranks and leaves its address in the store. A connection that ends without a
goodbye means that the process at its other end has ended, and the hub passes that on, as it does what ranks report.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import select
import socket
import threading
import time
import weakref
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from torch.distributed.distributed_c10d import Store

from gradwire.collectives.errors import LinkError, ranks_text
from gradwire.collectives.link.asking import Asking
from gradwire.collectives.link.handshake import OWN_FAULTS, give_up_on_silence, set_up
from gradwire.collectives.link.own_address import check_addresses
from gradwire.collectives.link.paths import send_small_segments
from gradwire.collectives.link.watch import Neighbour

#: What a process says of itself when it arrives: numbers, strings, and lists and dicts of them; "rank" among them.
Card = dict[str, Any]

#: How long to wait before the store is asked again whether there is a hub, or whether a rank has left a failure there.
_LOOK_AGAIN_S = 0.02

#: What a rank may take to answer whether it runs.
_ANSWER_S = 0.5

#: How long a hub that closes waits until its last messages have been read.
_FLUSH_S = 0.2

#: How many connections may at a time be about to say whose they are.
_MOST_STRANGERS = 256

_HUB = "hub"
_KEY_BYTES, _SECRET_BYTES = 16, 32


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

    def as_link_error(self) -> LinkError:
        """Return the error for it on the other ranks."""
        return LinkError(None, timed_out=self.timed_out, detail=self.why, awaited=self.ranks, ended=self.ended)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Failure:
        """Return what a record holds, as asdict makes it."""
        return cls(tuple(record["ranks"]), record["why"], record["ended"], record["timed_out"])


@dataclass(frozen=True)
class Verdict:
    """Says what a hub does when a process arrives. refused: why this process is turned away; None where it is let in.
    again: whether it may try again. evicted: by rank, why a process that was let in before is turned away now. fatal: why no rank
    can go on."""

    refused: str | None = None
    again: bool = False
    evicted: Mapping[int, str] | None = None
    fatal: Failure | None = None


class Admission:
    """Decides which processes are let in: here the first that arrives as each rank."""

    def judge(self, arriving: Card, members: Mapping[int, Card], *, is_complete: bool) -> Verdict:
        """Return what to do when a process arrives. members: the cards of those that are in, by rank. is_complete: whether all
        have been in at once."""
        return Verdict(f"rank {arriving['rank']} has arrived already") if arriving["rank"] in members else Verdict()

    def settle_s(self, members: Mapping[int, Card]) -> float:
        """Return for how many seconds a hub waits for another process that may claim the place of one of these."""
        return 0.0


class TurnedAway(LinkError):
    """Tells the process of a rank that the hub turns it away, and why. again: whether it may try again."""

    def __init__(self, rank: int, why: str, *, again: bool) -> None:
        super().__init__(rank, timed_out=False, detail=why)
        self.again = again


class Presence:
    """What this rank knows of the ranks that have arrived with it. What nobody uses any more is closed.

    cards: of all ranks, by rank, once all have arrived. key, secret: a name and a secret (hexadecimal digits) that the hub drew
    for these ranks alone.
    """

    def __init__(self, rank: int, hub_rank: int, connection: socket.socket, hub: Hub | None = None) -> None:
        """connection: to the hub; it belongs to the Presence from now on. hub: where it runs in this process."""
        self.rank = rank
        self.cards: list[Card] = []
        self.key = self.secret = ""
        self._hub_rank = hub_rank
        self._hub = hub
        self._neighbour = Neighbour(connection)
        self._ended_ranks: set[int] = set()
        self._left: set[int] = set()
        self._failures: dict[str, Failure] = {}
        self._silent: list[list[int]] = []
        self._refused: TurnedAway | None = None
        self._ended = False
        self._lock = threading.Lock()
        self._process = os.getpid()
        _all.add(self)

    def gone(self) -> set[int]:
        """Return the ranks whose process has ended; where none has, those that have said that they leave, as ranks do that have
        connected."""
        self._look()
        return set(self._ended_ranks or self._left)

    def failure(self, scope: str = "") -> Failure | None:
        """Return the first failure that was reported of a scope: a name for the ranks that are to be connected."""
        self._look()
        return self._failures.get(scope)

    def report(self, failure: Failure, scope: str = "") -> None:
        """Tell all ranks why those of a scope cannot connect. Of several reports of a scope the first one counts."""
        self._say({"kind": "failure", "scope": scope} | asdict(failure))

    def silent(self, scope: str = "") -> Sequence[int]:
        """Return the ranks that have not arrived, or that do not look at what happens here: those that are stopped, or busy with
        something else. Where the hub does not answer, return the rank that keeps it. Where another rank has found out before and
        reported it of this scope, return what it reports."""
        self._silent.clear()
        self._say({"kind": "who is silent"})
        deadline = time.monotonic() + 2 * _ANSWER_S
        while time.monotonic() < deadline:
            self._look()
            if (failure := self._failures.get(scope)) is not None:
                return failure.ranks
            if self._silent:
                return self._silent[-1]
            self._wait(_LOOK_AGAIN_S)
        return [self._hub_rank]

    def say_arrived(self, card: Card, token: str) -> None:
        """Tell the hub who this process is. token: of the hub's card."""
        self._say({"kind": "arrived", "token": token, "card": card})

    def await_all(self, deadline: float) -> Iterator[None]:
        """Yield until all ranks have arrived; between two looks the caller may do something else. deadline: time.monotonic().

        Raises TurnedAway where this process is turned away; LinkError where a rank has ended or reports a failure, and, with the
        ranks that did not arrive, at the deadline.
        """
        while not self.cards:
            self._look()
            if self._refused is not None:
                raise self._refused
            if (failure := self._failures.get("")) is not None:
                raise failure.as_link_error()
            if gone := self.gone():
                raise Failure(tuple(sorted(gone)), f"lost {ranks_text(gone)}", ended=True).as_link_error()
            if time.monotonic() >= deadline:
                missing = self.silent()
                detail = f"{ranks_text(missing)} did not arrive" if missing else "the ranks arrived too late"
                raise LinkError(None, timed_out=True, detail=detail, awaited=missing)
            self._wait(_LOOK_AGAIN_S)
            yield

    def close(self) -> None:
        """Say goodbye and end the connection, and with it the hub, where it runs here. Calling it again does nothing."""
        if os.getpid() != self._process or self._ended:
            return
        self._say({"kind": "left"})
        with self._lock:
            self._ended = True
            self._neighbour.socket.close()
        if self._hub is not None:
            self._hub.join()

    def disown(self) -> None:
        """Give up the copies of the connections that a forked child has: they must end with the rank itself."""
        self._neighbour.socket.close()
        if self._hub is not None:
            self._hub.disown()

    def _wait(self, seconds: float) -> None:
        """Wait until there is something to read."""
        poll = select.poll()
        if not self._ended:
            poll.register(self._neighbour.socket, select.POLLIN)
        poll.poll(seconds * 1000)

    def _say(self, message: Card) -> None:
        with self._lock:
            if not self._ended:
                self._neighbour.put(json.dumps(message).encode())

    def _look(self) -> None:
        """Take note of what the hub has passed on."""
        with self._lock:
            if self._ended or os.getpid() != self._process:
                return
            self._neighbour.write()
            messages, self._ended = self._neighbour.read()
            for message in messages:
                self._take(message)
            if self._ended:
                self._ended_ranks.add(self._hub_rank)
                self._neighbour.socket.close()

    def _take(self, message: Card) -> None:
        kind = message["kind"]
        if kind == "all":
            self.key, self.secret, self.cards = message["key"], message["secret"], message["cards"]
        elif kind == "refused":
            self._refused = TurnedAway(self.rank, message["why"], again=message["again"])
        elif kind == "silent":
            self._silent.append(message["ranks"])
        elif kind == "gone":
            (self._left if message["left"] else self._ended_ranks).add(message["rank"])
        elif kind == "failure":
            self._failures.setdefault(message["scope"], Failure.from_record(message))
        elif kind == "do you run":
            self._neighbour.put(b'{"kind": "runs"}')


def _put(neighbour: Neighbour, **message: Any) -> None:
    neighbour.put(json.dumps(message).encode())


def _refuse(neighbour: Neighbour, why: str, *, again: bool) -> None:
    _put(neighbour, kind="refused", why=why, again=again)
    neighbour.socket.close()


def _card_of(messages: Sequence[Card], token: str) -> Card | None:
    """Return the card with which a process arrives; None for anything else that may have connected."""
    first = messages[0] if messages else {}
    with suppress(AttributeError, KeyError, TypeError):  # of what is none of ours
        if hmac.compare_digest(first["token"], token) and isinstance(first["card"]["rank"], int):
            card: Card = first["card"]
            return card
    return None


@dataclass
class _Inquiry:
    """Asks which ranks do not answer. by: who wants to know. until: time.monotonic() seconds."""

    by: Neighbour
    until: float
    running: set[int] = field(default_factory=set)


class Hub:
    """Lets processes in, each as a rank, and passes on what they report and that they have ended, on a thread of its own.

    card: by which other processes find it.
    """

    def __init__(self, card: Card, size: int, admission: Admission) -> None:
        """card: of this process, with a new "key" and "token". Raises OSError where its address cannot be listened on."""
        self._size = size
        self._admission = admission
        address = card["address"]
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=size + _MOST_STRANGERS)
        self._listener.setblocking(False)
        send_small_segments(self._listener)
        self.card = card | {"port": self._listener.getsockname()[1]}
        self._strangers: dict[int, Neighbour] = {}
        self._members: dict[int, Neighbour] = {}
        self._cards: dict[int, Card] = {}
        self._gone: set[int] = set()
        self._said: list[Card] = []
        self._is_complete = False
        self._serves = True
        self._complete_at: float | None = None
        self._inquiries: list[_Inquiry] = []
        self._thread = threading.Thread(target=self._serve, name="gradwire-hub", daemon=True)

    def start(self, here: socket.socket) -> None:
        """Begin to serve. here: a connection to this process itself, beside those that will be made."""
        self._strangers[here.fileno()] = Neighbour(here)
        self._thread.start()

    def join(self) -> None:
        """Wait until all connections have ended, as they do soon after that to this process itself."""
        self._thread.join(2 * _FLUSH_S)

    def disown(self) -> None:
        """Give up the copies of the connections that a forked child has."""
        self._end()

    def _serve(self) -> None:
        try:
            while self._serves:
                self._look(self._poll().poll(self._patience_ms()))
                self._complete_if_due()
                self._answer_if_due()
            self._flush()
        finally:
            self._end()

    def _poll(self) -> select.poll:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        for neighbour in (*self._strangers.values(), *self._members.values()):
            poll.register(neighbour.socket, select.POLLIN | (select.POLLOUT if neighbour.outgoing else 0))
        return poll

    def _patience_ms(self) -> float | None:
        due = [inquiry.until for inquiry in self._inquiries]
        if self._complete_at is not None and not self._is_complete:
            due.append(self._complete_at)
        return max(0.0, min(due) - time.monotonic()) * 1000 + 1 if due else None

    def _look(self, ready: Sequence[tuple[int, int]]) -> None:
        """Read and write what can be."""
        descriptors = {descriptor for descriptor, _ in ready}
        if self._listener.fileno() in descriptors:
            self._accept()
        for rank, neighbour in list(self._members.items()):
            if neighbour.socket.fileno() in descriptors:
                self._hear(rank, neighbour)
        for descriptor, stranger in list(self._strangers.items()):
            if descriptor in descriptors:
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
        if len(self._strangers) > _MOST_STRANGERS:
            self._strangers.pop(next(iter(self._strangers))).socket.close()

    def _meet(self, descriptor: int, stranger: Neighbour) -> None:
        """Let a process in, or turn it away, once it has said who it is."""
        messages: list[Card] = []
        ended = True
        with suppress(ValueError):  # raised where a program of another kind has connected
            messages, ended = stranger.read()
        if not messages and not ended:
            return
        del self._strangers[descriptor]
        card = _card_of(messages, self.card["token"])
        if ended or card is None or not 0 <= card["rank"] < self._size:
            stranger.socket.close()
            return
        verdict = self._admission.judge(card, self._cards, is_complete=self._is_complete)
        for rank, why in (verdict.evicted or {}).items():
            _refuse(self._members.pop(rank), why, again=False)
            del self._cards[rank]
        if verdict.refused is not None:
            _refuse(stranger, verdict.refused, again=verdict.again)
        else:
            self._members[card["rank"]], self._cards[card["rank"]] = stranger, card
            for message in self._said:
                _put(stranger, **message)
        if verdict.fatal is not None:
            self._tell({"kind": "failure", "scope": ""} | asdict(verdict.fatal))
        everyone = len(self._members) == self._size
        self._complete_at = time.monotonic() + self._admission.settle_s(self._cards) if everyone else None

    def _complete_if_due(self) -> None:
        if self._is_complete or self._complete_at is None or time.monotonic() < self._complete_at:
            return
        self._is_complete = True
        cards = [
            {name: value for name, value in self._cards[r].items() if name != "identity"} for r in range(self._size)
        ]
        secret = secrets.token_hex(_SECRET_BYTES)
        self._tell({"kind": "all", "key": self.card["key"], "secret": secret, "cards": cards})

    def _answer_if_due(self) -> None:
        waiting = []
        for inquiry in self._inquiries:
            silent = [rank for rank in range(self._size) if rank not in inquiry.running and rank not in self._gone]
            if silent and time.monotonic() < inquiry.until:
                waiting.append(inquiry)
            else:
                _put(inquiry.by, kind="silent", ranks=silent)
        self._inquiries = waiting

    def _hear(self, rank: int, neighbour: Neighbour) -> None:
        neighbour.write()
        messages, ended = neighbour.read()
        for message in messages:
            if message["kind"] == "who is silent":
                self._inquiries.append(_Inquiry(neighbour, time.monotonic() + _ANSWER_S))
                for member in self._members.values():
                    _put(member, kind="do you run")
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
            _put(neighbour, **message)

    def _flush(self) -> None:
        deadline = time.monotonic() + _FLUSH_S
        while any(neighbour.outgoing for neighbour in self._members.values()) and time.monotonic() < deadline:
            for neighbour in self._members.values():
                neighbour.write()
            time.sleep(_FLUSH_S / 40)

    def _end(self) -> None:
        for neighbour in (*self._members.values(), *self._strangers.values()):
            neighbour.socket.close()
        self._listener.close()


def arrive(
    store: Store,
    size: int,
    card: Card,
    deadline: float,
    *,
    hub_rank: int | None = None,
    admission: Admission | None = None,
    left: Container[str] = (),
    keepers: Collection[int] = (),
) -> Presence:
    """Arrive, and return what is known of the others once all ranks have arrived. A collective call.

    card: of this process, as own_address.card_of makes it, and whatever else `admission` is to know as its "identity".
    hub_rank: the rank that keeps the hub, and puts its own in the place of the one before; None leaves that to the first
    that arrives, in a store in which no hub has been before. left: the keys of hubs that this process has left. keepers: the
    rank whose process keeps the store, where one does. deadline: time.monotonic() seconds. Raises TurnedAway where the hub turns
    this process away; LinkError where a rank has ended or cannot connect, and, with the ranks that did not arrive, at the
    deadline; OSError where this process cannot connect.
    """
    with closing(Asking(store, deadline, None, keepers)) as asking:
        while True:
            hub_card, hub = _find_hub(store, asking, size, card, deadline, hub_rank, admission or Admission(), left)
            notes = _Notes(store, asking, hub_card["key"])
            presence: Presence | None = None
            try:
                presence = _enter(hub_card, hub, card, deadline, notes)
                for _ in presence.await_all(deadline):
                    if hub is None:
                        continue
                    socket.socket().close()  # raises where those who are still to come could not be accepted
                    if (failure := notes.read()) is not None:
                        presence.report(failure)
                check_addresses(presence.cards)
                return presence
            except TurnedAway as refused:
                assert presence is not None
                presence.close()
                if not refused.again:
                    raise
                time.sleep(_LOOK_AGAIN_S)
            except Exception as error:
                failure = Failure.of(error, card["rank"])
                with suppress(Exception):  # where the store has ended, the others know by that
                    notes.write(failure)
                if presence is not None:
                    presence.report(failure)
                    presence.close()
                elif hub is not None:
                    hub.disown()
                raise


class _Notes:
    """What ranks that may not be connected to a hub leave for the others in the store. key: of the hub."""

    def __init__(self, store: Store, asking: Asking, key: str) -> None:
        self._store = store
        self._asking = asking
        self._name = f"failure/{key}"

    def read(self) -> Failure | None:
        """Return the first failure that was left."""
        if not self._asking.ask(lambda: self._store.check([self._name])):
            return None
        return Failure.from_record(json.loads(self._asking.ask(lambda: self._store.get(self._name))))

    def write(self, failure: Failure) -> None:
        """Leave a failure, unless there is one already."""
        text = json.dumps(asdict(failure))
        self._asking.ask(lambda: self._store.compare_set(self._name, "", text))


def _find_hub(
    store: Store,
    asking: Asking,
    size: int,
    card: Card,
    deadline: float,
    hub_rank: int | None,
    admission: Admission,
    left: Container[str],
) -> tuple[Card, Hub | None]:
    """Return the card of the hub, and the hub itself where this process keeps it."""
    ask = asking.ask
    if hub_rank == card["rank"]:
        hub, made = _make_hub(card, size, admission)
        ask(lambda: store.set(_HUB, json.dumps(made)))
        return made, hub
    while True:
        if ask(lambda: store.check([_HUB])):
            found = json.loads(ask(lambda: store.get(_HUB)))
            if found["key"] not in left:
                return found, None
        elif hub_rank is None:
            hub, made = _make_hub(card, size, admission)
            found = json.loads(ask(partial(store.compare_set, _HUB, "", json.dumps(made))))
            if found["key"] == made["key"]:
                return made, hub
            if hub is not None:
                hub.disown()
            return found, None
        if time.monotonic() >= deadline:
            raise LinkError(hub_rank, timed_out=True, detail=f"rank {hub_rank} did not arrive")
        time.sleep(_LOOK_AGAIN_S)


def _make_hub(card: Card, size: int, admission: Admission) -> tuple[Hub | None, Card]:
    """Return a hub in this process and its card; None and a card that says why, or the others would wait for it."""
    made = card | {"key": secrets.token_hex(_KEY_BYTES), "token": secrets.token_hex(_KEY_BYTES)}
    if card["problem"]:
        return None, made
    try:
        hub = Hub(made, size, admission)
    except OSError as error:
        return None, made | {"problem": f"cannot listen for the other ranks: {error}"}
    return hub, hub.card


def _enter(hub_card: Card, hub: Hub | None, card: Card, deadline: float, notes: _Notes) -> Presence:
    """Connect to the hub and say who this process is. Raises LinkError where the rank that keeps the hub is at fault."""
    keeper = hub_card["rank"]
    check_addresses([hub_card, card | {"loopback": "", "problem": ""}])
    if hub is not None:
        connection, theirs = socket.socketpair()
        theirs.setblocking(False)
        hub.start(theirs)
    else:
        address = hub_card["address"], hub_card["port"]
        connection = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
        try:
            send_small_segments(connection)
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            connection.connect(address)
            set_up(connection)
        except OSError as error:
            connection.close()
            if error.errno in OWN_FAULTS:
                raise
            if (failure := notes.read()) is not None:
                raise failure.as_link_error() from error
            ended, timed_out = isinstance(error, ConnectionError), isinstance(error, TimeoutError)
            detail = f"rank {keeper} at {address[0]} port {address[1]}: {error}"
            raise LinkError(keeper, timed_out=timed_out, detail=detail, ended=ended) from error
    connection.setblocking(False)
    presence = Presence(card["rank"], keeper, connection, hub)
    presence.say_arrived(card, hub_card["token"])
    return presence


_all: weakref.WeakSet[Presence] = weakref.WeakSet()


def _after_fork() -> None:
    for presence in list(_all):
        presence.disown()


os.register_at_fork(after_in_child=_after_fork)
