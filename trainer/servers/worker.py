"""PushPullWorker: pushes gradients to servers and pulls parameters. Member: shares one with a group of ranks."""

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


class PushPullWorker:
    """Pushes gradients to all servers, and pulls parameters.

    rank: this rank, which also seeds the codecs. parameters: all parameters. parts: for each server, its client and the numbers
    of its parameters. Attributes: versions, for each server in the order of parts, the version of the parameters that this rank
    pulled last; steps, the number of contributions made.
    """

    def __init__(
        self,
        rank: int,
        parameters: Sequence[Tensor],
        parts: Sequence[tuple[RemoteUpdater | LocalUpdater, Sequence[int]]],
    ) -> None:
        self._parameters = list(parameters)
        self._parts = list(parts)
        # Pull from this rank's own server first: LocalUpdater.pull() makes the contribution, for which other ranks may wait.
        self._pulls = sorted(range(len(parts)), key=lambda place: not isinstance(parts[place][0], LocalUpdater))
        self._senders = [Sender(client.packing, rank << 16 | client.server) for client, _ in self._parts]
        self.versions = [0] * len(self._parts)
        self.steps = 0

    def step(self, weight: float) -> None:
        """Push this rank's gradients, and copy the servers' newest parameters into this rank's parameters."""
        self.exchange([parameter.grad for parameter in self._parameters], weight)

    def exchange(self, gradients: Sequence[Tensor | None], weight: float) -> None:
        """Push gradients of all parameters, and copy the servers' newest parameters into this rank's parameters."""
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
        """Return the Counts of all contributions so far, one for each server."""
        return [client.counts() for client, _ in self._parts]

    def state_dict(self) -> dict[str, Any]:
        """Return the number of contributions, and the state of the Sender to each server."""
        return {"steps": self.steps, "senders": [sender.state_dict() for sender in self._senders]}

    def load_state_dict(self, state: dict[str, Any], version: int) -> None:
        """Load a state of state_dict(). version: the version of the parameters at all servers."""
        self.steps = state["steps"]
        self.versions = [version] * len(self._parts)
        for sender, saved in zip(self._senders, state["senders"], strict=True):
            sender.load_state_dict(saved)


class Member:
    """Averages gradients in a group of ranks; the first rank of the group pushes and pulls for all (Kurth et al. 2017).

    rank: this rank's number in the process set. communicator: joins the ranks of the group. worker: the PushPullWorker on
    the first rank of the group; None on the others. servers: the number of servers.
    """

    def __init__(
        self,
        rank: int,
        communicator: Communicator,
        parameters: Sequence[Tensor],
        worker: PushPullWorker | None,
        servers: int,
    ) -> None:
        self._rank = rank
        self._communicator = communicator
        self._parameters = list(parameters)
        self._flat = Flat(parameters)
        self._worker = worker
        self._versions = [0] * servers

    @property
    def versions(self) -> list[int]:
        """Return the versions of the parameters, one for each server."""
        return self._versions if self._worker is None else self._worker.versions

    def step(self, weight: float) -> None:
        """Compute the weighted average of the group's gradients; the first rank exchanges it with the servers, and broadcasts
        the parameters. Raises the first rank's error on all ranks of the group."""
        gradients, total = self._average(weight)
        if self._worker is not None:
            try:
                self._worker.exchange(gradients, total)
            except BaseException as error:  # also Ctrl-C: the other ranks wait for this rank's record
                with suppress(CollectiveError):  # if these ranks are lost too, still raise this error
                    self._communicator.allgather_record(to_record(error))
                raise
        first = self._communicator.allgather_record({"versions": self.versions})[0]
        if "versions" not in first:
            raise from_record(first, self._rank, "step at the parameter server, by rank 0 of the group")
        self._versions = first["versions"]
        self._share()

    def _average(self, weight: float) -> tuple[list[Tensor], float]:
        """Return the weighted average of all ranks' gradients, on the first rank only, and the sum of the weights."""
        total = torch.tensor([weight], dtype=torch.float64, device="cpu")
        self._communicator.allreduce(total)
        buffers = self._flat.pack([parameter.grad for parameter in self._parameters])
        for buffer in buffers:
            buffer.mul_(weight / total.item())
            self._communicator.reduce(buffer, 0)
        return self._flat.views(buffers), total.item()

    def _share(self) -> None:
        """Copy the first rank's parameters to the other ranks of the group."""
        buffers = self._flat.pack(self._parameters)
        for buffer in buffers:
            self._communicator.broadcast(buffer, 0)
        if self._worker is None:
            with torch.no_grad():
                for parameter, newest in zip(self._parameters, self._flat.views(buffers), strict=True):
                    parameter.copy_(newest)

    def counts(self) -> list[Counts]:
        """Return the Counts of all contributions so far, one per server. Raises RuntimeError on all ranks but the first."""
        if self._worker is None:
            raise RuntimeError(
                f"only the first rank of a group may ask its servers, not rank {self._communicator.rank} of it"
            )
        return self._worker.counts()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the PushPullWorker; an empty dict on ranks without one."""
        return {} if self._worker is None else self._worker.state_dict()

    def load_state_dict(self, state: dict[str, Any], version: int) -> None:
        """Load a state of state_dict(). version: the version of the parameters at all servers."""
        if self._worker is not None:
            self._worker.load_state_dict(state, version)
        self._versions = [version] * len(self._versions)
