"""ParameterServer: a torch optimizer that runs at servers inside the ranks, which need not wait for all of them."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from collectives import CollectiveError, Communicator
from collectives.communicator import close_all
from trainer.gradients.agreement import agree_on_parameters, check_settings
from trainer.process_sets import ProcessSet, ProcessSetLike, global_process_set
from trainer.rules.aggregator import LATE, Late, Policy
from trainer.rules.server import Flat, Local, Remote, Server, Shard, Worker, cut
from trainer.rules.serving import checked_servers
from trainer.torch_internals import share_hooks
from trainer.uncompiled import uncompiled
from trainer.validation import check_named_parameters
from trainer.world import current_world, here
from trainer.wrapped import WrappingOptimizer

KEY = "gradwire_server"
"""In the state_dict() of an optimizer at a parameter server."""

_LET_GO_S = 2.0
"""What a thread has for its end once its Communicator is closed."""

_log = logging.getLogger("gradwire")


@dataclass(frozen=True)
class ServerReport:
    """Says what became of all contributions, counted at every server: a rank's step is one contribution to each.

    servers: how many there are. updates: all that they have made. staleness: how many contributions came how many versions
    late; those of 0 were in time. contributions: how many came from each rank. late: those that were. dropped: those of
    them that were not used. lead: how many steps a rank that went on was ahead of the slowest, at most. lost: the ranks
    that are left out.
    """

    servers: int
    updates: int
    staleness: dict[int, int]
    contributions: dict[int, int]
    late: int
    dropped: int
    lead: int
    lost: tuple[int, ...]

    def __str__(self) -> str:
        ages = ", ".join(f"{count} of age {age}" for age, count in self.staleness.items())
        ranks = ", ".join(f"{count} from rank {rank}" for rank, count in self.contributions.items())
        left_out = f"; without {', '.join(f'rank {rank}' for rank in self.lost)}" if self.lost else ""
        return (
            f"{self.updates} updates at {self.servers} servers, of contributions {ranks}; {ages}; {self.late} late, "
            f"{self.dropped} dropped{left_out}"
        )


class ParameterServer(WrappingOptimizer):
    """Wraps an optimizer so that it runs at servers inside the ranks, which hold a part of the parameters each.

    step() pushes this rank's gradients to all servers, waits until each lets it go on, and fills the parameters with what
    is newest there. A server makes an update when contributions of `quorum` ranks to it have come and grace_s seconds have
    passed since, or all have come. It steps with their average, by their weights.

    optimizer, named_parameters, process_set: as DistributedOptimizer takes them; every parameter belongs to one server as a
    whole, so any torch optimizer will do that treats parameters one by one. The settings of the param groups, such as the
    learning rate, count as they are on the server's rank when it makes an update.
    quorum: by default all ranks: synchronous. Less: the slowest are not waited for (Chen et al. 2016). 1: asynchronous (Dean et
    al. 2012). staleness: how many steps a rank may be ahead of the slowest, which it then waits for (Ho et al. 2013);
    None for any number. late: what becomes of gradients of an old version: "weight", they are part of the next update by
    1 / (1 + age); "next", like any other; "drop", they are counted, and not used. Those that are used count towards the
    quorum. servers: the ranks of the process set, by their numbers in it, that serve beside their own training; by default
    all of them.

    Replicas must start equal (broadcast_parameters). A parameter without a gradient contributes zeros. With quorum=all
    runs repeat to the bit; otherwise what arrives first decides.

    A rank that dies is left out, and the others go on, as long as they are `quorum` and it was not one that serves:
    else their step() raises QuorumLost or PeerLost. So name servers= where ranks may be lost. It cannot come back. One
    that calls close() has no more to contribute, and is waited for no more; one that only stops to step may leave the others
    short of the quorum. A rank that pushes nothing for the timeout_s of init() counts as lost.

    Each rank has a small Communicator with every server, and so each server a thread for every rank: this is for some dozens of
    ranks. Messages go through shared memory or TCP as those of Communicators do. CUDA parameters travel through the CPU,
    and servers compute there.

    Collective. Raises ValueError or TypeError for arguments that cannot be meant.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        *,
        quorum: int | None = None,
        grace_s: float = 0.0,
        staleness: int | None = None,
        late: Late = "weight",
        servers: Sequence[int] | None = None,
        process_set: ProcessSetLike = global_process_set,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"{here()}optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
        if isinstance(process_set, ProcessSet) and process_set.included() is False:
            raise ValueError(
                f"{here()}this process is not part of {process_set!r}, which alone may make this optimizer"
            )
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        named = {} if named_parameters is None else check_named_parameters(named_parameters, parameters)
        names = [named.get(parameter, f"parameter {number}") for number, parameter in enumerate(parameters)]
        world = current_world()
        self._owns_communicator = not isinstance(process_set, Communicator)
        self._communicator = (
            process_set if isinstance(process_set, Communicator) else world.open_communicator(process_set)
        )
        self._pairs: list[Communicator] = []
        self._shard: Shard | None = None
        self._server: Server | None = None
        self._worker: Worker | None = None
        self._timeout_s = world.settings.timeout_s
        self._failure: Exception | None = None
        self._is_closed = False
        self.optimizer = optimizer
        share_hooks(self, optimizer)
        try:
            size = self._communicator.size
            self._policy = _checked(Policy(size if quorum is None else quorum, grace_s, staleness, late), size)
            listed = checked_servers(servers, size)
            settings = {name: repr(value) for name, value in vars(self._policy).items()}
            check_settings(self._communicator, "ParameterServer", {**settings, "servers": repr(listed)})
            agree_on_parameters(self._communicator, names, parameters)
            self._connect([parameter for parameter in parameters if parameter.requires_grad], listed)
        except BaseException:
            self._close_communicators()
            raise

    def _connect(self, parameters: Sequence[Tensor], servers: Sequence[int]) -> None:
        """Make the servers, and what joins this rank with them."""
        world, rank, size = current_world(), self._communicator.rank, self._communicator.size
        ranks = [place for place in world.ranks_of(self._communicator) if place is not None]
        if len(ranks) != size:
            raise ValueError(f"{here()}process_set is a Communicator of ranks that are not in this world")
        token = self._communicator.allgather_record(secrets.token_hex(8))[0]
        self._parts = cut(parameters, servers)
        parts: list[tuple[Remote | Local, Sequence[Tensor]]] = []
        serving: dict[int, Communicator] = {}
        for server, part in self._parts.items():  # in the same order on all ranks, so that nobody waits in a circle
            if server == rank:
                self._shard = Shard(rank, range(size), part, self.optimizer, self._policy, self._timeout_s)
                parts.append((Local(rank, self._shard), part))
            for worker in range(size):
                if worker == server or rank not in (worker, server):
                    continue
                pair = world.open_pair(ranks[worker], ranks[server], f"server {token}/{worker}/{server}")
                self._pairs.append(pair)
                if rank == server:
                    serving[worker] = pair
                else:
                    parts.append((Remote(rank, server, self._policy.quorum, Flat(part), pair), part))
        if self._shard is not None:
            self._server = Server(self._shard, serving)
        self._worker = Worker(parts)

    @property
    def versions(self) -> tuple[int, ...]:
        """Return of which version the parameters are that this rank has: how many updates each server had made."""
        return tuple(self._open_worker().versions)

    @uncompiled
    def step(self, closure: Callable[[], Any] | None = None, *, weight: float = 1.0) -> Any:
        """Push this rank's gradients, and fill the parameters with what is newest at the servers, when they let it go on.

        closure: clears gradients, calls backward() and returns this rank's loss, which step() returns. weight: of these
        gradients in the average, such as the number of tokens they were computed of.

        Raises QuorumLost where too few ranks are left, PeerLost where a server is; again at each further call.
        """
        worker = self._open_worker()
        if self._failure is not None:
            raise CollectiveError(
                f"{here()}this optimizer is broken by an earlier failure: {self._failure}"
            ) from self._failure
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"{here()}weight must be a finite number > 0, not {weight!r}")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            worker.exchange(weight)
        except Exception as error:
            self._failure = error
            raise
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as torch does."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ValueError: the parameters are divided among the servers when the optimizer is made."""
        raise ValueError(f"{here()}parameters cannot be added to an optimizer at a parameter server once it is made")

    def report(self) -> ServerReport:
        """Return what became of all contributions so far. Any rank may call it, at any time but during its step()."""
        counts = self._open_worker().counts()
        staleness, contributions = (
            _summed(each.staleness for each in counts),
            _summed(each.contributions for each in counts),
        )
        return ServerReport(
            servers=len(counts),
            updates=sum(each.updates for each in counts),
            staleness=staleness,
            contributions=contributions,
            late=sum(each.late for each in counts),
            dropped=sum(each.dropped for each in counts),
            lead=max(each.lead for each in counts),
            lost=tuple(sorted({rank for each in counts for rank in each.lost})),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return where this rank and its server stand: every rank saves its own, after the same step, and the model.

        Raises ValueError with a quorum of less than all ranks, which do not stand at one place together.
        """
        self._check_synchronous("state_dict")
        mine = None if self._shard is None else self._shard.state_dict()
        version = self._open_worker().versions[0]
        return {**self.optimizer.state_dict(), KEY: {"servers": self._layout(), "version": version, "shard": mine}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on, bit for bit, where state_dict() was called on each of as many ranks with the same servers. Load the model
        before: the servers take their parameters from that. Collective.

        Raises ValueError, on all ranks, with nothing loaded, where the state_dict of one is of something else.
        """
        self._check_synchronous("load_state_dict")
        worker = self._open_worker()
        saved = state_dict.get(KEY) or {}
        version = saved.get("version")
        said = self._communicator.allgather_record([saved.get("servers") == self._layout(), version])
        wrong = [rank for rank, (fits, other) in enumerate(said) if not fits or other != said[0][1]]
        if wrong:
            raise ValueError(
                f"{here()}load_state_dict needs what state_dict() returned on this rank of as many ranks, with the same servers "
                f"and parameters, after the same step; not so on {', '.join(f'rank {rank}' for rank in wrong)}"
            )
        self.optimizer.load_state_dict({name: value for name, value in state_dict.items() if name != KEY})
        if self._shard is not None:
            self._shard.load_state_dict(saved["shard"])
        assert version is not None  # a fault, else
        worker.versions = [version] * len(worker.versions)
        self._communicator.barrier()  # nobody contributes before all servers know the version

    def close(self, timeout_s: float | None = None) -> None:
        """Say that nothing more comes from this rank, serve the others until they say so too, and end the threads.

        timeout_s: how long others are waited for at most, by default the timeout_s of init(); after that they are left
        alone, and a warning says so. The parameters and the wrapped optimizer live on. Calling it again does nothing.
        """
        if self._is_closed:
            return
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        try:
            if self._worker is not None:
                self._worker.leave()
            if self._server is not None and not self._server.join(deadline):
                _log.warning("gradwire: %sthe parameter server closes while other ranks still train", here())
        finally:
            self._close_communicators()
            if self._server is not None:
                self._server.join(time.monotonic() + _LET_GO_S)

    def _close_communicators(self) -> None:
        self._is_closed = True
        close_all([*self._pairs, *([self._communicator] if self._owns_communicator else [])])

    def _open_worker(self) -> Worker:
        if self._worker is None or self._is_closed:
            raise RuntimeError(f"{here()}this optimizer is closed")
        return self._worker

    def _check_synchronous(self, verb: str) -> None:
        if self._policy.quorum < self._communicator.size:
            raise ValueError(
                f"{here()}{verb} needs quorum={self._communicator.size}, all ranks, not {self._policy.quorum}: others do "
                "not stand at one place together. Save the model of one rank, and begin with new servers"
            )

    def _layout(self) -> list[Any]:
        """Return what a state_dict() must have in common with this optimizer."""
        return [self._communicator.rank, self._communicator.size, [[s, len(part)] for s, part in self._parts.items()]]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a ParameterServer cannot be copied or pickled: save its state_dict()")


def _summed(tables: Iterable[dict[int, int]]) -> dict[int, int]:
    total: Counter[int] = Counter()
    for table in tables:
        total.update(table)
    return dict(sorted(total.items()))


def _checked(policy: Policy, size: int) -> Policy:
    """Return the policy. Raises ValueError for one that cannot be meant."""
    if not isinstance(policy.quorum, int) or not 1 <= policy.quorum <= size:
        raise ValueError(
            f"{here()}quorum must be a whole number from 1 to {size}, the number of ranks, not {policy.quorum!r}"
        )
    if not (isinstance(policy.grace_s, (int, float)) and math.isfinite(policy.grace_s) and policy.grace_s >= 0):
        raise ValueError(f"{here()}grace_s must be a finite number of seconds >= 0, not {policy.grace_s!r}")
    if policy.staleness is not None and (not isinstance(policy.staleness, int) or policy.staleness < 0):
        raise ValueError(f"{here()}staleness must be a whole number >= 0, or None, not {policy.staleness!r}")
    if policy.late not in LATE:
        raise ValueError(f"{here()}late must be one of {', '.join(map(repr, LATE))}, not {policy.late!r}")
    return policy
