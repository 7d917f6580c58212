"""What servers inside the ranks have in common: the threads that answer workers, and what both sides say."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from collectives import CollectiveError, Communicator
from trainer.server.aggregator import Counts
from trainer.server.errors import of_pair
from trainer.server.records import to_bytes
from trainer.world import here

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
