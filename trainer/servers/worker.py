"""The ranks that train at parameter servers: a Worker pushes gradients and pulls parameters, alone or for a group of Members."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import CollectiveError, Communicator
from gradwire.trainer.servers.aggregator import Counts
from gradwire.trainer.servers.connection import Flat, from_record, to_record
from gradwire.trainer.servers.messages import LocalUpdater, RemoteUpdater
from gradwire.trainer.servers.pushed import Sender


class Worker:
    """Pushes gradients to all servers, and pulls parameters.

    rank: this one, from which the seeds of its codecs follow. parameters: all of them. parts: for each server, its client and
    the numbers of its parameters. Attributes: versions, of this rank's parameters, one for each server, in the order of parts;
    steps, how many contributions it has made.
    """

    def __init__(
        self,
        rank: int,
        parameters: Sequence[Tensor],
        parts: Sequence[tuple[RemoteUpdater | LocalUpdater, Sequence[int]]],
    ) -> None:
        self._parameters = list(parameters)
        self._parts = list(parts)
        # Its own server first: its part in that update is what other ranks may wait for.
        self._pulls = sorted(range(len(parts)), key=lambda place: not isinstance(parts[place][0], LocalUpdater))
        self._senders = [Sender(client.packing, rank << 16 | client.server) for client, _ in self._parts]
        self.versions = [0] * len(self._parts)
        self.steps = 0

    def step(self, weight: float) -> None:
        """Push this rank's gradients, and fill the parameters with the servers' newest."""
        self.exchange([parameter.grad for parameter in self._parameters], weight)

    def exchange(self, gradients: Sequence[Tensor | None], weight: float) -> None:
        """Push gradients of all parameters, and fill these with the servers' newest."""
        for place, (client, numbers) in enumerate(self._parts):
            pushed = self._senders[place].encode([gradients[number] for number in numbers], self.steps)
            client.push(self.versions[place], weight, self.steps, pushed)
        self.steps += 1
        for place in self._pulls:
            client, numbers = self._parts[place]
            self.versions[place], buffers = client.pull()
            with torch.no_grad():
                for number, newest in zip(numbers, client.packing.flat.views(buffers), strict=True):
                    self._parameters[number].copy_(newest)

    def counts(self) -> list[Counts]:
        """Return what became of all contributions so far, at each server."""
        return [client.counts() for client, _ in self._parts]

    def state_dict(self) -> dict[str, Any]:
        """Return the number of contributions, and the residuals of encodings by server."""
        return {"steps": self.steps, "senders": [sender.state_dict() for sender in self._senders]}

    def load_state_dict(self, state: dict[str, Any], version: int) -> None:
        """Go on where state_dict() was called, with parameters of this version."""
        self.steps = state["steps"]
        self.versions = [version] * len(self._parts)
        for sender, saved in zip(self._senders, state["senders"], strict=True):
            sender.load_state_dict(saved)


class Member:
    """One of the ranks that average their gradients; the first of them pushes and pulls for all (Kurth et al. 2017).

    rank: this one's number among all. communicator: of the group's ranks. worker: that of the first rank; None on the others.
    servers: their number.
    """

    def __init__(
        self, rank: int, communicator: Communicator, parameters: Sequence[Tensor], worker: Worker | None, servers: int
    ) -> None:
        self._rank = rank
        self._communicator = communicator
        self._parameters = list(parameters)
        self._flat = Flat(parameters)
        self._worker = worker
        self._versions = [0] * servers

    @property
    def versions(self) -> list[int]:
        """Return the versions of the parameters, by server."""
        return self._versions if self._worker is None else self._worker.versions

    def step(self, weight: float) -> None:
        """Average gradients by their weights; the first rank exchanges the average with the servers, and broadcasts the
        parameters. Raises the first rank's error on all ranks of the group."""
        gradients, total = self._average(weight)
        if self._worker is not None:
            try:
                self._worker.exchange(gradients, total)
            except BaseException as error:  # also Ctrl-C: the others wait for a record of this rank
                with suppress(CollectiveError):  # if they are gone too, still raise this error
                    self._communicator.allgather_record(to_record(error))
                raise
        first = self._communicator.allgather_record({"versions": self.versions})[0]
        if "versions" not in first:
            raise from_record(first, self._rank, "step at the parameter server, by rank 0 of the group")
        self._versions = first["versions"]
        self._share()

    def _average(self, weight: float) -> tuple[list[Tensor], float]:
        """Return, on the first rank, the average of all ranks' gradients, by their weights, and the sum of these."""
        total = torch.tensor([weight], dtype=torch.float64)
        self._communicator.allreduce(total)
        buffers = self._flat.pack([parameter.grad for parameter in self._parameters])
        for buffer in buffers:
            buffer.mul_(weight / total.item())
            self._communicator.reduce(buffer, 0)
        return self._flat.views(buffers), total.item()

    def _share(self) -> None:
        """Fill the parameters of the other ranks with those of the first."""
        buffers = self._flat.pack(self._parameters)
        for buffer in buffers:
            self._communicator.broadcast(buffer, 0)
        if self._worker is None:
            with torch.no_grad():
                for parameter, newest in zip(self._parameters, self._flat.views(buffers), strict=True):
                    parameter.copy_(newest)

    def counts(self) -> list[Counts]:
        """Return what became of all contributions so far, at each server. Raises RuntimeError on all ranks but the first."""
        if self._worker is None:
            raise RuntimeError(
                f"only the first rank of a group may ask its servers, not rank {self._communicator.rank} of it"
            )
        return self._worker.counts()

    def state_dict(self) -> dict[str, Any]:
        """Return the Worker's state; an empty one on ranks without a Worker."""
        return {} if self._worker is None else self._worker.state_dict()

    def load_state_dict(self, state: dict[str, Any], version: int) -> None:
        """Go on where state_dict() was called, with parameters of this version."""
        if self._worker is not None:
            self._worker.load_state_dict(state, version)
        self._versions = [version] * len(self._versions)
