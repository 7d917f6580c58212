"""The messages between a server inside a rank and its workers: the threads that answer requests, and the clients that send
them.

The server and each worker on another rank share a Communicator of two ranks: the worker is rank 0, and the server is rank 1.
For each worker, the server has a thread that receives requests. So threads do not wait for each other, and if a rank is lost,
only its own Communicators break.

A request is a head of five float64 values, the kind and four numbers whose meaning depends on the kind, followed by the
tensors of that kind. An answer is a head of two float64 values: DONE and a number, followed by the requested tensors; or FAILED
and a number of bytes, followed by the record of an error as JSON.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradwire.collectives import CollectiveError, Communicator
from gradwire.collectives.communicator import close_all
from gradwire.trainer.servers.aggregator import Counts
from gradwire.trainer.servers.connection import from_record, of_pair, open_pairs, receive, to_record
from gradwire.trainer.servers.server import Key, Server
from gradwire.trainer.trees import encode
from gradwire.trainer.world.world import here

LEAVE, COUNTS, PUSH, PUSH_AND_PULL, PULL, SETTINGS, REFUSE = range(7)
"""The kinds of request, and their numbers. LEAVE: a worker has finished; no answer. COUNTS: return the Counts, as a record.
PUSH: the key's number, the step, the weight, and whether the forms of Packing follow (else all gradients are dense); then the
other buffers of Sender.encode(); no answer. PUSH_AND_PULL: the same, then as PULL. PULL: the key's number, and how many row
numbers follow, or -1; return the version and the buffers of the key, or its rows. SETTINGS, REFUSE: a number of bytes, then the
argument of Server.take_settings() or refuse() as JSON; no answer."""

DONE, FAILED = range(2)

_ALL_ROWS = -1

Answer: TypeAlias = "tuple[float, Sequence[Tensor]]"
"""A number and tensors. Their meaning depends on the kind of the request."""

_LET_GO_S = 2.0
"""How many seconds close() waits for a thread to end after it has closed the thread's Communicator."""

_LEAST_S = 0.01
"""The timeout in seconds of an operation whose deadline has passed: what has arrived by then is still received."""

_log = logging.getLogger("gradwire")


class Serving:
    """Answers workers on other ranks, each on a separate thread and Communicator. Attribute name: the name of the server in
    messages."""

    def __init__(self, name: str, server: Server, communicators: Mapping[int, Communicator]) -> None:
        self.name = name
        self._server = server
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
        rank, operation = self._server.rank, f"serving at {self.name}"
        try:
            while (kind := int((head := _received(communicator, 5))[0])) != LEAVE:
                if (answer := self._answer(worker, communicator, kind, head[1:])) is not None:
                    _send(communicator, answer)
            self._server.leave(worker)
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
        self._server.lose(worker, error)

    def _answer(
        self, worker: int, communicator: Communicator, kind: int, numbers: Sequence[float]
    ) -> Callable[[], Answer] | None:
        """Receive the tensors of a request, and return a function that computes the answer; None for no answer. If that function
        fails, the worker raises its error."""
        server, number, argument = self._server, int(numbers[0]), int(numbers[1])
        if kind == COUNTS:
            return self._counts
        if kind in (SETTINGS, REFUSE):
            act: Callable[[Any], None] = partial(server.take_settings, worker) if kind == SETTINGS else server.refuse
            act(receive(communicator, number, 0))
            return None
        if kind == PULL:
            rows = None
            if argument != _ALL_ROWS:
                communicator.recv(rows := torch.empty(argument, dtype=torch.int64, device="cpu"), 0)
            return lambda: server.pull(worker, number, rows)
        if kind not in (PUSH, PUSH_AND_PULL):
            raise ValueError(f"rank {worker} sent a request of the unknown kind {kind}")
        packing = server.packing(number)
        forms = packing.dense_forms()
        if numbers[3]:
            communicator.recv(forms, 0)
        pushed = [forms, *packing.empty(forms, argument)]
        for buffer in pushed[1:]:
            communicator.recv(buffer, 0)

        push = partial(server.push, worker, number, pushed, argument, numbers[2])
        if kind == PUSH:
            push()
            return None

        def exchange() -> Answer:
            push()
            return server.pull(worker, number)

        return exchange

    def _counts(self) -> Answer:
        text = encode(self._server.counts().to_record())
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
        text = encode(to_record(error))
        kind, number, tensors = FAILED, text.numel(), [text]
    communicator.send(torch.tensor([kind, number], dtype=torch.float64, device="cpu"), 0)
    for tensor in tensors:
        communicator.send(tensor, 0)


