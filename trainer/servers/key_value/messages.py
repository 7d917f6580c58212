"""How a worker reaches the keys of a key-value store: by messages to another rank, whose threads answer, or in its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradwire.collectives import CollectiveError, Communicator
from gradwire.trainer.servers.aggregator import Counts
from gradwire.trainer.servers.connection import from_record, to_record
from gradwire.trainer.servers.key_value.keys import Keys, KeySpec
from gradwire.trainer.servers.serving import DONE, FAILED, OWN, Client, Serving, say

PUSH, PULL, ROWS = range(OWN, OWN + 3)

_UNCODED = -1
"""Stands for no step in a message."""


class KeyServer(Serving):
    """Serves keys to workers of other ranks."""

    def __init__(self, keys: Keys, communicators: Mapping[int, Communicator]) -> None:
        self._keys = keys
        super().__init__("the key-value store", keys, communicators)

    def _answer(self, worker: int, communicator: Communicator, kind: int, numbers: Sequence[float]) -> None:
        number, argument, _ = map(int, numbers)
        if kind == PUSH:
            step = None if argument == _UNCODED else argument
            payload = self._keys.new_payload(number, step)
            communicator.recv(payload, 0)
            self._keys.push(worker, number, payload, step)
            return
        if kind not in (PULL, ROWS):
            raise ValueError(
                f"rank {worker} says {kind}, which is none of PUSH ({PUSH}), PULL ({PULL}) and ROWS ({ROWS})"
            )
        rows = None
        if kind == ROWS:
            rows = torch.empty(argument, dtype=torch.int64)
            communicator.recv(rows, 0)
        try:
            value = self._keys.pull(worker, number, rows)
        except CollectiveError as error:  # told to the worker, who raises it
            say(communicator, FAILED, to_record(error))
            return
        communicator.send(torch.tensor([DONE, 0], dtype=torch.float64), 0)
        communicator.send(value, 0)


class RemoteKeys(Client):
    """Is a server to its worker on another rank."""

    def __init__(self, rank: int, server: int, communicator: Communicator) -> None:
        super().__init__("the server", rank, server, communicator)

    def push(self, spec: KeySpec, payload: Tensor, step: int | None) -> None:
        """Send what Keys.push() takes."""
        with self._reached(f"push of key {spec.name!r}"):
            self._say(PUSH, spec.number, _UNCODED if step is None else step)
            self._communicator.send(payload, 1)

    def pull(self, spec: KeySpec, rows: Tensor | None = None) -> Tensor:
        """Wait for what Keys.pull() returns. Raises what that does."""
        operation = f"pull of key {spec.name!r}"
        value = torch.empty(spec.shape if rows is None else (len(rows), *spec.shape[1:]), dtype=spec.dtype)
        with self._reached(operation):
            if rows is None:
                self._say(PULL, spec.number)
            else:
                self._say(ROWS, spec.number, len(rows))
                self._communicator.send(rows, 1)
            _, error = self._hear()
            if error is None:
                self._communicator.recv(value, 1)
        if error is not None:
            raise from_record(error, self._rank, self._at(operation))
        return value


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
