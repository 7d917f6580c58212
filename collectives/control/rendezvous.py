"""The rendezvous of the ranks of a job: each connects to a Coordinator on one of the ranks, whose address is in the store. Then
the ranks connect their Monitors to each other."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial

from torch.distributed.distributed_c10d import Store

from gradwire.collectives.control.addresses import seen_from
from gradwire.collectives.control.asking import POLL_S, Asking
from gradwire.collectives.control.build import OtherBuild, build
from gradwire.collectives.control.channel import Failure
from gradwire.collectives.control.client import CoordinatorClient, TurnedAway
from gradwire.collectives.control.coordinator import Admission, Card, Coordinator
from gradwire.collectives.control.handshake import dial
from gradwire.collectives.control.interfaces import warn_of_slow_interfaces
from gradwire.collectives.control.key import Key, UnusableKey
from gradwire.collectives.control.monitor import TO_COORDINATOR, Monitor
from gradwire.collectives.control.notes import CoordinatorPlace, Notes
from gradwire.collectives.control.own_address import check_addresses, ports_of, why_not_listening
from gradwire.collectives.control.texts import Texts
from gradwire.collectives.errors import LinkError, ranks_text

#: How long a rank that has failed tries to leave a note in the store.
_NOTE_S = 5.0

#: How long a rank whose connection to another one has ended waits for the report of a cause.
_CAUSE_S = 1.0


def rendezvous(
    store: Store,
    size: int,
    card: Card,
    deadline: float,
    *,
    coordinator_rank: int | None = None,
    admission: Admission | None = None,
    left: set[str] | None = None,
    keepers: Collection[int] = (),
    by_agent: bool = False,
    lost: Callable[[], Collection[int]] | None = None,
    number: int = 1,
    key: Key | None = None,
    place: str = "",
) -> Monitor:
    """Return this rank's Monitor once all ranks have arrived, and are connected. A collective call.

    card: that of this process, from own_address.card_of, with the data that `admission` needs as "identity". deadline:
    time.monotonic() seconds. coordinator_rank: the rank that runs the Coordinator, and replaces an earlier one's address in the
    store; None for the first rank that arrives, in a store that has never held such an address. left: the keys of Coordinators
    that this process has left or will leave, which it ignores; that of this one is added. keepers: the rank whose process
    serves the store, if one does. by_agent: whether a launcher serves the store; only with coordinator_rank. A launcher may
    restart all ranks, so the store may hold the address of a Coordinator that has ended, at which another program may listen by
    now. This rank then waits for a new one. lost: returns, without waiting, the ranks whose end a launcher has noted,
    including ranks that never arrived. number: how often this rank has tried to arrive in the store. key: of the job; with one,
    all connections are encrypted, and so is what the ranks leave in the store. place: that of Texts.

    Raises TurnedAway if the Coordinator rejects this process, and at the deadline if no new one has replaced an earlier one;
    LinkError if a rank has ended or cannot connect, and at the deadline, with the ranks that did not arrive; OSError if
    this process lacks the resources to connect.
    """
    with closing(Asking(store, keepers=keepers)) as asking:
        card = card | {"size": size, "port": 0}
        admission, left = admission or Admission(), set() if left is None else left
        texts = Texts(store, key, place, card["rank"], size)
        arrival = _Arrival(
            texts, key, asking, card, deadline, coordinator_rank, admission, left, by_agent, lost, number
        )
        while True:
            try:
                return arrival.attempt()
            except TurnedAway as refused:
                refused.timed_out |= refused.again and time.monotonic() >= deadline
                if not refused.again or refused.timed_out:
                    raise
                time.sleep(POLL_S)


@dataclass
class _Arrival:
    """Holds the arguments of rendezvous(), and what an attempt has made: where the Coordinator listens, whether that is in this
    process, and the connection to it."""

    texts: Texts
    key: Key | None
    asking: Asking
    card: Card
    deadline: float
    coordinator_rank: int | None
    admission: Admission
    left: set[str]
    by_agent: bool
    lost: Callable[[], Collection[int]] | None
    number: int
    place: CoordinatorPlace | None = None
    is_here: bool = False
    coordinator: Coordinator | None = None
    client: CoordinatorClient | None = None

    def attempt(self) -> Monitor:
        """Try once to arrive. Return and raise as rendezvous() does; raise TurnedAway with `again` to try again."""
        self.place, self.is_here, self.client = None, False, None
        monitor: Monitor | None = None
        try:
            if not self.card["problem"]:
                try:
                    monitor = Monitor(self.card["rank"], self.card["size"], self.card["address"], ports_of(self.card))
                    self.card["port"] = monitor.port
                except OSError as error:
                    self.card["problem"] = f"cannot listen for the other ranks: {why_not_listening(error, self.card)}"
            place = self.place = self._find_coordinator(monitor)
            client = self.client = self._enter(place, monitor)
            if monitor is not None and not self.is_here:
                monitor.start(self._secret(place))
            for _ in client.await_all(self.deadline):
                if not self.is_here and not client.is_admitted:
                    self._check_place(place)
                else:
                    self._check_lost()
                if not self.is_here:
                    continue
                socket.socket().close()  # raises OSError if the Coordinator could accept no more ranks
                if (failure := self._notes().failure(place)) is not None:
                    client.report(failure)
            check_addresses(client.cards)
            assert monitor is not None, "a process without a Monitor has a problem, which is raised by now"
            self.left.add(place.key)
            self._connect(monitor, client)
            if self.card["rank"] == 0:
                warn_of_slow_interfaces(client.cards)
            client.close()
            return monitor
        except BaseException as error:
            try:
                self._fail(error)
            finally:
                if monitor is not None:
                    monitor.release()
            raise

    def _connect(self, monitor: Monitor, client: CoordinatorClient) -> None:
        """Connect the Monitors, and wait until all are connected."""
        monitor.cards, monitor.key = client.cards, client.key
        try:
            monitor.connect(self.deadline, client.check)
            if self.lost is not None:
                monitor.look_at(self.lost)
            with closing(monitor.open(range(monitor.size), "rendezvous")) as met:
                met.exchange("met", None, self.deadline, check=client.check)
            monitor.has_met = True
        except LinkError as error:
            if error.timed_out:  # a rank that waits for another one is not missing
                silent = client.silent()
                raise LinkError(
                    None, timed_out=True, detail=f"{ranks_text(silent)} did not arrive", awaited=silent
                ) from error
            until = time.monotonic() + _CAUSE_S
            while (
                error.ended and time.monotonic() < until
            ):  # a rank that gives up because of another one is not the cause
                client.check()
                time.sleep(POLL_S)
            raise

    def _fail(self, error: BaseException) -> None:
        """Report to the other ranks why this one fails, if they do not know. Raise another error instead of this one if it has
        caused this one, and TurnedAway with `again` if another Coordinator may take the place of the one that was found."""
        place, client = self.place, self.client
        if isinstance(error, TurnedAway | OtherBuild):  # the Coordinator knows why
            if client is not None:
                client.close()
            return
        if place is not None and not self.is_here and self._may_follow(error, place):
            if client is not None:
                client.close()
            if (refusal := self._refusal(place)) is not None:
                raise refusal.as_link_error() from None
            raise TurnedAway(place.rank, str(error), again=True) from error
        if place is not None:
            self.left.add(place.key)
            if not self.is_here and (reason := self._reason(error, place)) is not None:
                if client is not None:
                    client.close()
                raise reason from None
        failure = Failure.of(error, self.card["rank"])
        if client is not None:
            # First, because the store may be slow, and this process answers no inquiry meanwhile.
            client.report(failure)
        if place is None and isinstance(error, LinkError):
            return  # the other ranks find the same
        with suppress(Exception):  # if the store has ended, the other ranks detect that
            self._notes(time.monotonic() + _NOTE_S).leave(failure, place)
        if client is not None:
            client.close()

    def _reason(self, error: BaseException, place: CoordinatorPlace) -> LinkError | None:
        """Return the error of another rank because of which the Coordinator has ended, perhaps before it could tell this process;
        None if there is none."""
        if not isinstance(error, LinkError) or error.timed_out or not (error.ended or self._is_early(error)):
            return None
        with suppress(Exception):  # the store has ended too
            if (failure := self._notes(time.monotonic() + _NOTE_S).failure(place)) is not None:
                return failure.as_link_error()
        return None

    def _refusal(self, place: CoordinatorPlace) -> Failure | None:
        """Return the failure of a rank with another key because of which the Coordinator of this attempt has ended, which would
        also fail after a restart; None if there is none."""
        if place.number >= self.number:
            with suppress(Exception):  # the store has ended too
                return self._notes(time.monotonic() + _NOTE_S).refusal(place)
        return None

    def _may_follow(self, error: BaseException, place: CoordinatorPlace) -> bool:
        """Return whether this rank looks for a newer Coordinator after an error: if the one at this place is of an earlier
        attempt than this rank's, or if it ended before it admitted this process, and a launcher may have restarted all ranks."""
        if not isinstance(error, LinkError) or error.timed_out:
            return False
        return place.number < self.number or (self.by_agent and error.ended and self._is_early(error))

    def _is_early(self, error: BaseException) -> bool:
        """Return whether a link has failed, before a deadline and before the Coordinator admitted this process."""
        is_admitted = self.client is not None and self.client.is_admitted
        return isinstance(error, LinkError) and not error.timed_out and not is_admitted

    def _secret(self, place: CoordinatorPlace) -> bytes | Key:
        """Return what the ranks that meet at a place prove to each other that they know."""
        return place.token.encode() if self.key is None else self.key.of(place.token)

    def _check_lost(self) -> None:
        """Raise LinkError if the launcher has noted the end of ranks, including ranks that never arrived."""
        if self.lost is not None and (lost := self.lost()):
            raise Failure.loss_of(lost).as_link_error()

    def _check_place(self, place: CoordinatorPlace) -> None:
        """Raise as _check_lost(), and TurnedAway with `again` if a launcher may restart all ranks, and the store names a newer
        Coordinator."""
        self._check_lost()
        if self.by_agent and (newest := self._notes().coordinator()) is not None and newest.key != place.key:
            raise TurnedAway(place.rank, "a newer coordinator has replaced it", again=True)

    def _notes(self, deadline: float | None = None) -> Notes:
        """Return the Notes of this rank. deadline: of each call to the store; by default that of the attempt."""
        ask = partial(self.asking.ask, deadline=self.deadline if deadline is None else deadline)
        return Notes(self.texts, ask, self.left, self.number)

    def _find_coordinator(self, monitor: Monitor | None) -> CoordinatorPlace:
        """Return where the Coordinator listens; make it if it is to run in this process. Raises LinkError if a rank has failed,
        and at the deadline."""
        notes, card = self._notes(), self.card
        while True:
            self._check_lost()
            if self.coordinator_rank != card["rank"] and (found := notes.coordinator()) is not None:
                return found
            if self.coordinator_rank in (None, card["rank"]):
                coordinator = Coordinator(card, self.admission)
                token = "-" if monitor is None else coordinator.token
                made = CoordinatorPlace.of(card, card["port"], coordinator.key, token, self.number)
                place = notes.publish(made, replaces=self.coordinator_rank is not None)
                if (failure := notes.failure_without_coordinator()) is not None:
                    notes.leave(failure, place)
                if place.key == made.key and monitor is not None:
                    self.coordinator, self.is_here = coordinator, True
                return place
            if (failure := notes.failure_without_coordinator()) is not None:
                raise failure.as_link_error()
            if time.monotonic() >= self.deadline:
                rank = self.coordinator_rank if self.coordinator_rank in range(card["size"]) else None
                detail = "no rank of this job accepts connections" if rank is None else f"rank {rank} did not arrive"
                raise LinkError(rank, timed_out=True, detail=detail)
            time.sleep(POLL_S)

    def _enter(self, place: CoordinatorPlace, monitor: Monitor | None) -> CoordinatorClient:
        """Connect to the Coordinator, and send it this process's card. Raises LinkError if it cannot be reached."""
        rank = self.card["rank"]
        if self.is_here:
            assert monitor is not None
            assert self.coordinator is not None
            mine, theirs = socket.socketpair()
            theirs.setblocking(False)
            mine.setblocking(False)
            self.coordinator.add(theirs)
            monitor.start(self._secret(place), self.coordinator)
            return CoordinatorClient(self.card, rank, mine)
        if place.build == build():
            check_addresses([place.card, self.card | {"loopback": "", "problem": ""}])
        try:
            check = partial(self._check_place, place)  # the host of an earlier Coordinator may be gone
            there = seen_from(self.card["address"], place.address), place.port
            secret = self._secret(place)
            purpose = TO_COORDINATOR + b"\0"
            connection = dial(
                rank, place.rank, there, secret, self.deadline, check, purpose=purpose, small_segments=True
            )
        except (TurnedAway, OtherBuild):
            raise
        except LinkError as error:
            error.ended |= isinstance(error.__cause__, ConnectionError)  # or already set, by _check_lost()
            if self._may_follow(error, place):
                raise
            if place.build != build():  # perhaps it cannot be reached for that reason
                raise OtherBuild(rank, build(), place.rank, place.build) from error
            raise
        return CoordinatorClient(self.card, place.rank, connection)


def withdraw_from(
    store: Store,
    error: Exception,
    rank: int,
    size: int,
    keepers: Collection[int],
    deadline: float,
    key: Key | None = None,
    place: str = "",
    number: int = 1,
) -> None:
    """Report to the other ranks of an attempt to arrive that a rank has failed, and why; for UnusableKey without encryption, and
    without the reason. size, keepers, key, place, number: as in rendezvous(). If the store does not answer by the deadline, the
    other ranks wait until theirs."""
    with closing(Asking(store, keepers=keepers)) as asking, suppress(LinkError):
        notes = Notes(Texts(store, key, place, rank, size), partial(asking.ask, deadline=deadline), number=number)
        if isinstance(error, UnusableKey):
            notes.refuse()
        else:
            notes.leave(Failure.of(error, rank), None)
