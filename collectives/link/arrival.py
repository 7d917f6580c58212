"""The arrival of the ranks of a job: each connects to a hub on one of the ranks, whose address is in the store."""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Callable, Collection, Container
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import TypeVar

from torch.distributed.distributed_c10d import Store

from gradwire.collectives.errors import LinkError
from gradwire.collectives.link.asking import POLL_S, Asking
from gradwire.collectives.link.handshake import dial, set_up
from gradwire.collectives.link.hub import Admission, Card, Failure, Hub
from gradwire.collectives.link.own_address import check_addresses
from gradwire.collectives.link.presence import Presence, TurnedAway

_Answer = TypeVar("_Answer")

_HUB = "hub"
_KEY_BYTES = 16


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
    """Connect to the hub, and return this rank's Presence once all ranks have arrived. A collective call.

    card: that of this process, from own_address.card_of, with the data that `admission` needs as "identity". deadline:
    time.monotonic() seconds. hub_rank: the rank that runs the hub, and replaces an earlier hub's address in the store;
    None for the first rank that arrives, in a store that has never held a hub's address. left: the keys of hubs that
    this process has left. keepers: the rank whose process serves the store, if one does. by_agent: whether a launcher
    serves the store; only with hub_rank. A launcher may restart all ranks, so the store may hold the address of a hub
    that has ended, at which another program may listen by now. This rank then waits for a new hub. lost: returns,
    without waiting, the ranks whose end a launcher has noted, including ranks that never arrived.

    Raises TurnedAway if the hub rejects this process, and at the deadline if no new hub has replaced an earlier one;
    LinkError if a rank has ended or cannot connect, and at the deadline, with the ranks that did not arrive; OSError if
    this process lacks the resources to connect.
    """
    with closing(Asking(store, keepers=keepers)) as asking:
        arrival = _Arrival(
            store, asking, size, card, deadline, hub_rank, admission or Admission(), left, by_agent, lost
        )
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
    size: int
    card: Card
    deadline: float
    hub_rank: int | None
    admission: Admission
    left: Container[str]
    by_agent: bool
    lost: Callable[[], Collection[int]] | None

    def attempt(self) -> Presence:
        """Try once to arrive. Return and raise as arrive() does; raise TurnedAway with `again` to try again."""
        hub_card, hub = self._find_hub()
        note = f"failure/{hub_card['key']}"
        presence: Presence | None = None
        try:
            presence = self._enter(hub_card, hub, note)
            for _ in presence.await_all(self.deadline):
                if hub is None and not presence.is_admitted:
                    self._check_hub(hub_card)
                else:
                    self._check_lost()
                if hub is None:
                    continue
                socket.socket().close()  # raises OSError if the hub could accept no more ranks
                if (failure := self._read(note)) is not None:
                    presence.report(failure)
            check_addresses(presence.cards)
            return presence
        except TurnedAway:
            if presence is not None:
                presence.close()
            raise
        except Exception as error:
            if presence is not None and hub is None and self.by_agent and _is_of_stranger(error, presence):
                presence.close()
                why = f"another program listens at the address of rank {hub_card['rank']} in the store"
                raise TurnedAway(hub_card["rank"], why, again=True) from error
            failure = Failure.of(error, self.card["rank"])
            if presence is not None:
                # First, because the store may be slow, and this process answers no inquiry of the hub meanwhile.
                presence.report(failure)
            with suppress(Exception):  # if the store has ended, the other ranks detect that
                self._ask(lambda: self.store.compare_set(note, "", json.dumps(asdict(failure))))
            if presence is not None:
                presence.close()
            elif hub is not None:
                hub.disown()
            raise

    def _check_lost(self) -> None:
        """Raise LinkError if the launcher has noted the end of ranks, including ranks that never arrived."""
        if self.lost is not None and (lost := self.lost()):
            raise Failure.loss_of(lost).as_link_error()

    def _check_hub(self, hub_card: Card) -> None:
        """Raise as _check_lost(), and TurnedAway with `again` if a launcher may restart all ranks, and the store names a newer
        hub."""
        self._check_lost()
        if self.by_agent and json.loads(self._ask(lambda: self.store.get(_HUB)))["key"] != hub_card["key"]:
            raise TurnedAway(hub_card["rank"], "a newer hub has replaced it", again=True)

    def _read(self, note: str) -> Failure | None:
        """Return the first failure in the store, or None. The rank that wrote it need not be connected to the hub."""
        if not self._ask(lambda: self.store.check([note])):
            return None
        return Failure.from_record(json.loads(self._ask(lambda: self.store.get(note))))

    def _ask(self, call: Callable[[], _Answer]) -> _Answer:
        """Return the result of a call to the store. Raises as Asking.ask."""
        return self.asking.ask(call, self.deadline)

    def _find_hub(self) -> tuple[Card, Hub | None]:
        """Return the card of the hub, and the hub if it runs in this process. Raises LinkError at the deadline."""
        store, ask = self.store, self._ask
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
                rank = self.hub_rank if self.hub_rank in range(self.size) else None
                detail = "no rank of this job accepts connections" if rank is None else f"rank {rank} did not arrive"
                raise LinkError(rank, timed_out=True, detail=detail)
            time.sleep(POLL_S)

    def _make_hub(self) -> tuple[Hub | None, Card]:
        """Return a hub in this process, and its card. If it cannot listen, return None and a card with the reason."""
        made = self.card | {"key": secrets.token_hex(_KEY_BYTES), "token": secrets.token_hex(_KEY_BYTES)}
        if self.card["problem"]:
            return None, made
        try:
            hub = Hub(made, self.size, self.admission)
        except OSError as error:
            return None, made | {"problem": f"cannot listen for the other ranks: {error}"}
        return hub, hub.card

    def _enter(self, hub_card: Card, hub: Hub | None, note: str) -> Presence:
        """Connect to the hub, and send it this process's card. If the hub cannot be reached, raise LinkError, with the
        first failure in the store if there is one, or TurnedAway with `again` if a launcher may restart the hub."""
        check_addresses([hub_card, self.card | {"loopback": "", "problem": ""}])
        if hub is not None:
            connection, theirs = socket.socketpair()
            theirs.setblocking(False)
            connection.setblocking(False)
            hub.start(theirs)
        else:
            place = hub_card["rank"], hub_card["address"], hub_card["port"]
            try:
                check = partial(self._check_hub, hub_card)  # the host of an earlier hub may be gone
                connection = dial(*place, self.deadline, check, set_up, small_segments=True)
            except TurnedAway:
                raise
            except LinkError as error:
                error.ended |= isinstance(error.__cause__, ConnectionError)  # or already set, by _check_lost()
                if error.ended and self.by_agent and time.monotonic() < self.deadline:
                    raise TurnedAway(hub_card["rank"], str(error), again=True) from error
                if (failure := self._read(note)) is not None:
                    raise failure.as_link_error() from error
                raise
        return Presence(self.card, hub_card, connection, hub)


def _is_of_stranger(error: Exception, presence: Presence) -> bool:
    """Return whether an error shows that another program listens at the hub's address: it has ended the connection, or has
    sent something else, before the hub admitted this process."""
    has_ended = isinstance(error, LinkError) and error.ended
    return not presence.is_admitted and (has_ended or isinstance(error, LookupError | TypeError | ValueError))
