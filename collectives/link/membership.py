"""Who takes part in a Communicator, and how they tell each other small things before there is a link between them."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import wait
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from collectives.daemon import DaemonThread
from collectives.errors import CollectiveError, LinkError, ranks_text
from collectives.plan.topology import Topology
from collectives.torch_internals import default_store

#: How long to wait before looking again whether all have come, at first and at most.
_LOOK_AGAIN_S, _LONGEST_LOOK_AGAIN_S = 0.0002, 0.03

#: What the store may take for an answer when the deadline has passed, such as to who has not come.
_LAST_ANSWER_S = 1.0

#: What a backend's timeout may end before ours, because it counts whole milliseconds.
_ROUNDING_S = 0.005

_NAME_BYTES, _SECRET_BYTES = 16, 32

_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Membership:
    """The ranks that are to be connected. A torch ProcessGroup is one way to get one.

    rank, size: this rank among them. hosts: as Topology has them. store: which nobody else uses. epoch: how often the members
    have changed. device_types: the kinds of device whose tensors they exchange. secret: by which they know each other when they
    connect. lost: returns those whose process is known to have ended. global_ranks: which ranks of torch.distributed's default
    group these are; empty where they are none. beside_others: whether other ranks of the host compute while these wait for
    each other, so that waits leave the cores to them.
    """

    rank: int
    size: int
    hosts: tuple[tuple[int, ...], ...]
    store: Store
    epoch: int
    device_types: tuple[str, ...]
    secret: bytes = field(repr=False)
    lost: Callable[[], Collection[int]] = field(repr=False, default=tuple)
    global_ranks: tuple[int, ...] = ()
    beside_others: bool = False

    def subset(self, ranks: Sequence[int], name: str) -> Membership:
        """Return the Membership of some of these ranks, to which this one belongs; ranks[r] becomes rank r.

        Nothing is sent, and the others need not know. name: what these ranks all say, and have not said before.
        """
        place = {rank: number for number, rank in enumerate(ranks)}
        hosts = [[place[rank] for rank in host if rank in place] for host in self.hosts]
        return replace(
            self,
            rank=place[self.rank],
            size=len(ranks),
            hosts=tuple(sorted(tuple(sorted(host)) for host in hosts if host)),
            store=PrefixStore(name, self.store),
            secret=hashlib.sha256(self.secret + name.encode()).digest(),
            lost=lambda: [place[rank] for rank in self.lost() if rank in place],
            global_ranks=tuple(self.global_ranks[rank] for rank in ranks) if self.global_ranks else (),
        )

    def everyones(self, name: str, mine: bytes, deadline: float) -> list[bytes]:
        """Return every rank's small record, by rank. A collective call.

        name: what no other exchange of this Membership has. deadline: time.monotonic() seconds. Raises LinkError, which names the
        ranks that did not come.
        """
        store = self.store
        keys = [f"{name}/{rank}" for rank in range(self.size)]
        complete = f"{name}/complete"
        with closing(Asking(self, deadline)) as asking:
            ask = asking.ask
            ask(lambda: store.set(keys[self.rank], mine.hex()))
            if ask(lambda: store.add(f"{name}/number", 1)) == self.size:
                ask(lambda: store.set(complete, ""))
            look_again_s = _LOOK_AGAIN_S
            while not ask(lambda: store.check([complete])):
                self.check_lost()
                if time.monotonic() >= deadline:
                    missing = [rank for rank, key in enumerate(keys) if not ask(partial(store.check, [key]))]
                    raise LinkError(None, timed_out=True, detail=f"{ranks_text(missing)} did not come", awaited=missing)
                time.sleep(look_again_s)
                look_again_s = min(2 * look_again_s, _LONGEST_LOOK_AGAIN_S)
            return [bytes.fromhex(record.decode()) for record in ask(lambda: store.multi_get(keys))]

    def check_lost(self) -> None:
        """Raise LinkError, which names the ranks whose process is known to have ended, if there are any."""
        if lost := list(self.lost()):
            raise LinkError(min(lost), timed_out=False, detail=f"lost {ranks_text(lost)}")


class Asking:
    """Asks the store of a Membership, which answers nobody while the process that keeps it is stopped: torch waits without a
    deadline for that, so the calls are made on a thread that can be left waiting. deadline: time.monotonic() seconds."""

    def __init__(self, membership: Membership, deadline: float) -> None:
        self._membership = membership
        self._deadline = deadline
        self._thread = DaemonThread("gradwire-store")

    def ask(self, call: Callable[[], _Answer]) -> _Answer:
        """Return what a call of the store returns. Raises LinkError where there is no answer by the deadline, and where a rank
        is lost meanwhile."""
        answer = self._thread.submit(call)
        until = max(self._deadline, time.monotonic() + _LAST_ANSWER_S)
        while not wait([answer], _LONGEST_LOOK_AGAIN_S).done:
            self._membership.check_lost()
            if time.monotonic() >= until:
                silent = "the store does not answer, which rank 0 or the launcher keeps: is its process stopped?"
                raise LinkError(None, timed_out=True, detail=silent)
        return answer.result()

    def close(self) -> None:
        """Give the thread back, once it has its answer."""
        self._thread.close()


def membership_of(group: dist.ProcessGroup, host: str, timeout_s: float) -> Membership:
    """Return the Membership of a group's ranks. host: a name that the ranks of a host have in common.

    A collective call on `group`, which carries one small message of rank 0: a name for a store of their own, and the secret.
    (torch.distributed's own names for sub-groups are used again after a group is destroyed.) Raises ValueError for a group with
    neither gloo nor NCCL; CollectiveError when the ranks do not come together within timeout_s seconds.
    """
    config = dist.get_backend_config(group).split(",")
    kinds = (("cpu", "gloo"), ("cuda", "nccl"))
    device_types = tuple(device for device, kind in kinds if f"{device}:{kind}" in config)
    if not device_types:
        raise ValueError(f"the group's backends are {config}; a Communicator needs cpu:gloo, cuda:nccl or both")
    rank, deadline = group.rank(), time.monotonic() + timeout_s
    with coming_together(rank, timeout_s):
        drawn = bytearray(secrets.token_bytes(_NAME_BYTES + _SECRET_BYTES))
        token = torch.frombuffer(drawn, dtype=torch.uint8).to(device_types[0])
        group.broadcast([token], dist.BroadcastOptions()).wait(timedelta(seconds=timeout_s))
        said = bytes(token.tolist())
        store = PrefixStore(f"gradwire/{said[:_NAME_BYTES].hex()}", default_store())
        alone = Membership(rank, group.size(), (), store, 0, device_types, said[_NAME_BYTES:])
        names = [name.decode() for name in alone.everyones("host", host.encode(), deadline)]
    ranks = tuple(dist.get_process_group_ranks(group))
    return replace(alone, hosts=Topology.from_host_ids(rank, names).hosts, global_ranks=ranks)


@contextmanager
def coming_together(rank: int, timeout_s: float) -> Iterator[None]:
    """Raise CollectiveError for what goes wrong while ranks connect."""
    end = time.monotonic() + timeout_s - _ROUNDING_S
    try:
        yield
    except CollectiveError:
        raise
    except (RuntimeError, LinkError, OSError) as error:
        timed_out = time.monotonic() >= end or isinstance(error, TimeoutError) or getattr(error, "timed_out", False)
        what = f"the ranks did not come together within {timeout_s:g} s" if timed_out else "could not connect"
        raise CollectiveError(f"{what}: {error}", rank=rank, operation="making a Communicator") from error
