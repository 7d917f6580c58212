"""The messages between a server inside a rank and its workers: the threads that answer requests, and the clients that send
them.

The server and each worker on another rank share a Communicator of two ranks: the worker is rank 0, and the server is rank 1.
For each worker, the server has a thread that receives requests. So threads do not wait for each other, and if a rank is lost,
only its own Communicators break.

A request is a head of four float64 values, the kind and three numbers whose meaning depends on the kind, followed by the
tensors of that kind. An answer is a head of two float64 values: DONE and a number, followed by the requested tensors; or FAILED
and a number of bytes, followed by the record of an error as JSON. LEAVE has no answer. The answer to COUNTS is a record. Each
server defines further kinds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from gradwire.collectives import CollectiveError, Communicator
from gradwire.collectives.communicator import close_all
from gradwire.trainer.servers.aggregator import Counts
from gradwire.trainer.servers.connection import from_record, of_pair, receive, to_bytes, to_record
from gradwire.trainer.world.world import here

LEAVE, COUNTS, OWN = range(3)
"""Kinds of request. LEAVE: a worker has finished. COUNTS: return the Counts. OWN: the first kind that a server may define."""

DONE, FAILED = range(2)

Answer: TypeAlias = "tuple[float, Sequence[Tensor]]"
"""A number and tensors. Their meaning depends on the kind of the request."""

Answering: TypeAlias = Callable[[int, Communicator, int, Sequence[float]], "Callable[[], Answer] | None"]
"""A function that receives the tensors of a request of one of the server's own kinds. Its arguments are the worker, the
worker's Communicator, the kind and the three numbers. It returns a function that computes the answer, or None for no answer. If
that function fails, the worker raises its error."""

_LET_GO_S = 2.0
"""How many seconds close() waits for a thread to end after it has closed the thread's Communicator."""

_LEAST_S = 0.01
"""The timeout in seconds of an operation whose deadline has passed: what has arrived by then is still received."""

_log = logging.getLogger("gradwire")


class Served(Protocol):
    """Holds the data of a server. Attribute rank: the server's rank."""

    rank: int

    def leave(self, worker: int) -> None:
        """Remove a worker that has finished."""

    def lose(self, worker: int, error: CollectiveError) -> None:
        """Remove a worker that has failed. error: the cause."""

    def counts(self) -> Counts:
        """Return the Counts of all contributions so far."""


