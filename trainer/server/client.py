"""What stands at a worker for a server on another rank: what it is asked, and how its errors are named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from collectives import CollectiveError, Communicator
from trainer.server.aggregator import Counts
from trainer.server.errors import of_pair
from trainer.server.records import receive
from trainer.server.serving import COUNTS, FAILED, LEAVE


class Client:
    """Speaks to a server on another rank, in whose Communicator the worker has rank 0, and the server rank 1.

    name: of the server, in messages. Attribute server: its rank.
    """

    def __init__(self, name: str, rank: int, server: int, communicator: Communicator) -> None:
        self.server = server
        self._name = name
        self._rank = rank
        self._communicator = communicator
        self._is_between_messages = True

    def counts(self) -> Counts:
        """Ask what became of all contributions so far, when all that this worker has sent has come there."""
        with self._reached("report"):
            self._say(COUNTS)
            nbytes, _ = self._hear()
            return Counts.from_record(receive(self._communicator, nbytes, 1))

    def leave(self) -> None:
        """Say that nothing more comes. Where a message was broken off, which ends the Communicator, the server sees that."""
        if self._is_between_messages:
            with suppress(CollectiveError):  # a server that is lost need not know
                self._say(LEAVE)
        else:
            self._communicator.close()

    def _say(self, kind: int, first: float = 0, second: float = 0, third: float = 0) -> None:
        """Send a head, with three numbers that mean what the kind says."""
        self._communicator.send(torch.tensor([kind, first, second, third], dtype=torch.float64), 1)

    def _hear(self, timeout_s: float | None = None) -> tuple[int, dict[str, Any] | None]:
        """Return the number in the head of the server's answer, and what it says of an error; None where there was none.
        timeout_s: until the answer begins; None for that of the Communicator."""
        head = torch.empty(2, dtype=torch.float64)
        if timeout_s is None:
            self._communicator.recv(head, 1)
        else:
            self._communicator.recv(head, 1, async_op=True).wait(timeout_s)
        kind, number = map(int, head.tolist())
        return number, receive(self._communicator, number, 1) if kind == FAILED else None

    @contextmanager
    def _reached(self, operation: str) -> Iterator[None]:
        """Give errors of the Communicator, which knows two ranks, the numbers that these have among all."""
        self._is_between_messages = False
        try:
            yield
            self._is_between_messages = True
        except CollectiveError as error:
            raise of_pair(error, (self._rank, self.server), self._rank, self._at(operation)) from error

    def _at(self, operation: str) -> str:
        return f"{operation} at {self._name} on rank {self.server}"
