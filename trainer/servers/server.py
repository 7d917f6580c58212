"""Server: holds tensors by key inside a rank, and updates them with what workers push. Entry: holds the tensors of one key."""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradwire.collectives import CollectiveError, CollectiveTimeout
from gradwire.trainer.servers.aggregator import Aggregator, Counts, Scheme
from gradwire.trainer.servers.messages import QuorumLost
from gradwire.trainer.servers.packing import Packing, weighted_sum

Pushed: TypeAlias = "list[Tensor | None]"
"""What a worker pushes to a key: a tensor or None for each of its tensors."""

Answer: TypeAlias = "tuple[Any, list[Tensor]]"
"""A record and tensors: the version and the tensors of a pull, or the Counts as a record."""


@dataclass
class Key:
    """Describes tensors that are updated together, equally on all ranks.

    title: the key in messages. number: its place among the keys. server: the rank that holds it. packing: how workers send what
    they push to it.
    """

    title: str
    number: int
    server: int
    packing: Packing


class Entry:
    """Holds the tensors of one key, and updates them with the workers' pushes, whose memory it may use.

    The Aggregator decides which pushes make an update. A push of a worker whose earlier push waits for the next update is kept
    until then. optimizer: steps the tensors; without one, an update sets them to the pushed ones. users: the optimizer whose
    settings each update uses, unless workers have sent their own; None for those of `optimizer`. Attributes: key; tensors.
    """

    def __init__(
        self,
        rank: int,
        key: Key,
        tensors: Sequence[Tensor],
        workers: Iterable[int],
        scheme: Scheme,
        optimizer: torch.optim.Optimizer | None = None,
        users: torch.optim.Optimizer | None = None,
    ) -> None:
        self.key = key
        self._rank = rank
        self.tensors = list(tensors)
        self._workers = list(workers)
        self._scheme = scheme
        self._optimizer = optimizer
        self._users = users
        self._settings: dict[int, list[dict[str, Any]]] = {}  # settings of param groups, by the worker that sent them
        self._failure: CollectiveError | None = None
        self._changed = threading.Condition()
        self._start(0)

    def _start(self, version: int) -> None:
        self._aggregator: Aggregator[Pushed] = Aggregator(self._workers, self._scheme, version)
        self._pulled = dict.fromkeys(self._workers, version)  # the version of each worker's last pull
        self._kept: dict[int, deque[tuple[int, float, Pushed]]] = {worker: deque() for worker in self._workers}
        self._leaving: set[int] = set()
        self._newest: list[Tensor] | None = None

    def push(self, worker: int, weight: float, pushed: Pushed) -> None:
        """Add a worker's push, and make the updates that are due."""
        with self._changed:
            self._kept[worker].append((self._pulled[worker], weight, pushed))
            self._advance()

    def pull(self, worker: int, rows: Tensor | None, timeout_s: float) -> tuple[int, list[Tensor]]:
        """Wait until the worker may continue. Return the version and the tensors in the buffers of Packing.flat, or the rows of
        the only tensor.

        Raises QuorumLost if too few workers remain; CollectiveTimeout after timeout_s; CollectiveError if the optimizer or a
        worker has failed; the error of lose() if a rank that all need is lost.
        """
        operation = f"pull of {self.key.title} by rank {worker}"
        deadline = time.monotonic() + timeout_s
        with self._changed:
            aggregator = self._aggregator
            while self._failure is not None or not aggregator.may_go(worker):
                if self._failure is not None:  # each thread raises a new error
                    raise self._failure.again(str(self._failure), operation) from self._failure
                if not aggregator.holds_quorum:
                    raise QuorumLost(aggregator.lost, aggregator.quorum, rank=self._rank, operation=operation)
                now = time.monotonic()
                if now >= deadline:
                    waiting_for = aggregator.blocking(worker)
                    raise CollectiveTimeout(timeout_s, waiting_for, rank=self._rank, operation=operation)
                due_at = aggregator.due_at(now)
                self._changed.wait(min(deadline, deadline if due_at is None else due_at) - now)
                self._update()
            self._pulled[worker] = aggregator.version
            aggregator.went(worker)
            if rows is not None:
                return aggregator.version, [self.tensors[0].detach()[rows]]
            if self._newest is None:
                self._newest = self.key.packing.flat.pack(self.tensors)
            return aggregator.version, self._newest

    def fail(self, error: CollectiveError) -> None:
        """Let pull() raise this error from now on, unless it raises another already."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def take_settings(self, worker: int, settings: list[dict[str, Any]]) -> None:
        """Keep the settings of a worker's param groups. Updates use those of the lowest-numbered remaining worker."""
        with self._changed:
            self._settings[worker] = [
                {name: tuple(value) if isinstance(value, list) else value for name, value in group.items()}
                for group in settings
            ]

    def leave(self, worker: int) -> None:
        """Remove a worker that has finished, once its pushes are applied."""
        with self._changed:
            self._forget_settings(worker)
            self._leaving.add(worker)
            self._advance()

    def lose(self, worker: int) -> None:
        """Remove a worker that has failed."""
        with self._changed:
            self._forget_settings(worker)
            self._aggregator.lose(worker, time.monotonic())
            self._advance()

    def counts(self) -> Counts:
        """Return the Counts of all pushes so far."""
        with self._changed:
            return self._aggregator.counts()

    def set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Let all later updates step this optimizer of the tensors."""
        with self._changed:
            self._optimizer = optimizer
            self._failure = None

    def state_dict(self) -> dict[str, Any]:
        """Return the version and a copy of the optimizer's state; without the tensors."""
        with self._changed:
            state = None if self._optimizer is None else copy.deepcopy(self._optimizer.state_dict())
            return {"version": self._aggregator.version, "optimizer": state}

    def load_state_dict(self, state: dict[str, Any], tensors: Sequence[Tensor] | None = None) -> None:
        """Load an optimizer's state. tensors: begin anew with these values at the version of the state; None for the values and
        the version as they are."""
        with self._changed, torch.no_grad():
            if self._optimizer is not None:
                self._optimizer.load_state_dict(state["optimizer"])
            if tensors is not None:
                for mine, source in zip(self.tensors, tensors, strict=True):
                    mine.copy_(source)
                self._start(state["version"])

    def _advance(self) -> None:
        """Make all updates that are due, and wake the waiting threads."""
        self._update()
        self._changed.notify_all()

    def _update(self) -> None:
        """Make all updates that are due, and wake the waiting threads after one. Without an update, do not wake them: they call
        this too, and would wake each other for ever."""
        aggregator = self._aggregator
        while True:
            now = time.monotonic()
            for worker in aggregator.awaited:
                if self._kept[worker]:
                    aggregator.push(worker, *self._kept[worker].popleft(), now)
                elif worker in self._leaving:
                    aggregator.leave(worker, now)
            shares = aggregator.take(now)
            if shares is None:
                return
            try:
                self._apply(shares)
            except Exception as error:  # every worker must raise it, not only this thread's
                message = f"the optimizer has failed: {error!r}"
                self._failure = CollectiveError(message, rank=self._rank, operation=f"update of {self.key.title}")
                self._failure.__cause__ = error
            self._changed.notify_all()

    def _apply(self, shares: list[tuple[Pushed, float]]) -> None:
        self._newest = None
        totals = [
            weighted_sum([(pushed[number], factor) for pushed, factor in shares], tensor.dtype, in_place=True)
            for number, tensor in enumerate(self.tensors)
        ]
        if self._optimizer is None:
            for tensor, total in zip(self.tensors, totals, strict=True):
                if total is not None:
                    tensor.detach().copy_(total)
            return
        if self._users is not None:
            settings = self._settings[min(self._settings)] if self._settings else self._users.param_groups
            for theirs, mine in zip(settings, self._optimizer.param_groups, strict=True):
                mine.update(_on_cpu(theirs))
        for tensor, total in zip(self.tensors, totals, strict=True):
            tensor.grad = total
        self._optimizer.step()

    def _forget_settings(self, worker: int) -> None:
        """Drop a worker's settings, so that updates use another worker's. Keep them if there are no others."""
        if len(self._settings) > 1:
            self._settings.pop(worker, None)


