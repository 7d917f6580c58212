"""What servers inside the ranks have in common: the threads that answer workers, and what both sides say."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch

from gradwire.collectives import CollectiveError, Communicator
from gradwire.trainer.servers.aggregator import Counts
from gradwire.trainer.servers.connection import of_pair, receive, to_bytes
from gradwire.trainer.world.world import here

LEAVE, COUNTS, OWN = range(3)
"""What every worker may say: that it is done, or that it wants the Counts; from OWN on, what else it may say to a server."""

DONE, FAILED = range(2)
"""What a server answers."""

_LET_GO_S = 2.0
"""What a thread has for its end once its Communicator is closed."""

_log = logging.getLogger("gradwire")


class Served(Protocol):
    """Is what a server holds, and is told of workers that take no part any more. Attribute rank: the server's."""

    rank: int

    def leave(self, worker: int) -> None:
        """Go on without a worker that is done."""

    def lose(self, worker: int, error: CollectiveError) -> None:
        """Go on without a worker that has failed. error: that tells of it."""

    def counts(self) -> Counts:
        """Return what became of all contributions so far."""


class Serving(ABC):
    """Answers workers of other ranks, each with a thread and a Communicator of its own, in which it has rank 1.

    name: in messages. served: what is told of workers whose thread is over.
    """

    def __init__(self, name: str, served: Served, communicators: Mapping[int, Communicator]) -> None:
        self._name = name
        self._operation = f"serving at {name}"
        self._served = served
        self._threads = [
            threading.Thread(target=self._serve, args=each, name=f"gradwire-server-{each[0]}", daemon=True)
            for each in communicators.items()
        ]
        for thread in self._threads:
            thread.start()

    def join(self, deadline: float) -> bool:
        """Wait until all workers are done or lost, but not beyond the deadline (time.monotonic()); return whether they are."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def finish(self, deadline: float) -> None:
        """Wait as join() does, and warn where workers are left alone."""
        if not self.join(deadline):
            _log.warning("gradwire: %s%s closes while other ranks still use it", here(), self._name)

    def _serve(self, worker: int, communicator: Communicator) -> None:
        try:
            while (said := _head(communicator))[0] != LEAVE:
                if said[0] == COUNTS:
                    say(communicator, DONE, self._served.counts().to_record())
                else:
                    self._answer(worker, communicator, *said)
            self._served.leave(worker)
        except CollectiveError as error:
            if not threading.main_thread().is_alive():  # it is this process that ends, and no worker is to blame
                return
            rank = self._served.rank
            self._lose(worker, of_pair(error, (worker, rank), rank, self._operation))
        except Exception as error:  # else the thread would end, and the worker wait for an answer
            message = f"no answer to rank {worker}: {error!r}"
            self._lose(worker, CollectiveError(message, rank=self._served.rank, operation=self._operation))
            communicator.close()

    def _lose(self, worker: int, error: CollectiveError) -> None:
        _log.warning("gradwire: %s goes on without rank %d: %s", self._name, worker, error)
        self._served.lose(worker, error)

    @abstractmethod
    def _answer(self, worker: int, communicator: Communicator, kind: int, numbers: Sequence[float]) -> None:
        """Answer what a worker says, of a kind of the server's own, with three numbers."""


def end(serving: Serving | None, deadline: float, *, leave: Callable[[], None], close: Callable[[], None]) -> None:
    """End what a rank has at servers: say by `leave` that nothing more comes, serve others until they say so, but not beyond the
    deadline (time.monotonic()), close the Communicators, and wait until the threads that used them have ended. serving: None
    where it does not serve."""
    try:
        leave()
        if serving is not None:
            serving.finish(deadline)
    finally:
        close()
        if serving is not None:
            serving.join(time.monotonic() + _LET_GO_S)


def say(communicator: Communicator, kind: int, record: dict[str, Any]) -> None:
    """Send a worker a head, of the kind and the number of bytes that follow, and a record, as JSON can have it."""
    text = to_bytes(record)
    communicator.send(torch.tensor([kind, text.numel()], dtype=torch.float64), 0)
    communicator.send(text, 0)


def _head(communicator: Communicator) -> tuple[int, list[float]]:
    """Return the head of what a worker says: its kind, and three numbers."""
    head = torch.empty(4, dtype=torch.float64)
    communicator.recv(head, 0)
    kind, *numbers = head.tolist()
    return int(kind), numbers


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
