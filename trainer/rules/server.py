"""A parameter server inside the ranks: a shard of the parameters with its optimizer, the threads that serve it, and a worker.

Every rank that is not the server has a Communicator of two ranks with it, on which it pushes and pulls, and which a thread
of the server's listens to. So no thread waits for another one's turn, and where a rank is lost, only its own
Communicators break.
"""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from collectives import CollectiveError, CollectiveTimeout, Communicator
from collectives.errors import ranks_text
from trainer.rules.aggregator import Aggregator, Counts, Policy
from trainer.rules.serving import Serving, say

PUSH, LEAVE, REPORT, FAILED = range(4)


class QuorumLost(CollectiveError):
    """Too many ranks are lost for another update. Attribute ranks: those that are lost."""

    def __init__(self, ranks: Sequence[int], quorum: int, *, rank: int, operation: str) -> None:
        self.ranks = tuple(sorted(ranks))
        message = f"lost {ranks_text(self.ranks)}: those that are left are fewer than the quorum of {quorum}"
        super().__init__(message, rank=rank, operation=operation)


class Flat:
    """Lays tensors out one after the other, on the CPU, in one buffer for each dtype."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._shapes = [(tensor.dtype, tensor.shape) for tensor in tensors]
        self._dtypes = list(dict.fromkeys(dtype for dtype, _ in self._shapes))

    def empty(self) -> list[Tensor]:
        """Return new buffers."""
        sizes = {dtype: sum(shape.numel() for its, shape in self._shapes if its == dtype) for dtype in self._dtypes}
        return [torch.empty(sizes[dtype], dtype=dtype) for dtype in self._dtypes]

    def pack(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """Return new buffers with these tensors, zeros for None."""
        buffers = self.empty()
        for view, tensor in zip(self.views(buffers), tensors, strict=True):
            if tensor is None:
                view.zero_()
            else:
                view.copy_(tensor.detach().to_dense() if tensor.is_sparse else tensor.detach())
        return buffers

    def views(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors that lie in buffers."""
        by_dtype = dict(zip(self._dtypes, buffers, strict=True))
        begun = dict.fromkeys(self._dtypes, 0)
        views = []
        for dtype, shape in self._shapes:
            start = begun[dtype]
            begun[dtype] += shape.numel()
            views.append(by_dtype[dtype][start : begun[dtype]].view(shape))
        return views