class Serving:
    """Answers workers on other ranks, each on a separate thread and Communicator.

    served: the server's data, with leave() and lose() to remove workers. answer: handles the kinds of request that the server
    defines. Attribute name: the name of the server in messages.
    """

    def __init__(self, name: str, served: Served, answer: Answering, communicators: Mapping[int, Communicator]) -> None:
        self.name = name
        self._served = served
        self._answer = answer
        self._threads = [
            threading.Thread(target=self._serve, args=each, name=f"gradwire-server-{each[0]}", daemon=True)
            for each in communicators.items()
        ]
        for thread in self._threads:
            thread.start()

    def join(self, deadline: float) -> bool:
        """Wait until all workers have left or are lost, or until the deadline (time.monotonic()). Return whether none
        remains."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _serve(self, worker: int, communicator: Communicator) -> None:
        rank, operation = self._served.rank, f"serving at {self.name}"
        try:
            while (kind := int((head := _received(communicator, 4))[0])) != LEAVE:
                answer = self._counts if kind == COUNTS else self._answer(worker, communicator, kind, head[1:])
                if answer is not None:
                    _send(communicator, answer)
            self._served.leave(worker)
        except CollectiveError as error:
            if threading.main_thread().is_alive():  # else this process is exiting, and no worker is at fault
                self._lose(worker, of_pair(error, (worker, rank), rank, operation), error)
        except Exception as error:  # else the thread would end, and the worker would wait for an answer
            failure = CollectiveError(f"no answer to rank {worker}: {error!r}", rank=rank, operation=operation)
            self._lose(worker, failure, error)
            communicator.close()

    def _lose(self, worker: int, error: CollectiveError, cause: Exception) -> None:
        error.__cause__ = cause
        _log.warning("gradwire: %s continues without rank %d: %s", self.name, worker, error)
        self._served.lose(worker, error)

    def _counts(self) -> Answer:
        text = to_bytes(self._served.counts().to_record())
        return text.numel(), [text]


def _received(communicator: Communicator, count: int) -> list[float]:
    head = torch.empty(count, dtype=torch.float64, device="cpu")
    communicator.recv(head, 0)
    numbers: list[float] = head.tolist()
    return numbers


def _send(communicator: Communicator, answer: Callable[[], Answer]) -> None:
    """Compute an answer and send it. If the computation fails, send its error."""
    try:
        kind, (number, tensors) = DONE, answer()
    except Exception as error:
        text = to_bytes(to_record(error))
        kind, number, tensors = FAILED, text.numel(), [text]
    communicator.send(torch.tensor([kind, number], dtype=torch.float64, device="cpu"), 0)
    for tensor in tensors:
        communicator.send(tensor, 0)


class _Failed(Exception):
    """Carries the record of the error that a server has sent."""


class Client:
    """Sends requests to a server on another rank. name: the name of the server in messages.

    Attributes: server, the server's rank; is_answer_due, whether this worker still has to receive an answer.
    """

    def __init__(self, name: str, rank: int, server: int, communicator: Communicator) -> None:
        self.server = server
        self.is_answer_due = False
        self._name = name
        self._rank = rank
        self._communicator = communicator
        self._is_between_messages = True

    def counts(self) -> Counts:
        """Return the counts of all contributions so far, once all messages of this worker have arrived."""
        with self._reached("report"):
            self._request(COUNTS)
            return Counts.from_record(receive(self._communicator, int(self._receive()), 1))

    def leave(self, deadline: float = 0.0) -> None:
        """Announce that this worker sends nothing more. If a message was interrupted, close the Communicator, which the server
        detects. deadline (time.monotonic()): the limit for subclasses that wait for an answer."""
        if self._is_between_messages:
            with suppress(CollectiveError):  # a lost server needs no announcement
                self._request(LEAVE)
        else:
            self._communicator.close()

    def _request(self, kind: int, *numbers: float, tensors: Sequence[Tensor] = ()) -> None:
        """Send a request, with up to three numbers."""
        head = [kind, *numbers, *[0.0] * (3 - len(numbers))]
        for tensor in (torch.tensor(head, dtype=torch.float64, device="cpu"), *tensors):
            self._communicator.send(tensor, 1)

    def _receive(self, tensors: Sequence[Tensor] = ()) -> float:
        """Receive an answer into tensors, and return its number. Raises _Failed if the server sends an error."""
        head = torch.empty(2, dtype=torch.float64, device="cpu")
        self._communicator.recv(head, 1)
        self.is_answer_due = False
        kind, number = head.tolist()
        if kind == FAILED:
            raise _Failed(receive(self._communicator, int(number), 1))
        for tensor in tensors:
            self._communicator.recv(tensor, 1)
        return float(number)

    @contextmanager
    def _until(self, deadline: float) -> Iterator[None]:
        """Give each operation in this block the time until a deadline (time.monotonic()), instead of the Communicator's
        timeout_s."""
        timeout_s = self._communicator.timeout_s
        self._communicator.timeout_s = max(_LEAST_S, deadline - time.monotonic())
        try:
            yield
        finally:
            self._communicator.timeout_s = timeout_s

    @contextmanager
    def _reached(self, operation: str) -> Iterator[None]:
        """Raise the error that the server has sent, if any. In errors of the Communicator of two ranks, replace ranks 0 and 1
        by the worker's and the server's rank."""
        operation = f"{operation} at {self._name} on rank {self.server}"
        self._is_between_messages = False
        try:
            yield
        except _Failed as failed:
            self._is_between_messages = True
            raise from_record(failed.args[0], self._rank, operation) from None
        except CollectiveError as error:
            raise of_pair(error, (self._rank, self.server), self._rank, operation) from error
        self._is_between_messages = True


_Held = TypeVar("_Held", bound=Served)


class LocalClient(Generic[_Held]):
    """Calls the server on the same rank, without messages."""

    is_answer_due = False

    def __init__(self, served: _Held) -> None:
        self.server = served.rank
        self._served = served

    def counts(self) -> Counts:
        """Return the Counts of all contributions so far."""
        return self._served.counts()

    def leave(self, deadline: float = 0.0) -> None:
        """Announce that this worker sends nothing more."""
        self._served.leave(self.server)


class ServerAndClients:
    """Holds this rank's server and clients until close(). timeout_s: the timeout_s of init().

    Attributes: communicators, which close() closes in reverse order; clients, one for each server that this rank uses; serving,
    the threads of this rank's server, None if this rank does not serve; is_closed.
    """

    def __init__(self, timeout_s: float) -> None:
        self.communicators: list[Communicator] = []
        self.clients: list[Client | LocalClient[Any]] = []
        self.serving: Serving | None = None
        self.is_closed = False
        self._timeout_s = timeout_s

    def close(self, timeout_s: float | None) -> None:
        """Announce to all servers that this rank sends nothing more, serve the other ranks until they have announced the same,
        close the Communicators, and end the threads. Further calls do nothing.

        Servers whose answer is due get the announcement last, since other ranks may have to leave before they can answer.
        timeout_s: how long to serve the others before a warning is logged and the Communicators are closed; None for the
        timeout_s of init().
        """
        if self.is_closed:
            return
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        try:
            for client in sorted(self.clients, key=lambda client: client.is_answer_due):
                client.leave(deadline)
            if self.serving is not None and not self.serving.join(deadline):
                _log.warning("gradwire: %s%s closes while other ranks still use it", here(), self.serving.name)
        finally:
            self.break_off()
            if self.serving is not None:
                self.serving.join(time.monotonic() + _LET_GO_S)

    def break_off(self) -> None:
        """Close the Communicators at once."""
        self.is_closed = True
        close_all(reversed(self.communicators))
