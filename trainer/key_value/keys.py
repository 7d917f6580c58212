"""The keys of a key-value store that one server holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from collectives import CollectiveError
from collectives.compression.codec import Codec
from trainer.key_value.entry import Entry, Factory, KeySpec, Name
from trainer.server.aggregator import Counts, Scheme

_SPEAKS_FIRST = 0.9
"""The share of timeout_s for which a server waits for other workers: so it is the server, which knows for whom it waits, that
says so, and not the worker that waits for the server."""


class Keys:
    """Holds all keys of one server. Attributes: rank, that of the server; codec: what is pushed with a step is a code of it.

    timeout_s: how long a worker waits for an update before it is an error.
    """

    def __init__(self, rank: int, workers: Sequence[int], scheme: Scheme, timeout_s: float) -> None:
        self.codec: Codec | None = None
        self.rank = rank
        self._workers = list(workers)
        self._scheme = scheme
        self._timeout_s = timeout_s * _SPEAKS_FIRST
        self._entries: dict[int, Entry] = {}

    def add(self, spec: KeySpec, value: Tensor, factory: Factory | None) -> None:
        """Hold a key, with this tensor as its value, and an optimizer of a factory's, if any."""
        entry = Entry(spec, value, self._workers, self._scheme)
        if factory is not None:
            entry.set_optimizer(factory)
        self._entries[spec.number] = entry

    def spec(self, number: int) -> KeySpec:
        """Return what is known of a key."""
        return self._entries[number].spec

    def new_payload(self, number: int, step: int | None) -> Tensor:
        """Return memory for what a worker pushes to a key, as push() takes it."""
        spec = self.spec(number)
        if step is None:
            return torch.empty(spec.shape, dtype=spec.dtype)
        assert self.codec is not None
        return torch.empty(self.codec.at(step).wire_bytes(spec.shape.numel()), dtype=torch.uint8)

    def push(self, worker: int, number: int, payload: Tensor, step: int | None) -> None:
        """Take what a worker pushes: a tensor, or with a step what the codec of that step has made of it."""
        spec = self.spec(number)
        if step is not None:
            assert self.codec is not None
            decoded = torch.empty(spec.shape.numel(), dtype=torch.float32)
            self.codec.at(step).decode(payload, decoded)
            payload = decoded.view(spec.shape).to(spec.dtype)
        self._entries[number].push(worker, payload)

    def pull(self, worker: int, number: int, rows: Tensor | None = None) -> Tensor:
        """Return the value of a key, or some of its rows, as soon as all that this worker has pushed is in it: Entry.pull."""
        return self._entries[number].pull(worker, rows, self._timeout_s, self.rank)

    def leave(self, worker: int) -> None:
        """Go on without a worker that is done."""
        for entry in list(self._entries.values()):
            entry.leave(worker)

    def lose(self, worker: int, error: CollectiveError) -> None:
        """Go on without a worker that has failed, with whatever error."""
        for entry in list(self._entries.values()):
            entry.lose(worker)

    def counts(self) -> Counts:
        """Return what became of all pushes so far."""
        return Counts.total([entry.counts() for entry in list(self._entries.values())])

    def set_optimizer(self, factory: Factory) -> None:
        """Update every key by an optimizer of its own from now on."""
        for entry in self._entries.values():
            entry.set_optimizer(factory)

    def state_dict(self) -> dict[Name, Any]:
        """Return the states of the optimizers, by the names of their keys."""
        return {entry.spec.name: entry.state_dict() for entry in self._entries.values()}

    def load_state_dict(self, states: dict[Name, Any]) -> None:
        """Load states, of these keys and perhaps others."""
        for entry in self._entries.values():
            entry.load_state_dict(states[entry.spec.name])