class Shard:
    """Holds some of the parameters with their optimizer, and updates them by what all workers contribute.

    optimizer: of which class, settings and state are taken; its param groups' settings count in each update.
    timeout_s: how long a worker waits for an update before it is an error.
    """

    def __init__(
        self,
        rank: int,
        workers: Sequence[int],
        parameters: Sequence[Tensor],
        optimizer: torch.optim.Optimizer,
        policy: Policy,
        timeout_s: float,
    ) -> None:
        self.flat = Flat(parameters)
        self.workers = list(workers)
        self._rank = rank
        self._policy = policy
        self._timeout_s = timeout_s
        self._sources = list(parameters)
        self._users = optimizer
        self._parameters = [nn.Parameter(parameter.detach().cpu().clone()) for parameter in parameters]
        self._optimizer = _of_copies(optimizer, dict(zip(parameters, self._parameters, strict=True)))
        self._changed = threading.Condition()
        self._aggregator: Aggregator[list[Tensor]] = Aggregator(workers, policy)
        self._newest = self.flat.pack(self._parameters)
        self._failure: Exception | None = None

    def exchange(self, worker: int, version: int, weight: float, gradients: list[Tensor]) -> tuple[int, list[Tensor]]:
        """Take a worker's gradients; return the version and the parameters with which it goes on, when it may.

        Raises QuorumLost; CollectiveTimeout, when that takes too long.
        """
        operation = f"step of rank {worker} at the parameter server"
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            aggregator = self._aggregator
            aggregator.push(worker, version, weight, gradients, time.monotonic())
            self._update()
            self._changed.notify_all()
            while not aggregator.may_go(worker):
                if self._failure is not None:
                    raise self._failure
                if not aggregator.holds_quorum:
                    raise QuorumLost(aggregator.lost, self._policy.quorum, rank=self._rank, operation=operation)
                now = time.monotonic()
                if now >= deadline:
                    waiting_for = aggregator.awaited
                    raise CollectiveTimeout(self._timeout_s, waiting_for, rank=self._rank, operation=operation)
                due_at = aggregator.due_at(now)
                self._changed.wait(min(deadline, deadline if due_at is None else due_at) - now)
                self._update()
            aggregator.went(worker)
            return aggregator.version, self._newest

    def leave(self, worker: int) -> None:
        """Go on without a worker that is done."""
        with self._changed:
            self._aggregator.leave(worker, time.monotonic())
            self._update()
            self._changed.notify_all()

    def lose(self, worker: int) -> None:
        """Go on without a worker that has failed."""
        with self._changed:
            self._aggregator.lose(worker, time.monotonic())
            self._update()
            self._changed.notify_all()

    def counts(self) -> Counts:
        """Return what became of all contributions so far."""
        with self._changed:
            return self._aggregator.counts()

    def state_dict(self) -> dict[str, Any]:
        """Return what load_state_dict() takes; the parameters are in the model."""
        with self._changed:
            return {"version": self._aggregator.version, "optimizer": copy.deepcopy(self._optimizer.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where state_dict() was called, with the parameters of this rank's model."""
        with self._changed, torch.no_grad():
            self._optimizer.load_state_dict(state["optimizer"])
            self._aggregator = Aggregator(self.workers, self._policy, state["version"])
            for mine, source in zip(self._parameters, self._sources, strict=True):
                mine.copy_(source)
            self._newest = self.flat.pack(self._parameters)

    def _update(self) -> None:
        """Make the update that is due, if one is, and wake whoever waits for it: nobody else, or waiting threads would wake
        each other for ever."""
        shares = self._aggregator.take(time.monotonic())
        if shares is None:
            return
        try:
            self._step(shares)
        except Exception as error:  # of the optimizer: it is every worker's, not only of the one whose turn it was
            self._failure = error
        self._changed.notify_all()

    def _step(self, shares: list[tuple[list[Tensor], float]]) -> None:
        for theirs, mine in zip(self._users.param_groups, self._optimizer.param_groups, strict=True):
            mine.update({name: value for name, value in theirs.items() if name != "params"})
        views = [self.flat.views(gradients) for gradients, _ in shares]
        for number, parameter in enumerate(self._parameters):
            wide = torch.promote_types(parameter.dtype, torch.float32)
            total = torch.zeros(parameter.shape, dtype=wide)
            for (_, factor), gradients in zip(shares, views, strict=True):
                total.add_(gradients[number].to(wide), alpha=factor)
            parameter.grad = total.to(parameter.dtype)
        self._optimizer.step()
        self._newest = self.flat.pack(self._parameters)


class Server(Serving):
    """Serves a shard to workers of other ranks."""

    def __init__(self, shard: Shard, communicators: dict[int, Communicator]) -> None:
        self._shard = shard
        super().__init__("the parameter server", shard, communicators)

    def _answer(self, worker: int, communicator: Communicator) -> bool:
        head = torch.empty(3, dtype=torch.float64)
        communicator.recv(head, 0)
        kind, version, weight = head.tolist()
        if kind == LEAVE:
            return False
        if kind == REPORT:
            say(communicator, REPORT, self._shard.counts().to_record())
            return True
        gradients = self._shard.flat.empty()
        for buffer in gradients:
            communicator.recv(buffer, 0)
        try:
            newest, parameters = self._shard.exchange(worker, int(version), weight, gradients)
        except Exception as error:  # told to the worker, who raises it
            lost = error.ranks if isinstance(error, QuorumLost) else ()
            say(communicator, FAILED, {"error": str(error), "lost": lost})
            return True
        communicator.send(torch.tensor([PUSH, newest], dtype=torch.float64), 0)
        for buffer in parameters:
            communicator.send(buffer, 0)
        return True


class Remote:
    """Is a server to its worker on another rank, which has rank 0 in their Communicator."""

    def __init__(self, rank: int, server: int, quorum: int, flat: Flat, communicator: Communicator) -> None:
        self._rank = rank
        self._server = server
        self._quorum = quorum
        self._flat = flat
        self._communicator = communicator

    def push(self, version: int, weight: float, gradients: list[Tensor]) -> None:
        """Send gradients."""
        self._say(PUSH, version, weight)
        for buffer in gradients:
            self._communicator.send(buffer, 1)

    def pull(self) -> tuple[int, list[Tensor]]:
        """Wait for the version and the parameters with which to go on. Raises what Shard.exchange() does."""
        kind, number = self._hear()
        if kind == FAILED:
            said = self._text(number)
            operation = f"step at the parameter server on rank {self._server}"
            if said["lost"]:
                raise QuorumLost(said["lost"], self._quorum, rank=self._rank, operation=operation)
            raise CollectiveError(said["error"], rank=self._rank, operation=operation)
        buffers = self._flat.empty()
        for buffer in buffers:
            self._communicator.recv(buffer, 1)
        return number, buffers

    def counts(self) -> Counts:
        """Ask what became of all contributions so far."""
        self._say(REPORT)
        return Counts.from_record(self._text(self._hear()[1]))

    def leave(self) -> None:
        """Say that nothing more comes. A server that is lost need not know."""
        with suppress(CollectiveError):
            self._say(LEAVE)

    def _say(self, kind: int, version: int = 0, weight: float = 0.0) -> None:
        self._communicator.send(torch.tensor([kind, version, weight], dtype=torch.float64), 1)

    def _hear(self) -> tuple[int, int]:
        head = torch.empty(2, dtype=torch.float64)
        self._communicator.recv(head, 1)
        kind, number = head.tolist()
        return int(kind), int(number)

    def _text(self, nbytes: int) -> dict[str, Any]:
        text = torch.empty(nbytes, dtype=torch.uint8)
        self._communicator.recv(text, 1)
        said: dict[str, Any] = json.loads(bytes(text.tolist()))
        return said


class Local:
    """Is the server to the worker of its own rank."""

    def __init__(self, rank: int, shard: Shard) -> None:
        self._rank = rank
        self._shard = shard
        self._pushed: tuple[int, float, list[Tensor]] = (0, 0.0, [])

    def push(self, version: int, weight: float, gradients: list[Tensor]) -> None:
        """Keep gradients until pull()."""
        self._pushed = (version, weight, gradients)

    def pull(self) -> tuple[int, list[Tensor]]:
        """Do as Shard.exchange()."""
        return self._shard.exchange(self._rank, *self._pushed)

    def counts(self) -> Counts:
        """Return what became of all contributions so far."""
        return self._shard.counts()

    def leave(self) -> None:
        """Say that nothing more comes."""
        self._shard.leave(self._rank)


class Worker:
    """Pushes this rank's gradients to all servers, and pulls parameters.

    parts: for each server, by which it is reached, and its parameters. Attribute versions: of the parameters that this rank
    has, one for each server.
    """

    def __init__(self, parts: Sequence[tuple[Remote | Local, Sequence[Tensor]]]) -> None:
        # A Local comes last: what other ranks wait for is on its way before this one waits for them.
        self._parts = sorted(parts, key=lambda part: isinstance(part[0], Local))
        self._flats = [Flat(parameters) for _, parameters in self._parts]
        self.versions = [0] * len(self._parts)

    def exchange(self, weight: float) -> None:
        """Push gradients, and fill the parameters with what the servers say."""
        for number, (server, parameters) in enumerate(self._parts):
            packed = self._flats[number].pack([parameter.grad for parameter in parameters])
            server.push(self.versions[number], weight, packed)
        for number in reversed(range(len(self._parts))):
            server, parameters = self._parts[number]
            self.versions[number], buffers = server.pull()
            with torch.no_grad():
                for parameter, newest in zip(parameters, self._flats[number].views(buffers), strict=True):
                    parameter.copy_(newest)

    def counts(self) -> list[Counts]:
        """Return what became of all contributions so far, at each server."""
        return [server.counts() for server, _ in self._parts]

    def leave(self) -> None:
        """Say that nothing more comes from this rank."""
        for server, _ in self._parts:
            server.leave()


def cut(parameters: Sequence[Tensor], servers: Sequence[int]) -> dict[int, list[Tensor]]:
    """Return which parameters each server has, about equal in the number of elements; a server that would have none is left
    out."""
    parts: dict[int, list[int]] = {server: [] for server in servers}
    loads = dict.fromkeys(servers, 0)
    for number in sorted(range(len(parameters)), key=lambda number: -parameters[number].numel()):
        least = min(servers, key=lambda server: loads[server])
        loads[least] += max(1, parameters[number].numel())
        parts[least].append(number)
    return {server: [parameters[number] for number in sorted(part)] for server, part in parts.items() if part}


def _of_copies(optimizer: torch.optim.Optimizer, copies: dict[Tensor, nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer as this one is, of the copies alone, in as many param groups, some of them perhaps empty."""
    known: dict[int, Any] = {
        id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]
    }
    made = copy.deepcopy(optimizer, known | {id(parameter): made for parameter, made in copies.items()})
    wanted = set(copies.values())
    for group in made.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter in wanted]
    for parameter in [parameter for parameter in made.state if parameter not in wanted]:
        del made.state[parameter]
    return made
