"""Entry: holds one key of a key-value store with its value. Keys: holds all Entries of one server."""

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
"""A function that makes an optimizer for a list of tensors, such as functools.partial(torch.optim.SGD, lr=0.1)."""


@dataclass(frozen=True)
class KeySpec:
    """Describes a key, equally on all ranks. number: the number of keys that were added before it. server: the rank that holds
    it."""

    name: Name
    number: int
    shape: torch.Size
    dtype: torch.dtype
    server: int

    @property
    def travels_coded(self) -> bool:
        """Return whether pushes to this key are encoded if the store has a codec."""
        return self.dtype.is_floating_point and self.shape.numel() > 0


class Entry:
    """Holds the value of one key, and updates it by the sum of the workers' pushes.

    With a quorum of all workers, an update uses the first unused push of each worker; a worker's further pushes wait for the
    next updates. With a quorum of 1, every push makes an update at once.
    """

    def __init__(self, spec: KeySpec, value: Tensor, workers: Iterable[int], scheme: Scheme) -> None:
        self.spec = spec
        self._value = value
        self._optimizer: torch.optim.Optimizer | None = None
        self._failure: Exception | None = None
        self._changed = threading.Condition()
        self._aggregator: Aggregator[Tensor] = Aggregator(workers, scheme)
        self._kept: dict[int, deque[tuple[int, Tensor]]] = {worker: deque() for worker in workers}
        self._pulled = dict.fromkeys(self._kept, 0)  # the version of each worker's last pull
        self._leaving: set[int] = set()

    def push(self, worker: int, gradient: Tensor) -> None:
        """Add a worker's push, and make the updates that are due."""
        with self._changed:
            self._kept[worker].append((self._pulled[worker], gradient))
            self._advance()

    def pull(self, worker: int, rows: Tensor | None, timeout_s: float, rank: int) -> Tensor:
        """Wait until all pushes of this worker are applied, and return a copy of the value, or of some of its rows.

        rank: the server's rank, for errors. Raises QuorumLost if too few workers remain to apply the pushes, CollectiveTimeout
        after timeout_s seconds, and CollectiveError if the optimizer has failed.
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
        """Remove a worker that has finished, once its pushes are applied."""
        with self._changed:
            self._leaving.add(worker)
            self._advance()

    def lose(self, worker: int) -> None:
        """Remove a worker that has failed."""
        with self._changed:
            self._aggregator.lose(worker, time.monotonic())
            self._advance()

    def counts(self) -> Counts:
        """Return the Counts of all pushes so far."""
        with self._changed:
            return self._aggregator.counts()

    def set_optimizer(self, factory: Factory) -> None:
        """Make an optimizer for the value; all later updates use it."""
        with self._changed:
            self._optimizer = factory([self._value])
            self._failure = None

    def state_dict(self) -> dict[str, Any] | None:
        """Return the optimizer's state; None without an optimizer."""
        with self._changed:
            return None if self._optimizer is None else self._optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of state_dict() into the optimizer."""
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
            except Exception as error:  # every worker must raise it, not only the last one that pushed
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
    """Return the sum of tensors of one shape and dtype, in their order; float16 and bfloat16 are added in float32. A single
    tensor is returned unchanged."""
    first, *others = tensors
    if not others:
        return first
    wide = torch.promote_types(first.dtype, torch.float32) if first.dtype.is_floating_point else first.dtype
    total = first.to(wide, copy=True)
    for each in others:
        total += each.to(total.device)
    return total.to(first.dtype)


_SPEAKS_FIRST = 0.9
"""The fraction of timeout_s for which a server waits for other workers. The server then times out before the worker that waits
for it, and its error names the missing workers."""


class Keys:
    """Holds all keys of one server. Attributes: rank, the server's rank; codec, which decodes the pushes with a step.

    timeout_s: the timeout of init(); a pull raises CollectiveTimeout after 0.9 of it.
    """

    def __init__(self, rank: int, workers: Sequence[int], scheme: Scheme, timeout_s: float) -> None:
        self.codec: Codec | None = None
        self.rank = rank
        self._workers = list(workers)
        self._scheme = scheme
        self._timeout_s = timeout_s * _SPEAKS_FIRST
        self._entries: dict[int, Entry] = {}

    def add(self, spec: KeySpec, value: Tensor, factory: Factory | None) -> None:
        """Add a key with this tensor as its value. factory: makes its optimizer; None for no optimizer."""
        entry = Entry(spec, value, self._workers, self._scheme)
        if factory is not None:
            entry.set_optimizer(factory)
        self._entries[spec.number] = entry

    def new_payload(self, number: int, step: int | None) -> Tensor:
        """Return a tensor into which to receive a worker's push to a key, for push()."""
        spec = self._entries[number].spec
        if step is None:
            return torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
        assert self.codec is not None
        return torch.empty(self.codec.at(step).wire_bytes(spec.shape.numel()), dtype=torch.uint8, device="cpu")

    def push(self, worker: int, number: int, payload: Tensor, step: int | None) -> None:
        """Add a worker's push. payload: the tensor; with a step, its code, encoded by the codec of that step."""
        spec = self._entries[number].spec
        if step is not None:
            assert self.codec is not None
            decoded = torch.empty(spec.shape.numel(), dtype=torch.float32, device="cpu")
            self.codec.at(step).decode(payload, decoded)
            payload = decoded.view(spec.shape).to(spec.dtype)
        self._entries[number].push(worker, payload)

    def pull(self, worker: int, number: int, rows: Tensor | None = None) -> Tensor:
        """Return the value of a key, or some of its rows: see Entry.pull."""
        return self._entries[number].pull(worker, rows, self._timeout_s, self.rank)

    def leave(self, worker: int) -> None:
        """Remove a worker that has finished."""
        for entry in list(self._entries.values()):
            entry.leave(worker)

    def lose(self, worker: int, error: CollectiveError) -> None:
        """Remove a worker that has failed. The error is not used."""
        for entry in list(self._entries.values()):
            entry.lose(worker)

    def counts(self) -> Counts:
        """Return the Counts of all pushes so far."""
        return Counts.total([entry.counts() for entry in list(self._entries.values())])

    def set_optimizer(self, factory: Factory) -> None:
        """Make a separate optimizer for every key; all later updates use it."""
        for entry in self._entries.values():
            entry.set_optimizer(factory)

    def state_dict(self) -> dict[Name, Any]:
        """Return the states of the optimizers, by the names of their keys."""
        return {entry.spec.name: entry.state_dict() for entry in self._entries.values()}

    def load_state_dict(self, states: dict[Name, Any]) -> None:
        """Load the states of these keys' optimizers. states: by name; may contain other keys."""
        for entry in self._entries.values():
            entry.load_state_dict(states[entry.spec.name])
