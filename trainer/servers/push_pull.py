"""PushPull: a step of a rank at a parameter server. GroupPushPull: the same of a group of ranks, of which the first pushes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from gradwire.collectives import CollectiveError, Communicator
from gradwire.collectives.sparse import begin_sum
from gradwire.trainer.servers.aggregator import Counts
from gradwire.trainer.servers.messages import Flat, from_record, to_record
from gradwire.trainer.servers.packing import ABSENT, DENSE, Forms, coalesced, forms_of
from gradwire.trainer.servers.server import Key
from gradwire.trainer.servers.worker import Worker


class Part(NamedTuple):
    """The parameters at one server. key: their key. numbers: their places among all parameters."""

    key: Key
    numbers: Sequence[int]


class PushPull:
    """Pushes gradients to all servers, and pulls parameters.

    rank: this rank. worker: has the keys of all parts; None on a rank of a group for which another pushes. timeout_s: the limit
    of a step. Attribute versions: for each part, the version of the parameters that this rank has pulled last.
    """

    def __init__(
        self, rank: int, parameters: Sequence[Tensor], parts: Sequence[Part], worker: Worker | None, timeout_s: float
    ) -> None:
        self.versions = [0] * len(parts)
        self._rank = rank
        self._parameters = list(parameters)
        self._parts = list(parts)
        self._worker = worker
        self._timeout_s = timeout_s
        if worker is not None:
            for part in parts:
                worker.add(part.key, seed=rank << 16 | part.key.server)

    def step(self, gradients: Sequence[Tensor | None], weight: float, refusal: str | None) -> None:
        """Push gradients of all parameters, and copy the servers' newest parameters into this rank's parameters.

        weight: of the gradients; 0 if they are all None. refusal: why this rank cannot take the step: then, nothing is pushed,
        the other ranks' steps fail, and RuntimeError is raised.
        """
        if refusal is not None:
            self._refuse(refusal)
        worker = self._worker
        assert worker is not None
        deadline = time.monotonic() + self._timeout_s
        # Push to this rank's own server last: it may update at once, and the other servers need not wait for that.
        for key, numbers in sorted(self._parts, key=lambda part: part.key.server == self._rank):
            pushed = [gradients[number] for number in numbers]
            worker.push(key, pushed, weight=weight, pulls=True, deadline=deadline)
        for place, (key, numbers) in enumerate(self._parts):
            self.versions[place], newest = worker.pull(key, deadline=deadline)
            self._copy([self._parameters[number] for number in numbers], newest)

    def _refuse(self, reason: str) -> NoReturn:
        """Let the steps of the other ranks fail, and raise RuntimeError."""
        if self._worker is not None:
            self._worker.refuse(reason)
        raise RuntimeError(reason)

    @torch.no_grad()
    def _copy(self, parameters: Sequence[Tensor], newest: Sequence[Tensor]) -> None:
        for parameter, value in zip(parameters, newest, strict=True):
            parameter.copy_(value)

    def counts(self) -> list[Counts]:
        """Return the Counts of all contributions so far, one for each server. Raises RuntimeError on the ranks of a group for
        which another pushes."""
        if self._worker is None:
            raise RuntimeError("only the first rank of a group may ask its servers")
        return self._worker.counts()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the Worker; an empty dict on a rank without one."""
        return {} if self._worker is None else self._worker.state_dict()

    def load_state_dict(self, state: dict[str, Any], version: int) -> None:
        """Load a state of state_dict(). version: the version of the parameters at all servers."""
        if self._worker is not None:
            self._worker.load_state_dict(state)
        self.versions = [version] * len(self.versions)


class GroupPushPull(PushPull):
    """Averages gradients in a group of ranks; the first rank of the group pushes and pulls for all (Kurth et al. 2017).

    group: joins the ranks of the group. The other arguments are those of PushPull.
    """

    def __init__(
        self,
        rank: int,
        parameters: Sequence[Tensor],
        parts: Sequence[Part],
        worker: Worker | None,
        timeout_s: float,
        group: Communicator,
    ) -> None:
        super().__init__(rank, parameters, parts, worker, timeout_s)
        self._group = group
        self._flat = Flat(parameters)
        self._buffers = self._flat.empty()

    def step(self, gradients: Sequence[Tensor | None], weight: float, refusal: str | None) -> None:
        """Compute the weighted average of the group's gradients; the first rank pushes it to the servers, pulls the parameters,
        and broadcasts them. Raises the first rank's error on all ranks of the group; RuntimeError on all ranks if one has a
        refusal."""
        mine = [coalesced(gradient) for gradient in gradients]
        forms = forms_of(mine)
        rows = [each._nnz() for each in mine if each is not None and each.is_sparse]
        gathered = self._group.allgather_record([weight, refusal, forms if any(forms) else None, rows])
        total = sum(theirs for theirs, *_ in gathered)
        refusal = next((theirs for _, theirs, _, _ in gathered if theirs is not None), None)
        if refusal is not None:  # which every rank of the group knows, so none waits for the record of the first
            self._refuse(refusal)
        all_forms = [theirs or [DENSE] * len(mine) for _, _, theirs, _ in gathered]
        averaged = self._average(
            mine, all_forms, [list(theirs) for *_, theirs in gathered], weight / total if total else 0.0
        )
        if self._worker is not None:
            try:
                super().step(averaged, total, None)
            except BaseException as error:  # also Ctrl-C: the other ranks wait for this rank's record
                with suppress(CollectiveError):  # if these ranks are lost too, still raise this error
                    self._group.allgather_record(to_record(error))
                raise
        first = self._group.allgather_record({"versions": self.versions})[0]
        if "versions" not in first:
            raise from_record(first, self._rank, "step at the parameter server, by rank 0 of the group")
        self.versions = first["versions"]
        if self._worker is not None:
            self._flat.pack(self._parameters, self._buffers)
        for buffer in self._buffers:
            self._group.broadcast(buffer, 0)
        if self._worker is None:
            self._copy(self._parameters, self._flat.views(self._buffers))

    def _average(
        self, mine: Sequence[Tensor | None], forms: Sequence[Forms], rows: Sequence[list[int]], share: float
    ) -> list[Tensor | None]:
        """Return the weighted average of all ranks' gradients, on the first rank only. It is None where no rank has a gradient,
        and sparse where all ranks that have one have a sparse one.

        forms: of each rank's gradients. rows: the numbers of elements of each rank's sparse ones. share: the factor of this
        rank's gradients.
        """
        kinds = [set(of_one) - {ABSENT} for of_one in zip(*forms, strict=True)]
        averaged: list[Tensor | None] = [None] * len(mine)
        dense = [number for number, kind in enumerate(kinds) if DENSE in kind or len(kind) > 1]
        is_whole = len(dense) == len(mine)
        flat = self._flat if is_whole else Flat([self._parameters[number] for number in dense])
        buffers = flat.pack([mine[number] for number in dense], self._buffers if is_whole else None)
        for buffer in buffers:
            buffer.mul_(share)
            self._group.reduce(buffer, 0)
        for number, view in zip(dense, flat.views(buffers), strict=True):
            averaged[number] = view
        for number, kind in enumerate(kinds):
            counts = [of_rank.pop(0) if forms[rank][number] > 0 else 0 for rank, of_rank in enumerate(rows)]
            if len(kind) == 1 and DENSE not in kind:
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
        works, add = begin_sum(self._group, indices, values, counts, parameter.shape)
        for work in works:
            work.wait()
        return add()
