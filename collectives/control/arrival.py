"""The arrival of the ranks of a job: each connects to a hub on one of the ranks, whose address is in the store."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Collection
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from torch.distributed.distributed_c10d import Store

from gradwire.collectives.control.asking import POLL_S, Asking
from gradwire.collectives.control.build import build
from gradwire.collectives.control.handshake import OtherBuild, dial
from gradwire.collectives.control.hub import Admission, Card, Failure, Hub
from gradwire.collectives.control.notes import HubPlace, Notes
from gradwire.collectives.control.own_address import check_addresses
from gradwire.collectives.control.presence import Presence, TurnedAway
from gradwire.collectives.errors import LinkError

_Answer = TypeVar("_Answer")

#: How long a rank that has failed tries to leave a note in the store.
_NOTE_S = 5.0
_KEY_BYTES = 16


def arrive(
    store: Store,
    size: int,
    card: Card,
    deadline: float,
    *,
    hub_rank: int | None = None,
    admission: Admission | None = None,
    left: set[str] | None = None,
    keepers: Collection[int] = (),
    by_agent: bool = False,
    lost: Callable[[], Collection[int]] | None = None,
    number: int = 1,
) -> Presence:
    """Connect to the hub, and return this rank's Presence once all ranks have arrived. A collective call.

    card: that of this process, from own_address.card_of, with the data that `admission` needs as "identity". deadline:
    time.monotonic() seconds. hub_rank: the rank that runs the hub, and replaces an earlier hub's address in the store;
    None for the first rank that arrives, in a store that has never held a hub's address. left: the keys of hubs that
    this process has left or will leave, which it ignores; that of this hub is added. keepers: the rank whose process
    serves the store, if one does. by_agent: whether a launcher serves the store; only with hub_rank. A launcher may
    restart all ranks, so the store may hold the address of a hub that has ended, at which another program may listen by
    now. This rank then waits for a new hub. lost: returns, without waiting, the ranks whose end a launcher has noted,
    including ranks that never arrived. number: how often this rank has tried to arrive in the store.

    Raises TurnedAway if the hub rejects this process, and at the deadline if no new hub has replaced an earlier one;
    LinkError if a rank has ended or cannot connect, and at the deadline, with the ranks that did not arrive; OSError if
    this process lacks the resources to connect.
    """
    with closing(Asking(store, keepers=keepers)) as asking:
        card = card | {"size": size}
        admission, left = admission or Admission(), set() if left is None else left
        arrival = _Arrival(store, asking, card, deadline, hub_rank, admission, left, by_agent, lost, number)
        while True:
            try:
                return arrival.attempt()
            except TurnedAway as refused:
                refused.timed_out |= refused.again and time.monotonic() >= deadline
                if not refused.again or refused.timed_out:
                    raise
                time.sleep(POLL_S)


@dataclass(frozen=True)
class _Arrival:
    """Holds the arguments of arrive(), and connects this process to the hub."""

    store: Store
    asking: Asking
    card: Card
    deadline: float
    hub_rank: int | None
    admission: Admission
    left: set[str]
    by_agent: bool
    lost: Callable[[], Collection[int]] | None
    number: int

    def attempt(self) -> Presence:
        """Try once to arrive. Return and raise as arrive() does; raise TurnedAway with `again` to try again."""
        place: HubPlace | None = None
        hub: Hub | None = None
        presence: Presence | None = None
        try:
            place, hub = self._find_hub()
            presence = self._enter(place, hub)
            for _ in presence.await_all(self.deadline):
                if hub is None and not presence.is_admitted:
                    self._check_hub(place)
                else:
                    self._check_lost()
                if hub is None:
                    continue
                socket.socket().close()  # raises OSError if the hub could accept no more ranks
                if (failure := self._notes.failure(place.key)) is not None:
                    presence.report(failure)
            check_addresses(presence.cards)
            self.left.add(place.key)
            return presence
        except (TurnedAway, OtherBuild):  # the hub knows why
            if presence is not None:
                presence.close()
            raise
        except BaseException as error:
            if place is not None and hub is None and self._may_follow(error, place, presence):
                if presence is not None:
                    presence.close()
                raise TurnedAway(place.rank, str(error), again=True) from error
            if place is not None:
                self.left.add(place.key)
                if hub is None and (reason := self._reason(error, place, presence)) is not None:
                    if presence is not None:
                        presence.close()
                    raise reason from error
            failure = Failure.of(error, self.card["rank"])
            if presence is not None:
                # First, because the store may be slow, and this process answers no inquiry of the hub meanwhile.
                presence.report(failure)
            if place is None and isinstance(error, LinkError):
                raise  # the other ranks find the same
            with suppress(Exception):  # if the store has ended, the other ranks detect that
                ask = partial(self.asking.ask, deadline=time.monotonic() + _NOTE_S)
                Notes(self.store, ask, self.left, self.number).leave(failure, place)
            if presence is not None:
                presence.close()
            elif hub is not None:
                hub.disown()
            raise

    def _reason(self, error: BaseException, place: HubPlace, presence: Presence | None) -> LinkError | None:
        """Return the error of another rank because of which the hub has ended before it admitted this process; None if there is
        none."""
        if not _is_early(error, presence):
            return None
        with suppress(LinkError):  # the store has ended too
            if (failure := self._notes.failure(place.key)) is not None:
                return failure.as_link_error()
        return None

    def _may_follow(self, error: BaseException, place: HubPlace, presence: Presence | None) -> bool:
        """Return whether this rank looks for a newer hub after an error: if the hub at this place is of an earlier attempt than
        this rank's, or if it ended before it admitted this process, and a launcher may have restarted all ranks."""
        if not isinstance(error, LinkError) or error.timed_out:
            return False
        return place.number < self.number or (self.by_agent and error.ended and _is_early(error, presence))

    def _check_lost(self) -> None:
        """Raise LinkError if the launcher has noted the end of ranks, including ranks that never arrived."""
        if self.lost is not None and (lost := self.lost()):
            raise Failure.loss_of(lost).as_link_error()

    def _check_hub(self, place: HubPlace) -> None:
        """Raise as _check_lost(), and TurnedAway with `again` if a launcher may restart all ranks, and the store names a newer
        hub."""
        self._check_lost()
        if self.by_agent and (newest := self._notes.hub()) is not None and newest.key != place.key:
            raise TurnedAway(place.rank, "a newer hub has replaced it", again=True)

    def _ask(self, call: Callable[[], _Answer]) -> _Answer:
        """Return the result of a call to the store. Raises as Asking.ask."""
        return self.asking.ask(call, self.deadline)

    @property
    def _notes(self) -> Notes:
        return Notes(self.store, self._ask, self.left, self.number)

    def _find_hub(self) -> tuple[HubPlace, Hub | None]:
        """Return where the hub listens, and the hub if it runs in this process. Raises LinkError if a rank has failed, and at
        the deadline."""
        notes = self._notes
        while True:
            self._check_lost()
            if self.hub_rank != self.card["rank"] and (found := notes.hub()) is not None:
                return found, None
            if self.hub_rank in (None, self.card["rank"]):
                hub, made = self._make_hub()
                place = notes.publish(made, replaces=self.hub_rank is not None)
                if (failure := notes.failure_without_hub()) is not None:
                    notes.leave(failure, place)
                if place.key != made.key and hub is not None:
                    hub.disown()
                return place, hub if place.key == made.key else None
            if (failure := notes.failure_without_hub()) is not None:
                raise failure.as_link_error()
            if time.monotonic() >= self.deadline:
                rank = self.hub_rank if self.hub_rank in range(self.card["size"]) else None
                detail = "no rank of this job accepts connections" if rank is None else f"rank {rank} did not arrive"
                raise LinkError(rank, timed_out=True, detail=detail)
            time.sleep(POLL_S)

    def _make_hub(self) -> tuple[Hub | None, HubPlace]:
        """Return a hub in this process, and its place. If it cannot listen, return None and a place whose card says why."""
        card = self.card
        if not card["problem"]:
            try:
                hub = Hub(card, self.admission)
                return hub, HubPlace.of(card, hub.port, hub.key, hub.token, self.number)
            except OSError as error:
                card = card | {"problem": f"cannot listen for the other ranks: {error}"}
        return None, HubPlace.of(card, 0, secrets.token_hex(_KEY_BYTES), "-", self.number)

    def _enter(self, place: HubPlace, hub: Hub | None) -> Presence:
        """Connect to the hub, and send it this process's card. Raises LinkError if the hub cannot be reached."""
        rank = self.card["rank"]
        if hub is not None:
            connection, theirs = socket.socketpair()
            theirs.setblocking(False)
            connection.setblocking(False)
            hub.start(theirs)
            return Presence(self.card, rank, connection, hub)
        if place.build == build():
            check_addresses([place.card, self.card | {"loopback": "", "problem": ""}])
        try:
            check = partial(self._check_hub, place)  # the host of an earlier hub may be gone
            there, token = (place.address, place.port), place.token.encode()
            connection = dial(rank, place.rank, there, token, self.deadline, check, small_segments=True)
        except (TurnedAway, OtherBuild):
            raise
        except LinkError as error:
            error.ended |= isinstance(error.__cause__, ConnectionError)  # or already set, by _check_lost()
            if self._may_follow(error, place, None):
                raise
            if place.build != build():  # perhaps it cannot be reached for that reason
                raise OtherBuild(rank, build(), place.rank, place.build) from error
            raise
        return Presence(self.card, place.rank, connection)


def _is_early(error: BaseException, presence: Presence | None) -> bool:
    """Return whether a link has failed, before a deadline and before the hub admitted this process."""
    return isinstance(error, LinkError) and not error.timed_out and (presence is None or not presence.is_admitted)


def withdraw_from(store: Store, error: Exception, rank: int, keepers: Collection[int], deadline: float) -> None:
    """Report to the other ranks of an attempt to arrive that a rank has failed, and why. store: used by this attempt only.
    keepers: as in arrive(). If the store does not answer by the deadline, the other ranks wait until their deadline."""
    with closing(Asking(store, keepers=keepers)) as asking, suppress(LinkError):
        Notes(store, partial(asking.ask, deadline=deadline)).leave(Failure.of(error, rank), None)
