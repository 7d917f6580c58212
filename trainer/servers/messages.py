"""What workers and a parameter server say to each other: the threads that serve an Updater, and what stands for it at a worker.

Every worker on another rank has a Communicator of two ranks with the server, on which it pushes and pulls, and which a
thread of the server's listens to. So no thread waits for another one's turn, and where a rank is lost, only its own
Communicators break.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import CollectiveError, Communicator
from gradwire.trainer.servers.aggregator import Counts
from gradwire.trainer.servers.connection import from_record, receive, to_bytes, to_record
from gradwire.trainer.servers.pushed import Packing
from gradwire.trainer.servers.serving import DONE, FAILED, OWN, Client, Serving, say
from gradwire.trainer.servers.updater import Updater
from gradwire.trainer.world.world import here

PUSH, SETTINGS = range(OWN, OWN + 2)


class Server(Serving):
    """Serves an Updater to workers of other ranks. packing: in which they push their gradients."""

    def __init__(self, updater: Updater, packing: Packing, communicators: dict[int, Communicator]) -> None:
        self._updater = updater
        self._packing = packing
        super().__init__("the parameter server", updater, communicators)

    def _answer(self, worker: int, communicator: Communicator, kind: int, numbers: Sequence[float]) -> None:
        if kind == SETTINGS:
            self._updater.take_settings(worker, receive(communicator, int(numbers[0]), 0))
            return
        if kind != PUSH:
            raise ValueError(f"rank {worker} says {kind}, which is neither PUSH ({PUSH}) nor SETTINGS ({SETTINGS})")
        weight, version, step = numbers[0], int(numbers[1]), int(numbers[2])
        pushed = self._packing.empty(step)
        for buffer in pushed:
            communicator.recv(buffer, 0)
        try:
            newest, parameters = self._updater.exchange(worker, version, weight, self._packing.decode(pushed, step))
        except Exception as error:  # told to the worker, who raises it
            say(communicator, FAILED, to_record(error))
            return
        communicator.send(torch.tensor([DONE, newest], dtype=torch.float64), 0)
        for buffer in parameters:
            communicator.send(buffer, 0)


class Remote(Client):
    """Is a server to its worker on another rank.

    settings: the optimizer whose param groups' settings the server is told when they change; None where it has its own.
    """

    def __init__(
        self,
        rank: int,
        server: int,
        packing: Packing,
        communicator: Communicator,
        settings: torch.optim.Optimizer | None = None,
    ) -> None:
        super().__init__("the parameter server", rank, server, communicator)
        self.packing = packing
        self._settings = settings
        self._told: Tensor | None = None
        self.is_answer_due = False
        """Whether gradients have been pushed, and nothing pulled since."""

    def push(self, version: int, weight: float, step: int, pushed: list[Tensor]) -> None:
        """Send what a Sender has made of gradients at a step."""
        settings = None if self._settings is None else _settings_of(self._settings)
        with self._reached("step"):
            if settings is not None and (self._told is None or not torch.equal(settings, self._told)):
                self._say(SETTINGS, settings.numel())
                self._communicator.send(settings, 1)
                self._told = settings
            self._say(PUSH, weight, version, step)
            for buffer in pushed:
                self._communicator.send(buffer, 1)
        self.is_answer_due = True

    def pull(self, timeout_s: float | None = None) -> tuple[int, list[Tensor]]:
        """Wait for the version and the parameters with which to go on. timeout_s: until they begin to come; None for that of
        the Communicator. Raises what Updater.exchange() does; PeerLost, with the server's rank, where that is lost."""
        with self._reached("step"):
            version, error = self._hear(timeout_s)
            buffers = [] if error is not None else self.packing.flat.empty()
            for buffer in buffers:
                self._communicator.recv(buffer, 1)
        self.is_answer_due = False
        if error is not None:
            raise from_record(error, self._rank, self._at("step"))
        return version, buffers

    def settle(self, deadline: float) -> None:
        """Take the server's answer, if one is due, which must begin before the deadline (time.monotonic())."""
        if self.is_answer_due:
            with suppress(CollectiveError):
                self.pull(max(0.0, deadline - time.monotonic()))


class Local:
    """Is the server to the worker of its own rank."""

    def __init__(self, rank: int, updater: Updater, packing: Packing) -> None:
        self.packing = packing
        self.server = rank
        self.is_answer_due = False
        """As of a Remote; but nobody sends it."""
        self._updater = updater
        self._pushed: tuple[int, float, list[Tensor]] = (0, 0.0, [])

    def push(self, version: int, weight: float, step: int, pushed: list[Tensor]) -> None:
        """Keep what a Sender has made of gradients at a step until pull()."""
        self._pushed = (version, weight, self.packing.decode(pushed, step))

    def pull(self) -> tuple[int, list[Tensor]]:
        """Do as Updater.exchange()."""
        return self._updater.exchange(self.server, *self._pushed)

    def counts(self) -> Counts:
        """Return what became of all contributions so far."""
        return self._updater.counts()

    def leave(self) -> None:
        """Say that nothing more comes."""
        self._updater.leave(self.server)


def _settings_of(optimizer: torch.optim.Optimizer) -> Tensor:
    """Return the settings of all param groups as a record. Raises TypeError for others than numbers, strings and tuples."""

    def number_of(value: Any) -> Any:
        if getattr(value, "ndim", None) == 0:  # of torch or NumPy
            return value.item()
        raise TypeError(f"{here()}a server that serves only cannot be told the setting {value!r} of a param group")

    groups = optimizer.param_groups
    kept = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    return to_bytes(kept, default=number_of)
