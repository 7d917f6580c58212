"""How the ranks of a job arrive, and what each knows from then on: who has ended, and what keeps ranks from connecting.

A Watch reports this among the ranks of a Communicator, but only once they are connected. Until then every rank holds one
connection to a hub on one of the ranks, which leaves its address in the store.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from torch.distributed.distributed_c10d import Store

from gradwire.collectives.errors import LinkError, ranks_text
from gradwire.collectives.link.asking import Asking
from gradwire.collectives.link.handshake import dial, set_up
from gradwire.collectives.link.hub import ANSWER_S, Admission, Card, Failure, Hub
from gradwire.collectives.link.own_address import check_addresses
from gradwire.collectives.link.watch import Neighbour, poll_of

#: How long to wait before the store is asked again whether there is a hub, or whether a rank has left a failure there.
_LOOK_AGAIN_S = 0.02

_HUB = "hub"
_KEY_BYTES = 16


class TurnedAway(LinkError):
    """The hub turns the process of a rank away. again: whether it may try again."""

    def __init__(self, rank: int, why: str, *, again: bool) -> None:
        super().__init__(rank, timed_out=False, detail=why)
        self.again = again


class Presence:
    """What this rank knows of the ranks that have arrived with it. What nobody uses any more is closed.

    cards: of all ranks, by rank, once all have arrived. key, secret: a name and a secret (hexadecimal digits) that the hub drew
    for these ranks alone.
    """

    def __init__(self, card: Card, hub_card: Card, connection: socket.socket, hub: Hub | None = None) -> None:
        """Send the hub this process's card. connection: to the hub; it belongs to the Presence from now on. hub: where it runs in
        this process."""
        self.rank = card["rank"]
        self.cards: list[Card] = []
        self.key = self.secret = ""
        self._hub_rank = hub_card["rank"]
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
        self._say(kind="arrived", token=hub_card["token"], card=card)
        _all.add(self)

    def gone(self) -> set[int]:
        """Return the ranks whose process has ended; where none has, those that have said that they leave, as ranks do that have
        connected."""
        return self.ended() or set(self._left)

    def ended(self) -> set[int]:
        """Return the ranks whose process has ended, and which had not left."""
        self._look()
        return set(self._ended_ranks)

    def failure(self, scope: str = "") -> Failure | None:
        """Return the first failure that was reported of a scope: a name for the ranks that are to be connected."""
        self._look()
        return self._failures.get(scope)

    def report(self, failure: Failure, scope: str = "") -> None:
        """Report to all ranks why those of a scope cannot connect. Of several reports of a scope the first one counts."""
        self._say(kind="failure", scope=scope, **asdict(failure))

    def silent(self, scope: str = "") -> Sequence[int]:
        """Return the other ranks that have not arrived, or that do not look at what happens here: those that are stopped, or busy
        with something else. Where the hub does not answer, return the rank that keeps it. Where another rank has found out before
        and reported it of this scope, return what it reports."""
        self._silent.clear()
        self._say(kind="who is silent")
        deadline = time.monotonic() + 2 * ANSWER_S
        while time.monotonic() < deadline:
            self._look()
            failure = self._failures.get(scope)
            if failure is not None or self._silent:
                # This rank may have answered late, but it runs.
                return [rank for rank in (failure.ranks if failure else self._silent[-1]) if rank != self.rank]
            self._wait(_LOOK_AGAIN_S)
        return [self._hub_rank]

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
                raise Failure.loss_of(gone).as_link_error()
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
        self._say(kind="left")
        with self._lock:
            self._ended = True
            self._neighbour.socket.close()
        if self._hub is not None:
            self._hub.join()

    def disown(self) -> None:
        """Close a forked child's copies of the connections: they must end with the rank itself."""
        self._neighbour.socket.close()
        if self._hub is not None:
            self._hub.disown()

    def _wait(self, seconds: float) -> None:
        """Wait until there is something to read."""
        (select.poll() if self._ended else poll_of(self._neighbour.socket)).poll(seconds * 1000)

    def _say(self, **message: Any) -> None:
        with self._lock:
            if not self._ended:
                self._neighbour.say(**message)

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
                if self._hub_rank not in self._left:
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
            self._neighbour.say(kind="runs")


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
    by_agent: bool = False,
    lost: Callable[[], Collection[int]] | None = None,
) -> Presence:
    """Arrive, and return what is known of the others once all ranks have arrived. A collective call.

    card: of this process, as own_address.card_of makes it, and whatever else `admission` is to know as its "identity".
    hub_rank: the rank that keeps the hub, and puts its own in the place of the one before; None leaves that to the first
    that arrives, in a store in which no hub has been before. left: the keys of hubs that this process has left. keepers: the
    rank whose process keeps the store, where one does. by_agent: whether a launcher keeps it, which may have started all ranks
    again since somebody made the hub that is noted there, and ends them where one has ended: a hub that is gone is then waited
    for. lost: returns the ranks whose end a launcher has noted in its store, also of those that did not arrive; it is called
    again and again. deadline: time.monotonic() seconds. Raises TurnedAway where the hub turns this process away; LinkError where
    a rank has ended or cannot connect, and, with the ranks that did not arrive, at the deadline; OSError where this process
    cannot connect.
    """
    with closing(Asking(store, deadline, None, keepers)) as asking:
        arrival = _Arrival(
            store, asking, size, card, deadline, hub_rank, admission or Admission(), left, by_agent, lost
        )
        while True:
            try:
                return arrival.attempt()
            except TurnedAway as refused:
                if not refused.again:
                    raise
                time.sleep(_LOOK_AGAIN_S)


