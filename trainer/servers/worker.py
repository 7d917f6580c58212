"""PushPullWorker: pushes gradients to servers and pulls parameters. Member: shares one with a group of ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import CollectiveError, Communicator
from gradwire.collectives.sparse import begin_sum
from gradwire.trainer.servers.aggregator import Counts
from gradwire.trainer.servers.connection import Flat, from_record, to_record
from gradwire.trainer.servers.pushed import Sender
from gradwire.trainer.servers.rows import ABSENT, DENSE, coalesced, form_of
from gradwire.trainer.servers.server import Key
from gradwire.trainer.servers.serving import Client, LocalClient


class PushPullWorker:
    """Pushes gradients to all servers, and pulls parameters.

    rank: this rank, which also seeds the codecs. parameters: all parameters. parts: for each server, its client, its key and
    the numbers of its parameters. timeout_s: the limit of a step.

    Attributes: versions, for each server in the order of parts, the version of the parameters that this rank pulled last;
    steps, the number of contributions made.
    """

    def __init__(
        self,
        rank: int,
        parameters: Sequence[Tensor],
        parts: Sequence[tuple[Client | LocalClient, Key, Sequence[int]]],
        timeout_s: float,
    ) -> None:
        self._timeout_s = timeout_s
        self._parameters = list(parameters)
        self._parts = list(parts)
        # Push to this rank's own server last: it may update at once, and the other servers need not wait for that.
        self._pushes = sorted(range(len(parts)), key=lambda place: isinstance(parts[place][0], LocalClient))
        self._senders = [Sender(key.packing, rank << 16 | key.server) for _, key, _ in self._parts]
        self.versions = [0] * len(self._parts)
        self.steps = 0

    def step(self, gradients: Sequence[Tensor | None], weight: float, refusal: str | None) -> None:
        """Push gradients of all parameters, and copy the servers' newest parameters into this rank's parameters.

        weight: of the gradients; 0 if they are all None. refusal: why this rank cannot take the step: then, nothing is pushed,
        the other ranks' steps fail, and RuntimeError is raised.
        """
        if refusal is not None:
            for client, *_ in self._parts:
                client.refuse(refusal)
            raise RuntimeError(refusal)
        deadline = time.monotonic() + self._timeout_s
        for place in self._pushes:
            client, key, numbers = self._parts[place]
            pushed = self._senders[place].encode([gradients[number] for number in numbers], self.steps)
            client.push(key, pushed, self.steps, weight=weight, pulls=True, deadline=deadline)
        self.steps += 1
        for place, (client, key, numbers) in enumerate(self._parts):
            self.versions[place], buffers = client.pull(key, deadline=deadline)
            with torch.no_grad():
                for number, newest in zip(numbers, key.packing.flat.views(buffers), strict=True):
                    self._parameters[number].copy_(newest)

    def counts(self) -> list[Counts]:
        """Return the Counts of all contributions so far, one for each server."""
        return [client.counts() for client, *_ in self._parts]

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

    def step(self, gradients: Sequence[Tensor | None], weight: float, refusal: str | None) -> None:
        """Compute the weighted average of the group's gradients; the first rank pushes it to the servers, pulls the parameters,
        and broadcasts them. The arguments are those of PushPullWorker.step(). Raises the first rank's error on all ranks of the
        group; RuntimeError on all ranks if one has a refusal."""
        mine = [coalesced(gradient) for gradient in gradients]
        table = self._gathered([weight, refusal is not None, *chain.from_iterable(map(form_of, mine))])
        averaged, total = [], table[:, 0].sum().item()
        if table[:, 1].any():
            refusal = next(filter(None, self._communicator.allgather_record(refusal)))
        else:
            averaged = self._average(mine, table[:, 2:], weight / total if total else 0.0)
        if self._worker is not None:
            try:
                self._worker.step(averaged, total, refusal)
            except BaseException as error:  # also Ctrl-C: the other ranks wait for this rank's record
                with suppress(CollectiveError):  # if these ranks are lost too, still raise this error
                    self._communicator.allgather_record(to_record(error))
                raise
        if refusal is not None:
            raise RuntimeError(refusal)
        first = self._communicator.allgather_record({"versions": self.versions})[0]
        if "versions" not in first:
            raise from_record(first, self._rank, "step at the parameter server, by rank 0 of the group")
        self._versions = first["versions"]
        self._share()

    def _gathered(self, numbers: Sequence[float]) -> Tensor:
        """Return the numbers of all ranks, a row for each."""
        own = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        table = own.new_empty(self._communicator.size, own.numel())
        self._communicator.allgather(table, own)
        return table

    def _average(self, mine: Sequence[Tensor | None], forms_by_rank: Tensor, share: float) -> list[Tensor | None]:
        """Return the weighted average of all ranks' gradients, on the first rank only. It is None where no rank has a gradient,
        and sparse where all ranks that have one have a sparse one. share: the factor of this rank's gradients."""
        forms = forms_by_rank.long().unflatten(1, (-1, 2)).transpose(0, 1).tolist()
        kinds = [{dimensions for dimensions, _ in by_rank} - {ABSENT} for by_rank in forms]
        averaged: list[Tensor | None] = [None] * len(mine)
        dense = [number for number, kind in enumerate(kinds) if DENSE in kind or len(kind) > 1]
        flat = self._flat if len(dense) == len(mine) else Flat([self._parameters[number] for number in dense])
        buffers = flat.pack([mine[number] for number in dense])
        for buffer in buffers:
            buffer.mul_(share)
            self._communicator.reduce(buffer, 0)
        for number, view in zip(dense, flat.views(buffers), strict=True):
            averaged[number] = view
        for number, kind in enumerate(kinds):
            if len(kind) == 1 and DENSE not in kind:
                counts = [rows for _, rows in forms[number]]
                averaged[number] = self._sum_of_rows(self._parameters[number], mine[number], counts, min(kind), share)
        return averaged

    def _sum_of_rows(
        self, parameter: Tensor, gradient: Tensor | None, counts: Sequence[int], dimensions: int, share: float
    ) -> Tensor:
        """Return the sum of all ranks' sparse gradients of a parameter, each times the share of its rank. counts: the number
        of rows of each rank. dimensions: the number of sparse dimensions."""
        indices = torch.empty((0, dimensions), dtype=torch.int64, device="cpu")
        values = torch.empty((0, *parameter.shape[dimensions:]), dtype=parameter.dtype, device="cpu")
        if gradient is not None:
            indices, values = gradient.indices().t().cpu(), gradient.values().cpu() * share
        works, add = begin_sum(self._communicator, indices, values, counts, parameter.shape)
        for work in works:
            work.wait()
        return add()

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