class Server:
    """Holds the keys of one rank, and does what workers request. Attributes: rank, the server's rank; entries, by the number of
    the key.

    workers: the ranks that push and pull. timeout_s: how long a pull waits before it raises CollectiveTimeout. needed: the
    workers without which no rank can continue, since they also serve.

    A request is a dict that JSON can hold, with one or more of these, which are done in this order, and tensors. "settings": the
    settings of the worker's param groups. "refuse": why no rank can continue. "push": the number of a key, the step, the weight
    and the forms of gradients that Sender.encode() returned in this step; its buffers are the tensors. "pull": the number of a
    key, and whether only rows are wanted; their numbers are the only tensor. "counts": for Server.counts(). "leave": the worker
    sends nothing more.
    """

    def __init__(
        self, rank: int, workers: Sequence[int], scheme: Scheme, timeout_s: float, needed: Collection[int] = ()
    ) -> None:
        self.rank = rank
        self.entries: dict[int, Entry] = {}
        self._workers = list(workers)
        self._scheme = scheme
        self._timeout_s = timeout_s
        self._needed = needed

    def add(
        self,
        key: Key,
        tensors: Sequence[Tensor],
        optimizer: torch.optim.Optimizer | None = None,
        users: torch.optim.Optimizer | None = None,
    ) -> None:
        """Add a key, as Entry describes."""
        self.entries[key.number] = Entry(self.rank, key, tensors, self._workers, self._scheme, optimizer, users)

    def perform(
        self, worker: int, request: Mapping[str, Any], tensors: Sequence[Tensor]
    ) -> Callable[[], Answer] | None:
        """Do what a worker requests. Return a function that waits for the answer and returns it; None if none is due."""
        if "settings" in request:
            for entry in list(self.entries.values()):
                entry.take_settings(worker, request["settings"])
        if "refuse" in request:
            self.refuse(request["refuse"])
        if "push" in request:
            number, step, weight, forms = request["push"]
            entry = self.entries[number]
            entry.push(worker, weight, entry.key.packing.decode(forms, tensors, step))
        if "pull" in request:
            number, wants_rows = request["pull"]
            return partial(self.entries[number].pull, worker, tensors[0] if wants_rows else None, self._timeout_s)
        if "counts" in request:
            return lambda: (self.counts().to_record(), [])
        if "leave" in request:
            for entry in list(self.entries.values()):
                entry.leave(worker)
        return None

    def refuse(self, reason: str) -> None:
        """Let pulls raise CollectiveError from now on, since a rank cannot continue."""
        for entry in list(self.entries.values()):
            entry.fail(CollectiveError(reason, rank=self.rank, operation=f"update of {entry.key.title}"))

    def lose(self, worker: int, error: CollectiveError) -> None:
        """Remove a worker that has failed with this error. If it is needed, pulls raise the error from now on."""
        for entry in list(self.entries.values()):
            if worker in self._needed:
                entry.fail(error)
            entry.lose(worker)

    def counts(self) -> Counts:
        """Return the Counts of all pushes so far."""
        return Counts.total([entry.counts() for entry in list(self.entries.values())])


def _on_cpu(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a param group, for parameters on the CPU: tensors are moved there, and a step is not captured in a
    CUDA graph."""
    moved = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in settings.items()}
    moved.pop("params", None)
    return {**moved, "capturable": False} if "capturable" in moved else moved
