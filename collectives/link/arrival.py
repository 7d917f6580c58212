"""The arrival of the ranks of a job: each connects to a hub on one of the ranks, whose address is in the store."""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Callable, Collection
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

#: The rank of this process, and the key of the hub, in each earlier arrival. A process uses no hub twice.
_used: set[tuple[int, str]] = set()


def arrive(
    store: Store,
    size: int,
    card: Card,
    deadline: float,
    *,
    hub_rank: int | None = None,
    admission: Admission | None = None,
    keepers: Collection[int] = (),
    by_agent: bool = False,
    lost: Callable[[], Collection[int]] | None = None,
) -> Presence:
    """Connect to the hub, and return this rank's Presence once all ranks have arrived. A collective call.

    card: that of this process, from own_address.card_of, with the data that `admission` needs as "identity". deadline:
    time.monotonic() seconds. hub_rank: the rank that runs the hub; None for the first rank that arrives. keepers: the
    rank whose process serves the store, if one does. by_agent: whether a launcher does, and may restart all ranks. lost:
    returns, without waiting, the ranks whose end a launcher has noted, including ranks that never arrived.

    The store may hold the address of an earlier hub, which the new one replaces. This rank ignores a hub that this
    process has used; by_agent, also one that has ended, even if another program listens at its address now.

    Raises TurnedAway if the hub rejects this process; LinkError if a rank has ended or cannot connect, and at the
    deadline, with the ranks that did not arrive; OSError if this process lacks the resources to connect.
    """
    with closing(Asking(store, keepers=keepers)) as asking:
        arrival = _Arrival(store, asking, size, card, deadline, hub_rank, admission or Admission(), by_agent, lost)
        while True:
            try:
                return arrival.attempt()
            except TurnedAway as refused:
                if not refused.again:
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
                self._check_lost()
                if hub is None:
                    if self.by_agent and not presence.is_admitted:
                        self._check_replaced(hub_card)
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
            if presence is not None and hub is None and not presence.is_admitted and self._may_be_stale(error):
                presence.close()
                raise TurnedAway(hub_card["rank"], str(error), again=True) from error
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

    def _check_replaced(self, hub_card: Card) -> None:
        """Raise TurnedAway with `again` if the store names another hub by now."""
        if json.loads(self._ask(lambda: self.store.get(_HUB)))["key"] != hub_card["key"]:
            raise TurnedAway(hub_card["rank"], "another hub has replaced it", again=True)

    def _may_be_stale(self, error: Exception) -> bool:
        """Return whether an error before the admission may be that of a hub that ended before a launcher restarted the
        ranks: no process listens at its address, or another program does, which answers with anything."""
        ended = error.ended if isinstance(error, LinkError) else isinstance(error, LookupError | TypeError | ValueError)
        return ended and self.by_agent and time.monotonic() < self.deadline

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
        store, ask, rank = self.store, self._ask, self.card["rank"]
        if self.hub_rank == rank:
            hub, made = self._make_hub()
            ask(lambda: store.set(_HUB, json.dumps(made)))
            _used.add((rank, made["key"]))
            return made, hub
        while True:
            self._check_lost()
            earlier, hub = ask(lambda: store.get(_HUB)).decode() if ask(lambda: store.check([_HUB])) else "", None
            found = json.loads(earlier) if earlier else None
            if self.hub_rank is None and (found is None or (rank, found["key"]) in _used):
                hub, made = self._make_hub()
                found = json.loads(ask(partial(store.compare_set, _HUB, earlier, json.dumps(made))))
                if hub is not None and found["key"] != made["key"]:
                    hub.disown()
                    hub = None
            if found is not None and (rank, found["key"]) not in _used:
                _used.add((rank, found["key"]))
                return found, hub
            if time.monotonic() >= self.deadline:
                absent = self.hub_rank if self.hub_rank in range(self.size) else None
                detail = (
                    "no rank of this job accepts connections" if absent is None else f"rank {absent} did not arrive"
                )
                raise LinkError(absent, timed_out=True, detail=detail)
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
                connection = dial(*place, self.deadline, self._check_lost, set_up, small_segments=True)
            except LinkError as error:
                error.ended |= isinstance(error.__cause__, ConnectionError)  # or already set, by _check_lost()
                if self._may_be_stale(error):
                    raise TurnedAway(hub_card["rank"], str(error), again=True) from error
                if (failure := self._read(note)) is not None:
                    raise failure.as_link_error() from error
                raise
        return Presence(self.card, hub_card, connection, hub)