class _Failed(Exception):
    """Carries the record of the error that a server has sent."""


class Client:
    """Sends requests to a server on another rank. name: the name of the server in messages. settings: the optimizer whose param
    group settings are sent to the server when they change; None if the server uses its own.

    Attribute server: the server's rank.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        server: int,
        communicator: Communicator,
        settings: torch.optim.Optimizer | None = None,
    ) -> None:
        self.server = server
        self._settings = settings
        self._sent: Tensor | None = None
        self._due: Key | None = None  # whose answer this worker still has to receive
        self._name = name
        self._rank = rank
        self._communicator = communicator
        self._is_between_messages = True

    @property
    def is_answer_due(self) -> bool:
        """Return whether this worker still has to receive an answer."""
        return self._due is not None

    def push(
        self,
        key: Key,
        pushed: Sequence[Tensor],
        step: int,
        *,
        weight: float = 1.0,
        pulls: bool = False,
        deadline: float | None = None,
    ) -> None:
        """Send what Sender.encode() returned in a step. pulls: whether the answer is to be that of pull(), which must follow.
        deadline (time.monotonic()): the limit for all messages; None for the timeout_s of the Communicator for each."""
        forms, *buffers = pushed
        has_forms = bool(forms.any())
        settings = None if self._settings is None else _settings_of(self._settings)
        with self._reached(f"push to {key.title}"), self._until(deadline):
            if settings is not None and (self._sent is None or not torch.equal(settings, self._sent)):
                self._request(SETTINGS, settings.numel(), tensors=[settings])
                self._sent = settings
            kind = PUSH_AND_PULL if pulls else PUSH
            self._request(kind, key.number, step, weight, has_forms, tensors=pushed if has_forms else buffers)
        self._due = key if pulls else None

    def pull(self, key: Key, rows: Tensor | None = None, deadline: float | None = None) -> tuple[int, list[Tensor]]:
        """Wait for the result of Server.pull(), and return it. Raises its errors, and PeerLost with the server's rank if the
        server is lost."""
        buffers = key.packing.flat.empty() if rows is None else [key.packing.empty_rows(len(rows))]
        with self._reached(f"pull of {key.title}"), self._until(deadline):
            if self._due is None:
                given = [] if rows is None else [rows]
                self._request(PULL, key.number, _ALL_ROWS if rows is None else len(rows), tensors=given)
            return int(self._receive(buffers)), buffers

    def refuse(self, reason: str) -> None:
        """Let the pulls of all workers fail for a reason, see Server.refuse()."""
        text = encode(reason)
        with suppress(CollectiveError), self._reached("step"):  # without the server, the other workers fail too
            self._request(REFUSE, text.numel(), tensors=[text])

    def counts(self) -> Counts:
        """Return the counts of all pushes so far, once all messages of this worker have arrived."""
        with self._reached("report"):
            self._request(COUNTS)
            return Counts.from_record(receive(self._communicator, int(self._receive()), 1))

    def leave(self, deadline: float = 0.0) -> None:
        """Receive the answer, if one is due and begins to arrive before the deadline. Then announce that this worker sends
        nothing more. If a message was interrupted, close the Communicator, which the server detects."""
        if self._due is not None:
            with suppress(CollectiveError):
                self.pull(self._due, deadline=deadline)
        if self._is_between_messages:
            with suppress(CollectiveError):  # a lost server needs no announcement
                self._request(LEAVE)
        else:
            self._communicator.close()

    def _request(self, kind: int, *numbers: float, tensors: Sequence[Tensor] = ()) -> None:
        """Send a request, with up to four numbers."""
        head = [kind, *numbers, *[0.0] * (4 - len(numbers))]
        for tensor in (torch.tensor(head, dtype=torch.float64, device="cpu"), *tensors):
            self._communicator.send(tensor, 1)

    def _receive(self, tensors: Sequence[Tensor] = ()) -> float:
        """Receive an answer into tensors, and return its number. Raises _Failed if the server sends an error."""
        head = torch.empty(2, dtype=torch.float64, device="cpu")
        self._communicator.recv(head, 1)
        self._due = None
        kind, number = head.tolist()
        if kind == FAILED:
            raise _Failed(receive(self._communicator, int(number), 1))
        for tensor in tensors:
            self._communicator.recv(tensor, 1)
        return float(number)

    @contextmanager
    def _until(self, deadline: float | None) -> Iterator[None]:
        """Give each operation in this block the time until a deadline (time.monotonic()), instead of the Communicator's
        timeout_s; None for that."""
        if deadline is None:
            yield
            return
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


class LocalClient:
    """Calls the server on the same rank, without messages."""

    is_answer_due = False

    def __init__(self, server: Server) -> None:
        self.server = server.rank
        self._server = server

    def push(
        self,
        key: Key,
        pushed: Sequence[Tensor],
        step: int,
        *,
        weight: float = 1.0,
        pulls: bool = False,
        deadline: float | None = None,
    ) -> None:
        """Call Server.push()."""
        self._server.push(self.server, key.number, pushed, step, weight)

    def pull(self, key: Key, rows: Tensor | None = None, deadline: float | None = None) -> tuple[int, list[Tensor]]:
        """Call Server.pull()."""
        return self._server.pull(self.server, key.number, rows)

    def refuse(self, reason: str) -> None:
        """Call Server.refuse()."""
        self._server.refuse(reason)

    def counts(self) -> Counts:
        """Return the Counts of all pushes so far."""
        return self._server.counts()

    def leave(self, deadline: float = 0.0) -> None:
        """Announce that this worker sends nothing more."""
        self._server.leave(self.server)


class ServerAndClients:
    """Holds this rank's server and clients until close(). timeout_s: the timeout_s of init().

    Attributes: communicators, which close() closes in reverse order; clients, by the rank of the server; serving,
    the threads of this rank's server, None if this rank does not serve; is_closed.
    """

    def __init__(self, timeout_s: float) -> None:
        self.communicators: list[Communicator] = []
        self.clients: dict[int, Client | LocalClient] = {}
        self.serving: Serving | None = None
        self.is_closed = False
        self._timeout_s = timeout_s

    def connect(
        self,
        name: str,
        server: Server | None,
        servers: Iterable[int],
        workers: Collection[int],
        communicator: Communicator | None,
        *,
        world_ranks: Sequence[int],
        server_s: float | None = None,
        worker_s: float | None = None,
        settings: Mapping[int, torch.optim.Optimizer] | None = None,
    ) -> None:
        """Begin to serve with this rank's server, if any, and connect to the others. Collective.

        name: the name of the servers in messages. servers, workers: the ranks that serve, and that push and pull. communicator:
        joins all of them, None for this rank alone. world_ranks: the rank in the world of each rank. server_s, worker_s: how
        long a server waits for a worker and a worker for its server; None for the timeout_s of init(). settings: the argument
        of the Client of each server.
        """
        rank = 0 if communicator is None else communicator.rank
        token = "" if communicator is None else communicator.allgather_record(secrets.token_hex(8))[0]
        for each in servers:
            timeout_s = server_s if each == rank else worker_s
            pairs = open_pairs(
                f"{name} {token}", each, workers, rank=rank, world_ranks=world_ranks, timeout_s=timeout_s
            )
            self.communicators += pairs.values()
            if each == rank:
                assert server is not None
                self.serving = Serving(name, server, pairs)
                if rank in workers:
                    self.clients[each] = LocalClient(server)
            elif rank in workers:
                self.clients[each] = Client(name, rank, each, pairs[rank], (settings or {}).get(each))

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
            for client in sorted(self.clients.values(), key=lambda client: client.is_answer_due):
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


def _settings_of(optimizer: torch.optim.Optimizer) -> Tensor:
    """Return the settings of all param groups, by encode(). Raises TypeError for anything but numbers, strings and tuples."""

    def number_of(value: Any) -> Any:
        if getattr(value, "ndim", None) == 0:  # a scalar of torch or NumPy
            return value.item()
        raise TypeError(f"{here()}the setting {value!r} of a param group cannot be sent to a rank that serves only")

    groups = optimizer.param_groups
    kept = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    return encode(kept, default=number_of)