@dataclass(frozen=True)
class _Arrival:
    """A process on its way to a hub: the arguments of arrive()."""

    store: Store
    asking: Asking
    size: int
    card: Card
    deadline: float
    hub_rank: int | None
    admission: Admission
    left: Container[str]
    by_agent: bool
    lost: Callable[[], Collection[int]] | None

    def attempt(self) -> Presence:
        """See arrive."""
        hub_card, hub = self._find_hub()
        note = f"failure/{hub_card['key']}"
        presence: Presence | None = None
        try:
            presence = self._enter(hub_card, hub, note)
            for _ in presence.await_all(self.deadline):
                self._check_lost()
                if hub is None:
                    continue
                socket.socket().close()  # raises where those who are still to come could not be accepted
                if (failure := self._read(note)) is not None:
                    presence.report(failure)
            check_addresses(presence.cards)
            return presence
        except TurnedAway:
            if presence is not None:
                presence.close()
            raise
        except Exception as error:
            failure = Failure.of(error, self.card["rank"])
            if presence is not None:
                presence.report(
                    failure
                )  # first: the store may take its time, and whoever asks meanwhile gets no answer here
            with suppress(Exception):  # where the store has ended, the others know by that
                self.asking.ask(lambda: self.store.compare_set(note, "", json.dumps(asdict(failure))))
            if presence is not None:
                presence.close()
            elif hub is not None:
                hub.disown()
            raise

    def _check_lost(self) -> None:
        """Raise LinkError where the launcher has noted the end of ranks, which may never have come."""
        if self.lost is not None and (lost := self.asking.ask(self.lost)):
            raise Failure.loss_of(lost).as_link_error()

    def _read(self, note: str) -> Failure | None:
        """Return the first failure that a rank, which may not be connected to the hub, has left in the store."""
        if not self.asking.ask(lambda: self.store.check([note])):
            return None
        return Failure.from_record(json.loads(self.asking.ask(lambda: self.store.get(note))))

    def _find_hub(self) -> tuple[Card, Hub | None]:
        """Return the card of the hub, and the hub itself where this process keeps it."""
        store, ask = self.store, self.asking.ask
        if self.hub_rank == self.card["rank"]:
            hub, made = self._make_hub()
            ask(lambda: store.set(_HUB, json.dumps(made)))
            return made, hub
        while True:
            self._check_lost()
            if ask(lambda: store.check([_HUB])):
                found = json.loads(ask(lambda: store.get(_HUB)))
                if found["key"] not in self.left:
                    return found, None
            elif self.hub_rank is None:
                hub, made = self._make_hub()
                found = json.loads(ask(partial(store.compare_set, _HUB, "", json.dumps(made))))
                if found["key"] == made["key"]:
                    return made, hub
                if hub is not None:
                    hub.disown()
                return found, None
            if time.monotonic() >= self.deadline:
                raise LinkError(self.hub_rank, timed_out=True, detail=f"rank {self.hub_rank} did not arrive")
            time.sleep(_LOOK_AGAIN_S)

    def _make_hub(self) -> tuple[Hub | None, Card]:
        """Return a hub in this process and its card; None and a card that says why, or the others would wait for it."""
        made = self.card | {"key": secrets.token_hex(_KEY_BYTES), "token": secrets.token_hex(_KEY_BYTES)}
        if self.card["problem"]:
            return None, made
        try:
            hub = Hub(made, self.size, self.admission)
        except OSError as error:
            return None, made | {"problem": f"cannot listen for the other ranks: {error}"}
        return hub, hub.card

    def _enter(self, hub_card: Card, hub: Hub | None, note: str) -> Presence:
        """Connect to the hub and send it this process's card. Raises LinkError where the rank that keeps the hub is at fault."""
        check_addresses([hub_card, self.card | {"loopback": "", "problem": ""}])
        if hub is not None:
            connection, theirs = socket.socketpair()
            theirs.setblocking(False)
            connection.setblocking(False)
            hub.start(theirs)
        else:
            place = hub_card["rank"], hub_card["address"], hub_card["port"]
            try:
                connection = dial(*place, self.deadline, self._check_lost, set_up, small_segments=True)
            except LinkError as error:
                error.ended |= isinstance(error.__cause__, ConnectionError)  # or as the launcher has noted
                if error.ended and self.by_agent and time.monotonic() < self.deadline:
                    raise TurnedAway(hub_card["rank"], str(error), again=True) from error
                if (failure := self._read(note)) is not None:
                    raise failure.as_link_error() from error
                raise
        return Presence(self.card, hub_card, connection, hub)


_all: weakref.WeakSet[Presence] = weakref.WeakSet()


def _after_fork() -> None:
    for presence in list(_all):
        presence.disown()


os.register_at_fork(after_in_child=_after_fork)
