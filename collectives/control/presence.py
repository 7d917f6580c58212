"""The Presence of a rank, which detects that other ranks have ended or cannot connect, from its arrival on.

A Watch detects this among the ranks of a Communicator, but only once they are connected. Until then, every rank holds
one connection to a hub on one of the ranks (see arrival.py).
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from gradwire.collectives.control.asking import POLL_S
from gradwire.collectives.control.hub import ANSWER_S, Card, Failure, Hub
from gradwire.collectives.control.watch import Neighbour, poll_of
from gradwire.collectives.errors import LinkError, ranks_text
from gradwire.collectives.forks import in_forked_child


class TurnedAway(LinkError):
    """The hub rejects the process of a rank. again: whether the process may try again."""

    def __init__(self, rank: int, why: str, *, again: bool) -> None:
        super().__init__(rank, timed_out=False, detail=why)
        self.again = again


class Presence:
    """Holds this rank's connection to the hub, and the state of the ranks that arrive with it.

    is_admitted: whether the hub has admitted this process. cards: the cards of all ranks, by rank; empty until all have
    arrived. key, secret: a name and a secret (hexadecimal digits) for these ranks only, set when all have arrived.
    """

    def __init__(self, card: Card, hub_rank: int, connection: socket.socket, hub: Hub | None = None) -> None:
        """Send the hub this process's card. connection: authenticated, to the hub; the Presence closes it. hub: the Hub if it
        runs in this process."""
        self.rank = card["rank"]
        self.is_admitted = False
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
        self._say(kind="arrived", card=card)
        in_forked_child(self, Presence.disown)

    def gone(self) -> set[int]:
        """Return the ranks whose process has ended; if there are none, the ranks that have left, as ranks do once they
        are connected."""
        return self.ended() or set(self._left)

    def ended(self) -> set[int]:
        """Return the ranks whose process has ended before it left."""
        self._look()
        return set(self._ended_ranks)

    def failure(self, scope: str = "") -> Failure | None:
        """Return the first failure reported for a scope, or None. scope: a name for the ranks that connect."""
        self._look()
        return self._failures.get(scope)

    def report(self, failure: Failure, scope: str = "") -> None:
        """Report to all ranks why the ranks of a scope cannot connect. The first report of a scope counts."""
        self._say(kind="failure", scope=scope, **asdict(failure))

    def silent(self, scope: str = "") -> Sequence[int]:
        """Ask the hub which other ranks do not answer, and return them: ranks that have not arrived, are stopped, or
        are busy. If the hub does not answer, return its rank. If a failure of this scope has been reported, return the
        ranks at fault."""
        self._silent.clear()
        self._say(kind="who is silent")
        deadline = time.monotonic() + 2 * ANSWER_S
        while time.monotonic() < deadline:
            self._look()
            failure = self._failures.get(scope)
            if failure is not None or self._silent:
                # This rank may have answered late, but it runs.
                return [rank for rank in (failure.ranks if failure else self._silent[-1]) if rank != self.rank]
            self._wait(POLL_S)
        return [self._hub_rank]

    def await_all(self, deadline: float) -> Iterator[None]:
        """Yield until all ranks have arrived, so that the caller can check other conditions. deadline:
        time.monotonic().

        Raises TurnedAway if the hub rejects this process; LinkError if a rank has ended or reports a failure, and at
        the deadline, with the ranks that did not arrive.
        """
        while not self.cards:
            gone = self.gone()  # one look for all checks: the end of a connection follows the reason for it
            if self._refused is not None:
                raise self._refused
            if (failure := self._failures.get("")) is not None:
                raise failure.as_link_error()
            if gone:
                raise Failure.loss_of(gone).as_link_error()
            if time.monotonic() >= deadline:
                missing = self.silent()
                if self._refused is not None:
                    raise self._refused
                detail = f"{ranks_text(missing)} did not arrive" if missing else "the ranks arrived too late"
                raise LinkError(None, timed_out=True, detail=detail, awaited=missing)
            self._wait(POLL_S)
            self._look()
            yield

    def close(self) -> None:
        """Report that this rank leaves, and close the connection, which ends a hub in this process. Calling it again
        does nothing."""
        if os.getpid() != self._process or self._ended:
            return
        self._say(kind="left")
        with self._lock:
            self._ended = True
            self._neighbour.socket.close()
        if self._hub is not None:
            self._hub.join()

    def disown(self) -> None:
        """Close a forked child's copies of the connections, which must end with the rank itself."""
        self._neighbour.socket.close()
        if self._hub is not None:
            self._hub.disown()

    def _wait(self, seconds: float) -> None:
        """Wait until there is something to read."""
        (select.poll() if self._ended else poll_of([self._neighbour.socket])).poll(seconds * 1000)

    def _say(self, **message: Any) -> None:
        with self._lock:
            if not self._ended:
                self._neighbour.say(**message)

    def _look(self) -> None:
        """Process the messages of the hub that have arrived."""
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
        if kind == "admitted":
            self.is_admitted = True
        elif kind == "all":
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
