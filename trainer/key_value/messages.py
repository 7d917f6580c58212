"""How a worker reaches the keys of a key-value store: by messages to another rank, whose threads answer, or in its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from collectives import CollectiveError, Communicator
from trainer.key_value.entry import KeySpec
from trainer.key_value.keys import Keys
from trainer.server.aggregator import Counts
from trainer.server.errors import from_record, of_pair, to_record
from trainer.server.serving import Serving, hear, receive_record, say

PUSH, PULL, ROWS, COUNTS, LEAVE = range(5)
DONE, FAILED = range(2)

_UNCODED = -1
"""Stands for no step in a message."""


class KeyServer(Serving):
    """Serves keys to workers of other ranks."""

    def __init__(self, keys: Keys, communicators: Mapping[int, Communicator]) -> None:
        self._keys = keys
        super().__init__("the key-value store", keys, communicators)

    def _answer(self, worker: int, communicator: Communicator) -> bool:
        head = torch.empty(3, dtype=torch.int64)
        communicator.recv(head, 0)
        kind, number, argument = head.tolist()
        if kind == LEAVE:
            return False
        if kind == COUNTS:
            say(communicator, DONE, self._keys.counts().to_record())
        elif kind == PUSH:
            step = None if argument == _UNCODED else argument
            payload = self._keys.new_payload(number, step)
            communicator.recv(payload, 0)
            self._keys.push(worker, number, payload, step)
        else:
            rows = None
            if kind == ROWS:
                rows = torch.empty(argument, dtype=torch.int64)
                communicator.recv(rows, 0)
            self._pull(worker, communicator, number, rows)
        return True

    def _pull(self, worker: int, communicator: Communicator, number: int, rows: Tensor | None) -> None:
        try:
            value = self._keys.pull(worker, number, rows)
        except CollectiveError as error:  # told to the worker, who raises it
            say(communicator, FAILED, to_record(error))
            return
        communicator.send(torch.tensor([DONE, 0], dtype=torch.float64), 0)
        communicator.send(value, 0)


class RemoteKeys:
    """Is a server to its worker on another rank, which has rank 0 in their Communicator."""

    def __init__(self, rank: int, server: int, communicator: Communicator) -> None:
        self._rank = rank
        self._server = server
        self._communicator = communicator

    def push(self, spec: KeySpec, payload: Tensor, step: int | None) -> None:
        """Send what Keys.push() takes."""
        with self._named(f"push of key {spec.name!r}"):
            self._say(PUSH, spec.number, _UNCODED if step is None else step)
            self._communicator.send(payload, 1)

    def pull(self, spec: KeySpec, rows: Tensor | None = None) -> Tensor:
        """Wait for what Keys.pull() returns. Raises what that does."""
        operation = f"pull of key {spec.name!r}"
        with self._named(operation):
            answer = self._ask(spec, rows)
        if isinstance(answer, Tensor):
            return answer
        raise from_record(answer, self._rank, self._at(operation))

    def counts(self) -> Counts:
        """Ask what became of all pushes so far, when all that this worker has pushed has come there."""
        with self._named("report"):
            self._say(COUNTS)
            return Counts.from_record(receive_record(self._communicator, hear(self._communicator)[1], 1))

    def leave(self) -> None:
        """Say that nothing more comes. A server that is lost need not know."""
        with suppress(CollectiveError):
            self._say(LEAVE)

    def _ask(self, spec: KeySpec, rows: Tensor | None) -> Tensor | dict[str, Any]:
        """Return the value of a key, or what the server says of its error."""
        if rows is None:
            self._say(PULL, spec.number)
        else:
            self._say(ROWS, spec.number, len(rows))
            self._communicator.send(rows, 1)
        kind, nbytes = hear(self._communicator)
        if kind == FAILED:
            said: dict[str, Any] = receive_record(self._communicator, nbytes, 1)
            return said
        value = torch.empty(spec.shape if rows is None else (len(rows), *spec.shape[1:]), dtype=spec.dtype)
        self._communicator.recv(value, 1)
        return value

    def _say(self, kind: int, number: int = 0, argument: int = 0) -> None:
        self._communicator.send(torch.tensor([kind, number, argument]), 1)

    def _at(self, operation: str) -> str:
        return f"{operation} at the server on rank {self._server}"

    @contextmanager
    def _named(self, operation: str) -> Iterator[None]:
        """Raise the errors of the Communicator, which knows two ranks, as those of these ranks."""
        try:
            yield
        except CollectiveError as error:
            raise of_pair(error, (self._rank, self._server), self._rank, self._at(operation)) from error


class LocalKeys:
    """Is the server to the worker of its own rank."""

    def __init__(self, rank: int, keys: Keys) -> None:
        self._rank = rank
        self._keys = keys

    def push(self, spec: KeySpec, payload: Tensor, step: int | None) -> None:
        """Do as Keys.push(). The tensor remains the caller's."""
        self._keys.push(self._rank, spec.number, payload.clone(), step)

    def pull(self, spec: KeySpec, rows: Tensor | None = None) -> Tensor:
        """Do as Keys.pull()."""
        return self._keys.pull(self._rank, spec.number, rows)

    def counts(self) -> Counts:
        """Return what became of all pushes so far."""
        return self._keys.counts()

    def leave(self) -> None:
        """Say that nothing more comes."""
        self._keys.leave(self._rank)
