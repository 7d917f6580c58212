"""A worker's calls to an Updater: by messages if it is on another rank, whose threads answer; directly if on the same rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import CollectiveError, Communicator
from gradwire.trainer.servers.connection import receive, to_bytes
from gradwire.trainer.servers.pushed import Packing
from gradwire.trainer.servers.serving import OWN, Answer, Client, LocalClient
from gradwire.trainer.servers.updater import Updater
from gradwire.trainer.world.world import here

PUSH, SETTINGS, REFUSE = range(OWN, OWN + 3)


def answer(
    updater: Updater, packing: Packing, worker: int, communicator: Communicator, kind: int, numbers: Sequence[float]
) -> Callable[[], Answer] | None:
    """Handle a worker's request to an Updater, as serving.Answering describes. packing: how the pushed gradients are packed."""
    if kind == SETTINGS:
        updater.take_settings(worker, receive(communicator, int(numbers[0]), 0))
        return None
    if kind == REFUSE:
        updater.refuse(receive(communicator, int(numbers[0]), 0))
        return None
    if kind != PUSH:
        raise ValueError(
            f"rank {worker} sent {kind}, which is none of PUSH ({PUSH}), SETTINGS ({SETTINGS}) and REFUSE ({REFUSE})"
        )
    weight, version, step = numbers[0], int(numbers[1]), int(numbers[2])
    forms = packing.empty_forms()
    communicator.recv(forms, 0)
    buffers = packing.empty(forms, step)
    for buffer in buffers:
        communicator.recv(buffer, 0)
    return lambda: updater.exchange(worker, version, weight, packing.decode([forms, *buffers], step))


class RemoteUpdater(Client):
    """Calls an Updater on another rank.

    settings: the optimizer whose param group settings are sent to the server when they change; None if the server uses its
    own.
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
        self._sent: Tensor | None = None

    def push(self, version: int, weight: float, step: int, pushed: list[Tensor], deadline: float) -> None:
        """Send the gradients of a step, as Sender.encode() returned them."""
        settings = None if self._settings is None else _settings_of(self._settings)
        with self._reached("step"), self._until(deadline):
            if settings is not None and (self._sent is None or not torch.equal(settings, self._sent)):
                self._request(SETTINGS, settings.numel(), tensors=[settings])
                self._sent = settings
            self._request(PUSH, weight, version, step, tensors=pushed)
        self.is_answer_due = True

    def refuse(self, reason: str) -> None:
        """Let the steps of all workers fail for a reason, see Updater.refuse()."""
        text = to_bytes(reason)
        with suppress(CollectiveError), self._reached("step"):  # without the server, the other workers fail too
            self._request(REFUSE, text.numel(), tensors=[text])

    def pull(self, deadline: float) -> tuple[int, list[Tensor]]:
        """Wait for the server's answer, and return its version and its buffers of parameters. Raises the errors of
        Updater.exchange(), and PeerLost with the server's rank if the server is lost."""
        buffers = self.packing.flat.empty()
        with self._reached("step"), self._until(deadline):
            return int(self._receive(buffers)), buffers

    def leave(self, deadline: float = 0.0) -> None:
        """Receive the server's answer, if one is due and begins to arrive before the deadline; then call Client.leave()."""
        if self.is_answer_due:
            with suppress(CollectiveError):
                self.pull(deadline)
        super().leave(deadline)


class LocalUpdater(LocalClient[Updater]):
    """Calls the Updater on the same rank."""

    def __init__(self, updater: Updater, packing: Packing) -> None:
        super().__init__(updater)
        self.packing = packing
        self._pushed: tuple[int, float, list[Tensor | None]] = (0, 0.0, [])

    def push(self, version: int, weight: float, step: int, pushed: list[Tensor], deadline: float) -> None:
        """Decode the gradients of a step, which Sender.encode() returned, and keep them until pull()."""
        self._pushed = (version, weight, self.packing.decode(pushed, step))

    def refuse(self, reason: str) -> None:
        """Call Updater.refuse()."""
        self._served.refuse(reason)

    def pull(self, deadline: float) -> tuple[int, list[Tensor]]:
        """Call Updater.exchange() with the kept gradients, and return its result."""
        return self._served.exchange(self.server, *self._pushed)


def _settings_of(optimizer: torch.optim.Optimizer) -> Tensor:
    """Return the settings of all param groups, by to_bytes(). Raises TypeError for anything but numbers, strings and tuples."""

    def number_of(value: Any) -> Any:
        if getattr(value, "ndim", None) == 0:  # a scalar of torch or NumPy
            return value.item()
        raise TypeError(f"{here()}the setting {value!r} of a param group cannot be sent to a rank that serves only")

    groups = optimizer.param_groups
    kept = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    return to_bytes(kept, default=number_of)
