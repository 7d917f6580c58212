"""The keys of a key-value store that one server holds: an Entry for each, with its value, and the Keys of the server."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradwire.collectives import CollectiveError, CollectiveTimeout
from gradwire.collectives.compression.codec import Codec
from gradwire.trainer.servers.aggregator import Aggregator, Counts, Scheme
from gradwire.trainer.servers.connection import QuorumLost

Name: TypeAlias = int | str

Factory: TypeAlias = Callable[[list[Tensor]], torch.optim.Optimizer]
"""Makes an optimizer of a list of tensors, such as functools.partial(torch.optim.SGD, lr=0.1)."""


@dataclass(frozen=True)
class KeySpec:
    """The description of a key, the same on all ranks. number: how many keys were added before it. server: the rank that holds
    it."""

    name: Name
    number: int
    shape: torch.Size
    dtype: torch.dtype
    server: int

    @property
    def travels_coded(self) -> bool:
        """Return whether a codec, if there is one, encodes pushes to this key."""
        return self.dtype.is_floating_point and self.shape.numel() > 0


class Entry:
    """Holds the value of one key, and updates it by the sum of the workers' pushes.

    With a quorum of all workers, an update uses one push of each, its first unused one; further pushes of a worker wait for the
    others'. With a quorum of 1, every push makes an update at once.
    """

    def __init__(self, spec: KeySpec, value: Tensor, workers: Iterable[int], scheme: Scheme) -> None:
        self.spec = spec
        self._value = value
        self._optimizer: torch.optim.Optimizer | None = None
        self._failure: Exception | None = None
        self._changed = threading.Condition()
        self._aggregator: Aggregator[Tensor] = Aggregator(workers, scheme)
        self._kept: dict[int, deque[tuple[int, Tensor]]] = {worker: deque() for worker in workers}
        self._pulled = dict.fromkeys(self._kept, 0)  # the version that each worker has pulled last
        self._leaving: set[int] = set()

    def push(self, worker: int, gradient: Tensor) -> None:
        """Add a worker's push, and make the update that is due, if any."""
        with self._changed:
            self._kept[worker].append((self._pulled[worker], gradient))
            self._advance()

    def pull(self, worker: int, rows: Tensor | None, timeout_s: float, rank: int) -> Tensor:
        """Wait until all pushes of this worker are applied, and return a copy of the value, or of some of its rows.

        rank: of the server, for errors. Raises QuorumLost if they can never be applied, CollectiveTimeout after timeout_s
        seconds, and CollectiveError if the optimizer has failed.
        """
        operation = f"pull of key {self.spec.name!r} by rank {worker}"
        deadline = time.monotonic() + timeout_s
        with self._changed:
            aggregator = self._aggregator
            while self._failure is None and worker not in aggregator.awaited:
                if not aggregator.holds_quorum:
                    raise QuorumLost(aggregator.lost, aggregator.quorum, rank=rank, operation=operation)
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    raise CollectiveTimeout(timeout_s, aggregator.awaited, rank=rank, operation=operation)
                self._changed.wait(remaining_s)
            if self._failure is not None:
                message = f"the optimizer has failed: {self._failure!r}"
                raise CollectiveError(message, rank=rank, operation=operation) from self._failure
            self._pulled[worker] = aggregator.version
            aggregator.went(worker)
            return self._value.clone() if rows is None else self._value[rows]

    def leave(self, worker: int) -> None:
        """Remove a worker that is done, once its pushes are used."""
        with self._changed:
            self._leaving.add(worker)
            self._advance()

    def lose(self, worker: int) -> None:
        """Go on without a worker that has failed."""
        with self._changed:
            self._aggregator.lose(worker, time.monotonic())
            self._advance()

    def counts(self) -> Counts:
        """Return what became of all pushes so far."""
        with self._changed:
            return self._aggregator.counts()

    def set_optimizer(self, factory: Factory) -> None:
        """Update the value by this new optimizer from now on."""
        with self._changed:
            self._optimizer = factory([self._value])
            self._failure = None

    def state_dict(self) -> dict[str, Any] | None:
        """Return the optimizer's state; None without an optimizer."""
        with self._changed:
            return None if self._optimizer is None else self._optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what state_dict() returned into the optimizer."""
        with self._changed:
            assert self._optimizer is not None
            self._optimizer.load_state_dict(state)

    def _advance(self) -> None:
        """Make all updates that are due, and wake the waiting threads."""
        while True:
            now = time.monotonic()
            for worker in self._aggregator.awaited:
                if self._kept[worker]:
                    version, gradient = self._kept[worker].popleft()
                    self._aggregator.push(worker, version, 1.0, gradient, now)
                elif worker in self._leaving:
                    self._aggregator.leave(worker, now)
            shares = self._aggregator.take(now)
            if shares is None:
                break
            try:
                self._update(summed([gradient for gradient, _ in shares]))
            except Exception as error:  # it concerns every worker, not only the last one that pushed
                self._failure = error
        self._changed.notify_all()

    def _update(self, gradient: Tensor) -> None:
        if self._optimizer is None:
            self._value.copy_(gradient)
        else:
            self._value.grad = gradient
            self._optimizer.step()
            self._value.grad = None


def summed(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape and dtype, in their order; halves are added in float32. A single one is returned
    unchanged."""
    first, *others = tensors
    if not others:
        return first
    wide = torch.promote_types(first.dtype, torch.float32) if first.dtype.is_floating_point else first.dtype
    total = first.to(wide, copy=True)
    for each in others:
        total += each.to(total.device)
    return total.to(first.dtype)


