"""Servers: connects the ranks that serve with the workers, answers the workers of this rank's server, and links its worker to all
servers.

The server and each worker on another rank share a Communicator of two ranks: the worker is rank 0, and the server is rank 1.
For each worker, the server has a thread that receives requests. So threads do not wait for each other, and if a rank is lost,
only its own Communicators break. A message is a request (see Server), or its answer: a record and tensors, or the record of an
error.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from gradwire.collectives import CollectiveError, Communicator
from gradwire.collectives.communicator import close_all
from gradwire.collectives.control.membership import Membership
from gradwire.trainer.servers.aggregator import Scheme
from gradwire.trainer.servers.messages import from_record, of_pair, receive, send, to_record
from gradwire.trainer.servers.server import Answer, Server
from gradwire.trainer.world.process_sets import ProcessSetLike
from gradwire.trainer.world.world import current_world

WORKER, SERVER = range(2)
"""The ranks of the Communicator of a worker and a server."""

_LET_GO_S = 2.0
"""How many seconds close() waits for a thread to end after it has closed the thread's Communicator."""

_LEAST_S = 0.01
"""The timeout in seconds of an operation whose deadline has passed: what has arrived by then is still received."""

_log = logging.getLogger("gradwire")


class Timeouts(NamedTuple):
    """The limits of waits that depend on each other, in seconds. server: a server for a worker. update: an update for all
    workers. worker: a worker for a server."""

    server: float
    update: float
    worker: float


def serve(name: str, server: Server, worker: int, pair: Communicator) -> None:
    """Answer a worker's requests until it leaves or is lost. name: the name of the server in messages."""
    operation = f"serving at {name}"

    def lose(error: CollectiveError, cause: Exception) -> None:
        error.__cause__ = cause
        _log.warning("gradwire: %s continues without rank %d: %s", name, worker, error)
        server.lose(worker, error)

    try:
        request: dict[str, Any] = {}
        while "leave" not in request:
            request, tensors = receive(pair, WORKER)
            try:
                answer = server.perform(worker, request, tensors)
                record, tensors = (None, []) if answer is None else answer()
            except Exception as error:
                if not _is_answered(request):
                    raise
                record, tensors = {"error": to_record(error)}, []
            if _is_answered(request):
                send(pair, WORKER, record, tensors)
    except CollectiveError as error:
        if threading.main_thread().is_alive():  # else this process is exiting, and no worker is at fault
            lose(of_pair(error, (worker, server.rank), server.rank, operation), error)
    except Exception as error:  # else the thread would end, and the worker would wait for an answer
        message = f"no answer to rank {worker}: {error!r}"
        lose(CollectiveError(message, rank=server.rank, operation=operation), error)
        pair.close()


def _is_answered(request: dict[str, Any]) -> bool:
    return "pull" in request or "counts" in request


class ServerLink(Protocol):
    """Makes requests to a server. Attributes: is_answer_due, whether the worker still has to receive an answer; copies, whether
    the server gets copies of the tensors of a request."""

    is_answer_due: bool
    copies: bool

    def request(
        self, operation: str, request: dict[str, Any], tensors: Sequence[Tensor] = (), deadline: float | None = None
    ) -> None:
        """Make a request. If it needs an answer, answer() must follow. deadline (time.monotonic()): the limit for all messages;
        None for the timeout_s of each."""

    def answer(self, operation: str, deadline: float | None = None, into: Sequence[Tensor] = ()) -> Answer:
        """Return the answer to the last request, if possible in memory of the same size. Raises the error that the server has
        sent."""

    def leave(self, deadline: float) -> None:
        """Announce that this worker sends nothing more."""


class LocalLink(ServerLink):
    """Makes requests to the server on the same rank, without messages, so that no deadline applies."""

    is_answer_due, copies = False, False

    def __init__(self, server: Server) -> None:
        self._server = server
        self._answer: Callable[[], Answer] | None = None

    def request(
        self, operation: str, request: dict[str, Any], tensors: Sequence[Tensor] = (), deadline: float | None = None
    ) -> None:
        self._answer = self._server.perform(self._server.rank, request, tensors)

    def answer(self, operation: str, deadline: float | None = None, into: Sequence[Tensor] = ()) -> Answer:
        assert self._answer is not None
        return self._answer()

    def leave(self, deadline: float) -> None:
        self.request("leave", {"leave": True})


