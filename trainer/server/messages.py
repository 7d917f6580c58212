"""What workers and a parameter server say to each other: the threads that serve an Updater, and what stands for it at a worker.

Every worker on another rank has a Communicator of two ranks with the server, on which it pushes and pulls, and which a
thread of the server's listens to. So no thread waits for another one's turn, and where a rank is lost, only its own
Communicators break.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from collectives import CollectiveError, Communicator
from trainer.server.aggregator import Counts
from trainer.server.errors import from_record, of_pair, to_record
from trainer.server.pushed import Packing
from trainer.server.serving import Serving, hear, receive_record, say
from trainer.server.updater import Updater
from trainer.world import here

PUSH, LEAVE, REPORT, FAILED, SETTINGS = range(5)


class Server(Serving):
    """Serves an Updater to workers of other ranks. packing: in which they push their gradients."""

    def __init__(self, updater: Updater, packing: Packing, communicators: dict[int, Communicator]) -> None:
        self._updater = updater
        self._packing = packing
        super().__init__("the parameter server", updater, communicators)

    def _answer(self, worker: int, communicator: Communicator) -> bool:
        """Answer the next thing that a worker says; False where that was the last."""
        head = torch.empty(4, dtype=torch.float64)
        communicator.recv(head, 0)
        kind, version, weight, step = head.tolist()
        if kind == LEAVE:
            return False
        if kind == REPORT:
            say(communicator, REPORT, self._updater.counts().to_record())
            return True
        if kind == SETTINGS:
            self._updater.take_settings(worker, receive_record(communicator, int(version), 0))
            return True
        pushed = self._packing.empty(int(step))
        for buffer in pushed:
            communicator.recv(buffer, 0)
        try:
            gradients = self._packing.decode(pushed, int(step))
            newest, parameters = self._updater.exchange(worker, int(version), weight, gradients)
        except Exception as error:  # told to the worker, who raises it
            say(communicator, FAILED, to_record(error))
            return True
        communicator.send(torch.tensor([PUSH, newest], dtype=torch.float64), 0)
        for buffer in parameters:
            communicator.send(buffer, 0)
        return True


class Remote:
    """Is a server to its worker on another rank, which has rank 0 in their Communicator.

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
        self.packing = packing
        self.server = server
        self._rank = rank
        self._operation = f"step at the parameter server on rank {server}"
        self._communicator = communicator
        self._settings = settings
        self._told = ""
        self._is_between_messages = True
        self.is_answer_due = False
        """Whether gradients have been pushed, and nothing pulled since."""

    def push(self, version: int, weight: float, step: int, pushed: list[Tensor]) -> None:
        """Send what a Sender has made of gradients at a step."""
        settings = self._told if self._settings is None else _settings_text(self._settings)
        with self._reached():
            if settings != self._told:
                text = torch.tensor(list(settings.encode()), dtype=torch.uint8)
                self._say(SETTINGS, text.numel())
                self._communicator.send(text, 1)
                self._told = settings
            self._say(PUSH, version, weight, step)
            for buffer in pushed:
                self._communicator.send(buffer, 1)
        self.is_answer_due = True

    def pull(self) -> tuple[int, list[Tensor]]:
        """Wait for the version and the parameters with which to go on. Raises what Updater.exchange() does; PeerLost, with the
        server's rank, where that is lost."""
        with self._reached():
            kind, number = hear(self._communicator)
            said = receive_record(self._communicator, number, 1) if kind == FAILED else None
            buffers = [] if said is not None else self.packing.flat.empty()
            for buffer in buffers:
                self._communicator.recv(buffer, 1)
        self.is_answer_due = False
        if said is not None:
            raise from_record(said, self._rank, self._operation)
        return number, buffers

    def counts(self) -> Counts:
        """Ask what became of all contributions so far."""
        with self._reached():
            self._say(REPORT)
            return Counts.from_record(receive_record(self._communicator, hear(self._communicator)[1], 1))

    def leave(self) -> None:
        """Say that nothing more comes, once the server's answer has been taken, if one is due. Where a message was broken off,
        which ends the Communicator, the server sees that."""
        if self.is_answer_due:
            with suppress(CollectiveError):
                self.pull()
        if self._is_between_messages:
            with suppress(CollectiveError):  # a server that is lost need not know
                self._say(LEAVE)
        else:
            self._communicator.close()

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Give errors of the Communicator the optimizer's numbers of ranks."""
        self._is_between_messages = False
        try:
            yield
            self._is_between_messages = True
        except CollectiveError as error:
            raise of_pair(error, (self._rank, self.server), self._rank, self._operation) from error

    def _say(self, kind: int, version: int = 0, weight: float = 0.0, step: int = 0) -> None:
        self._communicator.send(torch.tensor([kind, version, weight, step], dtype=torch.float64), 1)


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


def _settings_text(optimizer: torch.optim.Optimizer) -> str:
    """Return the settings of all param groups. Raises TypeError for others than numbers, strings and tuples."""

    def number_of(value: Any) -> Any:
        if getattr(value, "ndim", None) == 0:  # of torch or NumPy
            return value.item()
        raise TypeError(f"{here()}a server that serves only cannot be told the setting {value!r} of a param group")

    groups = optimizer.param_groups
    kept = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    return json.dumps(kept, default=number_of)
