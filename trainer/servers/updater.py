"""Updater: holds some of the parameters with their optimizer on a server, and updates them with workers' contributions."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.collectives import CollectiveError, CollectiveTimeout
from gradwire.trainer.optimizers.copies import of_copies
from gradwire.trainer.servers.aggregator import Aggregator, Counts, Scheme
from gradwire.trainer.servers.connection import Flat, QuorumLost
from gradwire.trainer.servers.rows import weighted_sum


class Updater:
    """Holds some of the parameters with their optimizer, and updates them with all workers' contributions.

    servers: the ranks that serve; if one is lost, no rank can continue. optimizer: gives the class, settings and state of the
    server's optimizer; each update uses the settings of its param groups, unless workers have sent their own. timeout_s: how
    long exchange() waits before it raises CollectiveTimeout.
    """

    def __init__(
        self,
        rank: int,
        workers: Sequence[int],
        servers: Collection[int],
        parameters: Sequence[Tensor],
        optimizer: torch.optim.Optimizer,
        scheme: Scheme,
        timeout_s: float,
    ) -> None:
        self.flat = Flat(parameters)
        self.workers = list(workers)
        self.rank = rank
        self._servers = servers
        self._scheme = scheme
        self._timeout_s = timeout_s
        self._sources = list(parameters)
        self._users = optimizer
        self._settings: dict[int, list[dict[str, Any]]] = {}  # settings of param groups, by the worker that sent them
        self._parameters = [nn.Parameter(parameter.detach().cpu().clone()) for parameter in parameters]
        self._optimizer = of_copies(optimizer, dict(zip(parameters, self._parameters, strict=True)))
        self._changed = threading.Condition()
        self._aggregator: Aggregator[list[Tensor | None]] = Aggregator(workers, scheme)
        self._newest = self.flat.pack(self._parameters)
        self._failure: CollectiveError | None = None

    def exchange(
        self, worker: int, version: int, weight: float, gradients: list[Tensor | None]
    ) -> tuple[int, list[Tensor]]:
        """Add a worker's gradients, wait until the worker may continue, and return the version and the parameters.

        Raises QuorumLost if too few workers remain; CollectiveTimeout after timeout_s; CollectiveError if the optimizer has
        failed or a worker has refused a step; the error of lose() if a rank that serves is lost.
        """
        operation = f"step of rank {worker} at the parameter server"
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            aggregator = self._aggregator
            aggregator.push(worker, version, weight, gradients, time.monotonic())
            self._update()
            self._changed.notify_all()
            while self._failure is not None or not aggregator.may_go(worker):
                if self._failure is not None:  # each thread raises a new error
                    raise self._failure.again(str(self._failure), operation) from self._failure
                if not aggregator.holds_quorum:
                    raise QuorumLost(aggregator.lost, aggregator.quorum, rank=self.rank, operation=operation)
                now = time.monotonic()
                if now >= deadline:
                    waiting_for = aggregator.blocking(worker)
                    raise CollectiveTimeout(self._timeout_s, waiting_for, rank=self.rank, operation=operation)
                due_at = aggregator.due_at(now)
                self._changed.wait(min(deadline, deadline if due_at is None else due_at) - now)
                self._update()
            aggregator.went(worker)
            return aggregator.version, self._newest

    def refuse(self, reason: str) -> None:
        """Let exchange() raise CollectiveError from now on, since a rank cannot continue."""
        with self._changed:
            if self._failure is None:
                self._failure = CollectiveError(reason, rank=self.rank, operation="update at the parameter server")
            self._changed.notify_all()

    def take_settings(self, worker: int, settings: list[dict[str, Any]]) -> None:
        """Keep the settings of a worker's param groups. Updates use the settings of the lowest-numbered remaining
        worker."""
        with self._changed:
            self._settings[worker] = [
                {name: tuple(value) if isinstance(value, list) else value for name, value in group.items()}
                for group in settings
            ]

    def leave(self, worker: int) -> None:
        """Remove a worker that has finished."""
        with self._changed:
            self._forget_settings(worker)
            self._aggregator.leave(worker, time.monotonic())
            self._update()
            self._changed.notify_all()

    def lose(self, worker: int, error: CollectiveError) -> None:
        """Remove a worker that has failed with this error. If its rank also serves, exchange() raises the error from now on."""
        with self._changed:
            if worker in self._servers and self._failure is None:
                self._failure = error
            self._forget_settings(worker)
            self._aggregator.lose(worker, time.monotonic())
            self._update()
            self._changed.notify_all()

    def counts(self) -> Counts:
        """Return the Counts of all contributions so far."""
        with self._changed:
            return self._aggregator.counts()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for load_state_dict(), without the parameters, which are in the model."""
        with self._changed:
            return {"version": self._aggregator.version, "optimizer": copy.deepcopy(self._optimizer.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of state_dict(), and copy the parameters of this rank's model."""
        with self._changed, torch.no_grad():
            self._optimizer.load_state_dict(state["optimizer"])
            self._aggregator = Aggregator(self.workers, self._scheme, state["version"])
            for mine, source in zip(self._parameters, self._sources, strict=True):
                mine.copy_(source)
            self._newest = self.flat.pack(self._parameters)

    def _update(self) -> None:
        """Make the update that is due, if any, and wake the waiting threads. Without an update, do not wake them: they call
        this too, and would wake each other for ever."""
        shares = self._aggregator.take(time.monotonic())
        if shares is None:
            return
        try:
            self._step(shares)
        except Exception as error:  # every worker must raise it, not only this thread's
            message = f"the optimizer has failed: {error!r}"
            self._failure = CollectiveError(message, rank=self.rank, operation="update at the parameter server")
            self._failure.__cause__ = error
        self._changed.notify_all()

    def _forget_settings(self, worker: int) -> None:
        """Drop a worker's settings, so that updates use another worker's. Keep them if there are no others."""
        if len(self._settings) > 1:
            self._settings.pop(worker, None)

    def _step(self, shares: list[tuple[list[Tensor | None], float]]) -> None:
        settings = self._settings[min(self._settings)] if self._settings else self._users.param_groups
        for theirs, mine in zip(settings, self._optimizer.param_groups, strict=True):
            mine.update(_on_cpu(theirs))
        for number, parameter in enumerate(self._parameters):
            given = [(gradients[number], factor) for gradients, factor in shares]
            parameter.grad = weighted_sum(given, parameter.dtype)
        self._optimizer.step()
        self._newest = self.flat.pack(self._parameters)


def _on_cpu(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a param group, for parameters on the CPU: tensors are moved there, and a step is not captured in a
    CUDA graph."""
    moved = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in settings.items()}
    moved.pop("params", None)
    return {**moved, "capturable": False} if "capturable" in moved else moved


def cut(parameters: Sequence[Tensor], servers: Sequence[int]) -> dict[int, list[int]]:
    """Divide parameters among servers, with about equal numbers of elements. Return the parameters' numbers for each server
    that has any."""
    parts: dict[int, list[int]] = {server: [] for server in servers}
    loads = dict.fromkeys(servers, 0)
    for number in sorted(range(len(parameters)), key=lambda number: -parameters[number].numel()):
        least = min(servers, key=lambda server: loads[server])
        loads[least] += max(1, parameters[number].numel())
        parts[least].append(number)
    return {server: sorted(part) for server, part in parts.items() if part}