class Link(ServerLink):
    """Makes requests to a server on another rank. name: the name of the server in messages. rank: this rank."""

    is_answer_due, copies = False, True

    def __init__(self, name: str, rank: int, server: int, pair: Communicator) -> None:
        self._server = server
        self._name = name
        self._rank = rank
        self._pair = pair
        self._is_between_messages = True

    def request(
        self, operation: str, request: dict[str, Any], tensors: Sequence[Tensor] = (), deadline: float | None = None
    ) -> None:
        with self._reached(operation, deadline):
            send(self._pair, SERVER, request, tensors)
        self.is_answer_due = _is_answered(request)

    def answer(self, operation: str, deadline: float | None = None, into: Sequence[Tensor] = ()) -> Answer:
        with self._reached(operation, deadline):
            record, tensors = receive(self._pair, SERVER, into)
        self.is_answer_due = False
        if isinstance(record, dict) and "error" in record:
            raise from_record(
                record["error"], self._rank, f"{operation} at {self._name} on rank {self._server}"
            ) from None
        return record, tensors

    def leave(self, deadline: float) -> None:
        """Receive the answer, if one is due and begins to arrive before the deadline. Then announce that this worker sends
        nothing more. If a message was interrupted, close the Communicator, which the server detects."""
        if self.is_answer_due and self._is_between_messages:
            with suppress(CollectiveError):
                self.answer("leave", deadline)
        if self._is_between_messages:
            with suppress(CollectiveError):  # a lost server needs no announcement
                self.request("leave", {"leave": True})
        else:
            self._pair.close()

    @contextmanager
    def _reached(self, operation: str, deadline: float | None) -> Iterator[None]:
        """Give each operation in this block the time until the deadline. In errors of the Communicator of two ranks, replace
        ranks 0 and 1 by the worker's and the server's rank."""
        pair, timeout_s = self._pair, self._pair.timeout_s
        self._is_between_messages = False
        try:
            if deadline is not None:
                pair.timeout_s = max(_LEAST_S, deadline - time.monotonic())
            yield
        except CollectiveError as error:
            operation = f"{operation} at {self._name} on rank {self._server}"
            raise of_pair(error, (self._rank, self._server), self._rank, operation) from error
        finally:
            pair.timeout_s = timeout_s
        self._is_between_messages = True


class Servers:
    """Holds this rank's server, its worker's links to all servers, and their Communicators until close(). name: the name of the
    servers in messages. timeout_s: the timeout_s of init().

    Attributes: server, None if this rank does not serve; links, by the rank of the server; is_closed.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self.server: Server | None = None
        self.links: dict[int, ServerLink] = {}
        self.is_closed = False
        self._name = name
        self._timeout_s = timeout_s
        self._communicators: list[Communicator] = []  # which close() closes in reverse order
        self._threads: list[threading.Thread] = []

    def open(self, process_set: ProcessSetLike) -> Communicator:
        """Return the Communicator of a process set, which close() closes unless the caller has made it. Collective."""
        if isinstance(process_set, Communicator):
            return process_set
        return self._owned(current_world().open_communicator(process_set))

    def open_alone(self) -> Communicator:
        """Return a Communicator of this process alone, which needs no world."""
        return self._owned(Communicator(Membership.alone(("cpu",)), stall_warning_s=None))

    def connect(
        self,
        communicator: Communicator,
        servers: Collection[int],
        workers: Sequence[int],
        scheme: Scheme,
        timeouts: Timeouts,
        add: Callable[[Server], None] = lambda server: None,
        needed: Collection[int] = (),
    ) -> None:
        """Begin to serve, if this rank does, and connect workers and servers. Collective over the Communicator.

        servers, workers: the ranks that serve, and that push and pull. add: adds keys to this rank's server before any request
        arrives. scheme, needed: see Server. Raises ValueError if the Communicator has ranks that are not in this world.
        """
        rank, size = communicator.rank, communicator.size
        token = f"{self._name} {communicator.allgather_record(secrets.token_hex(8))[0]}"
        world_ranks = current_world().ranks_of(communicator) if size > 1 else [0]
        for server in servers:  # one after the other, in the same order on all ranks, or they would deadlock
            timeout_s = timeouts.server if server == rank else timeouts.worker
            pairs: dict[int, Communicator] = {}
            for worker in workers:
                if worker != server and rank in (worker, server):
                    first, second = world_ranks[worker], world_ranks[server]
                    if first is None or second is None:
                        raise ValueError("process_set is a Communicator of ranks that are not in this world")
                    opened = current_world().open_pair(first, second, f"{token}/{worker}/{server}", timeout_s)
                    pairs[worker] = self._owned(opened)
            if server == rank:
                self._serve(Server(rank, workers, scheme, timeouts.update, needed), pairs, add)
            if rank in workers:
                self.links[server] = (
                    LocalLink(self.server)
                    if server == rank and self.server is not None
                    else Link(self._name, rank, server, pairs[rank])
                )

    def _owned(self, communicator: Communicator) -> Communicator:
        self._communicators.append(communicator)
        return communicator

    def _serve(self, server: Server, pairs: dict[int, Communicator], add: Callable[[Server], None]) -> None:
        add(server)
        self.server = server
        for worker, pair in pairs.items():
            arguments = (self._name, server, worker, pair)
            name = f"gradwire-server-{worker}"
            self._threads.append(threading.Thread(target=serve, args=arguments, name=name, daemon=True))
            self._threads[-1].start()

    def join(self, deadline: float) -> bool:
        """Wait until all workers of this rank's server have left or are lost, or until the deadline (time.monotonic()). Return
        whether none remains."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

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
            for link in sorted(self.links.values(), key=lambda link: link.is_answer_due):
                link.leave(deadline)
            if not self.join(deadline) and self.server is not None:
                _log.warning("gradwire: rank %d: %s closes while others use it", self.server.rank, self._name)
        finally:
            self.break_off()
            self.join(time.monotonic() + _LET_GO_S)

    def break_off(self) -> None:
        """Close the Communicators at once."""
        self.is_closed = True
        close_all(reversed(self._communicators))