_SPEAKS_FIRST = 0.9
"""The share of timeout_s for which a server waits for other workers: so it is the server, which knows for whom it waits, that
says so, and not the worker that waits for the server."""


class Keys:
    """Holds all keys of one server. Attributes: rank, that of the server; codec, that of pushes with a step.

    timeout_s: how long a worker waits for an update before it raises.
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

    def new_payload(self, number: int, step: int | None) -> Tensor:
        """Return memory for a worker's push to a key, as push() needs it."""
        spec = self._entries[number].spec
        if step is None:
            return torch.empty(spec.shape, dtype=spec.dtype)
        assert self.codec is not None
        return torch.empty(self.codec.at(step).wire_bytes(spec.shape.numel()), dtype=torch.uint8)

    def push(self, worker: int, number: int, payload: Tensor, step: int | None) -> None:
        """Add a worker's push: a tensor, or with a step, its code by the codec of that step."""
        spec = self._entries[number].spec
        if step is not None:
            assert self.codec is not None
            decoded = torch.empty(spec.shape.numel(), dtype=torch.float32)
            self.codec.at(step).decode(payload, decoded)
            payload = decoded.view(spec.shape).to(spec.dtype)
        self._entries[number].push(worker, payload)

    def pull(self, worker: int, number: int, rows: Tensor | None = None) -> Tensor:
        """Return the value of a key, or some of its rows: see Entry.pull."""
        return self._entries[number].pull(worker, rows, self._timeout_s, self.rank)

    def leave(self, worker: int) -> None:
        """Go on without a worker that is done."""
        for entry in list(self._entries.values()):
            entry.leave(worker)

    def lose(self, worker: int, error: CollectiveError) -> None:
        """Remove a worker that has failed, with any error."""
        for entry in list(self._entries.values()):
            entry.lose(worker)

    def counts(self) -> Counts:
        """Return what became of all pushes so far."""
        return Counts.total([entry.counts() for entry in list(self._entries.values())])

    def set_optimizer(self, factory: Factory) -> None:
        """Update every key by a separate optimizer from now on."""
        for entry in self._entries.values():
            entry.set_optimizer(factory)

    def state_dict(self) -> dict[Name, Any]:
        """Return the states of the optimizers, by the names of their keys."""
        return {entry.spec.name: entry.state_dict() for entry in self._entries.values()}

    def load_state_dict(self, states: dict[Name, Any]) -> None:
        """Load states, of these keys and perhaps others."""
        for entry in self._entries.values():
            entry.load_state_dict(states[entry.spec.name])
