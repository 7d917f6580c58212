"""The connection of a rank to the Coordinator, by which it finds out who arrives, who fails and who ends, until the ranks are
connected to each other."""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from gradwire.collectives.control.asking import POLL_S
from gradwire.collectives.control.channel import ANSWER_S, Failure
from gradwire.collectives.control.coordinator import Card
from gradwire.collectives.control.neighbour import Neighbour, poll_of
from gradwire.collectives.control.records import Connection
from gradwire.collectives.errors import ForgedMessage, LinkError, ranks_text
from gradwire.collectives.forks import in_forked_child


class TurnedAway(LinkError):
    """The Coordinator rejects the process of a rank. again: whether the process may try again."""

    def __init__(self, rank: int, why: str, *, again: bool) -> None:
        super().__init__(rank, timed_out=False, detail=why)
        self.again = again


class CoordinatorClient:
    """Holds this rank's connection to the Coordinator, and the state of the ranks that arrive with it. It has no thread.

    is_admitted: whether the Coordinator has admitted this process. cards: the cards of all ranks, by rank; empty until all have
    arrived. key: a name for these ranks only, set when all have arrived.
    """

    def __init__(self, card: Card, coordinator_rank: int, connection: Connection) -> None:
        """Send the Coordinator this process's card. connection: authenticated; this object closes it."""
        self.rank, self._size = card["rank"], card["size"]
        self.is_admitted = False
        self.cards: list[Card] = []
        self.key = ""
        self.failure: Failure | None = None
        self._coordinator_rank = coordinator_rank
        self._neighbour = Neighbour(connection)
        self._ended_ranks: set[int] = set()
        self._left: set[int] = set()
        self._running: set[int] = set()
        self._refused: TurnedAway | None = None
        self._ended = False
        self._process = os.getpid()
        self._say(kind="arrived", card=card)
        in_forked_child(self, lambda client: client._neighbour.socket.close())

    def check(self) -> None:
        """Raise LinkError with the ranks, if ranks have reported that they cannot connect, or have ended before they left."""
        self._look()
        if self.failure is not None:
            raise self.failure.as_link_error()
        if self._ended_ranks:
            raise Failure.loss_of(self._ended_ranks).as_link_error()

    def report(self, failure: Failure) -> None:
        """Report to all ranks why the ranks cannot connect. The first report counts."""
        self._say(kind="failure", **asdict(failure))

    def await_all(self, deadline: float) -> Iterator[None]:
        """Yield until all ranks have arrived, so that the caller can check other conditions. deadline:
        time.monotonic().

        Raises TurnedAway if the Coordinator rejects this process; LinkError if a rank has ended or reports a failure, and at
        the deadline, with the ranks that did not arrive.
        """
        while not self.cards:
            self._look()
            if self._refused is not None:
                raise self._refused
            if self.failure is not None:
                raise self.failure.as_link_error()
            if gone := self._ended_ranks or self._left:
                raise Failure.loss_of(gone).as_link_error()
            if self.cards:
                return
            if time.monotonic() >= deadline:
                missing = self.silent()
                if self._refused is not None:
                    raise self._refused
                detail = f"{ranks_text(missing)} did not arrive" if missing else "the ranks arrived too late"
                raise LinkError(None, timed_out=True, detail=detail, awaited=missing)
            self._wait(POLL_S)
            yield

    def close(self) -> None:
        """Report that this rank leaves, and close the connection. Calling it again does nothing."""
        if os.getpid() == self._process and not self._ended:
            self._say(kind="left")
            self._ended = True
            self._neighbour.socket.close()

    def silent(self) -> Sequence[int]:
        """Return the other ranks that have not arrived, are stopped, or are busy elsewhere: those that do not answer. If this
        rank's question does not come back, return the Coordinator's rank; if a failure has been reported, the ranks at fault."""
        self._running.clear()
        self._say(kind="who runs")
        asked = time.monotonic()
        while len(self._running) < self._size:
            if time.monotonic() >= asked + (ANSWER_S if self._running else 2 * ANSWER_S):
                break
            self._look()
            if self.failure is not None:
                return [rank for rank in self.failure.ranks if rank != self.rank]
            self._wait(POLL_S)
        if not self._running:
            return [self._coordinator_rank]
        return sorted(set(range(self._size)) - self._running - self._left)

    def _wait(self, seconds: float) -> None:
        """Wait until there is something to read."""
        (select.poll() if self._ended else poll_of([self._neighbour.socket])).poll(seconds * 1000)

    def _say(self, **message: Any) -> None:
        if not self._ended:
            self._neighbour.say(**message)

    def _look(self) -> None:
        """Process the messages of the Coordinator that have arrived."""
        if self._ended or os.getpid() != self._process:
            return
        self._neighbour.write()
        messages, self._ended = self._neighbour.read()
        for message in messages:
            self._take(json.loads(message))
        if self._ended:
            if self._neighbour.is_forged and self.failure is None:
                self.failure = Failure.of(ForgedMessage(self._coordinator_rank, self.rank), self.rank)
            if self._coordinator_rank not in self._left:
                self._ended_ranks.add(self._coordinator_rank)
            self._neighbour.socket.close()

    def _take(self, message: Card) -> None:
        kind = message["kind"]
        if kind == "admitted":
            self.is_admitted = True
        elif kind == "all":
            self.key, self.cards = message["key"], message["cards"]
        elif kind == "refused":
            self._refused = TurnedAway(self.rank, message["why"], again=message["again"])
        elif kind == "who runs":
            self._say(kind="runs", rank=self.rank)
        elif kind == "runs":
            self._running.add(message["rank"])
        elif kind == "gone":
            (self._left if message["left"] else self._ended_ranks).add(message["rank"])
        elif kind == "failure":
            self.failure = self.failure or Failure.from_record(message)
