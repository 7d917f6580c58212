"""The ranks of a Communicator, and the exchange of small records between them before a link connects them."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from gradwire.collectives.control.addresses import is_link_local
from gradwire.collectives.control.channel import Channel, Failure
from gradwire.collectives.control.monitor import Monitor
from gradwire.collectives.environment import AGENT_STORE, PORTS, TORCH_BACKEND
from gradwire.collectives.errors import CollectiveError, CollectiveTimeout, LinkError, PeerLost, ranks_text
from gradwire.collectives.schedules.topology import Machine, Topology
from gradwire.collectives.torch_internals import store_of_one

#: How much earlier than ours a backend's timeout may end, because the backend counts whole milliseconds.
ROUNDING_S = 0.005

#: How long a rank that fails to connect waits for the report of a cause: after an error that concerns another rank, and after
#: one that may be this rank's own fault.
_CAUSE_ELSEWHERE_S, _CAUSE_S = 1.0, 0.3


@dataclass(frozen=True)
class Membership:
    """The ranks that are to be connected. A torch ProcessGroup is one way to get one.

    rank: this rank among them. size: their number. hosts: see Topology. store: used only by these ranks. device_types: those
    whose tensors they exchange. secret: authenticates them when they connect. global_ranks: their ranks in torch.distributed's
    default group; empty if they have none. beside_others: whether other ranks of the host compute while these wait for each
    other, so that waits leave the cores to them. monitor: of the ranks that have met; None for a rank alone. places: the
    members' ranks in `monitor`. scope: distinguishes Communicators of the same members. channel: of the Communicator that is
    made. cards: what each member has offered to the others, by rank, for a link of gradwire. unshared: why ranks cannot share
    memory with the other ranks of their host. host: the name of this rank's host, where it may be another one than when the
    ranks met.
    """

    rank: int
    size: int
    hosts: tuple[tuple[int, ...], ...]
    store: Store
    device_types: tuple[str, ...]
    secret: bytes = field(repr=False)
    global_ranks: tuple[int, ...] = ()
    beside_others: bool = False
    monitor: Monitor | None = field(repr=False, default=None)
    places: tuple[int, ...] = ()
    scope: str = ""
    channel: Channel = field(repr=False, default_factory=lambda: Channel(0, 1))
    cards: tuple[dict[str, Any], ...] = field(repr=False, default=())
    unshared: Mapping[int, str] = field(default_factory=dict)
    host: str = ""

    @classmethod
    def alone(cls, device_types: tuple[str, ...], global_ranks: tuple[int, ...] = ()) -> Membership:
        """Return the Membership of a rank alone, which connects to nobody."""
        return cls(0, 1, ((0,),), store_of_one(), device_types, b"", global_ranks=global_ranks)

    def subset(self, ranks: Sequence[int], name: str) -> Membership:
        """Return the Membership of some of these ranks, this one among them; ranks[r] becomes rank r.

        Not a collective call: nothing is sent. name: the same on these ranks.
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
            global_ranks=tuple(self.global_ranks[rank] for rank in ranks) if self.global_ranks else (),
            places=tuple(self.places[rank] for rank in ranks) if self.places else (),
            scope=f"{self.scope}/{name}",
        )

    def opened(self) -> Membership:
        """Return the Membership of one more Communicator of these ranks, with a Channel of its own. All ranks call this equally
        often."""
        if self.monitor is None or self.size == 1:
            return replace(self, channel=Channel(self.rank, self.size))
        channel = self.monitor.open(self.places, self.scope)
        return replace(self, channel=channel, store=PrefixStore(channel.tag, self.store))

    def machines(self) -> tuple[Machine, ...]:
        """Return the Machine of each member, by rank."""
        if self.monitor is None:
            return (Machine.here(),)
        return tuple(Machine(**self.monitor.cards[place]["hardware"]) for place in self.places)

    def everyones(self, name: str, mine: bytes, deadline: float) -> list[bytes]:
        """Return every rank's small record, by rank. A collective call.

        name: the same on all ranks. mine: this rank's record. deadline: time.monotonic()
        seconds. Raises LinkError with ranks that are missing or have ended.
        """
        return [bytes.fromhex(record) for record in self.channel.exchange(f"everyone's {name}", mine.hex(), deadline)]

    @property
    def is_private(self) -> bool:
        """Return whether there is a key, so that connections are encrypted."""
        return self.monitor is not None and self.monitor.is_private

    @property
    def address(self) -> str:
        """Return the address at which the other members reach this rank."""
        return "127.0.0.1" if self.monitor is None else self.monitor.address

    @property
    def keepers(self) -> tuple[int, ...]:
        """Return the member whose process serves the store, if one does."""
        return keepers_among(self.global_ranks)

    @property
    def why_no_gloo(self) -> str:
        """Return why these ranks cannot use gloo, the same text on all of them; an empty text if they can."""
        if self.is_private:
            return "gloo does not encrypt, and there is a key"
        cards = (
            {} if self.monitor is None else {rank: self.monitor.cards[place] for rank, place in enumerate(self.places)}
        )
        if bounded := [rank for rank, card in cards.items() if card.get("ports")]:
            return f"the system chooses the ports of gloo, and {PORTS} is set on {ranks_text(bounded)}"
        if local := [rank for rank, card in cards.items() if is_link_local(card["address"])]:
            return f"gloo does not connect to link-local addresses, as {ranks_text(local)} has"
        return ""

    def withdraw(self, error: Exception) -> None:
        """Report to the other members that this one raises an error, and does not connect."""
        channel = self.opened().channel
        channel.refuse(Failure.of(error, self.rank))
        channel.leave_unconnected()

    def close(self) -> None:
        """Release the Monitor. Only for the Membership of all ranks that arrived together, when no other needs it."""
        if self.monitor is not None:
            self.channel.close()
            self.monitor.release()


def device_types_of(group: dist.ProcessGroup) -> tuple[str, ...]:
    """Return the device types whose tensors a group exchanges; without a GPU, "cuda" is none of them, although torch may be
    built for it. Raises ValueError if the group has neither gloo, NCCL nor this package's own backend."""
    config = dist.get_backend_config(group).split(",")
    kinds = {"cpu": "gloo"} | ({"cuda": "nccl"} if torch.cuda.is_available() else {})
    device_types = tuple(
        device for device, kind in kinds.items() if {f"{device}:{kind}", f"{device}:{TORCH_BACKEND}"} & set(config)
    )
    if not device_types:
        raise ValueError(
            f"the group's backends are {config}; a Communicator needs cpu:gloo, cuda:nccl, both, or {TORCH_BACKEND}"
        )
    return device_types


def keepers_among(global_ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the place of the rank whose process serves torch's store: rank 0's, if it is among the ranks. Empty if
    torchrun's agent serves the store."""
    by_agent = os.environ.get(AGENT_STORE) == "True"
    return () if by_agent else tuple(place for place, rank in enumerate(global_ranks) if rank == 0)


def membership_from(
    monitor: Monitor, store: Store, device_types: tuple[str, ...], global_ranks: tuple[int, ...]
) -> Membership:
    """Return the Membership of ranks that have met. store: only they use the names below monitor.key."""
    rank, size, cards = monitor.rank, monitor.size, monitor.cards
    return Membership(
        rank,
        size,
        Topology.from_host_ids(rank, [card["host"] for card in cards]).hosts,
        PrefixStore(monitor.key, store),
        device_types,
        monitor.secret if isinstance(monitor.secret, bytes) else monitor.secret.secret,
        global_ranks=global_ranks,
        monitor=monitor,
        places=tuple(range(size)),
    )


@contextmanager
def coming_together(
    rank: int, timeout_s: float, channel: Channel | None = None, operation: str = "making a Communicator"
) -> Iterator[None]:
    """Turn a RuntimeError, LinkError or OSError while ranks connect into a CollectiveError. Report any error except a
    CollectiveError to the other ranks of the channel."""
    end = time.monotonic() + timeout_s - ROUNDING_S
    try:
        yield
    except CollectiveError:
        raise
    except (RuntimeError, LinkError, OSError) as error:
        timed_out = time.monotonic() >= end or isinstance(error, TimeoutError) or getattr(error, "timed_out", False)
        cause: LinkError | None = error if isinstance(error, LinkError) else None
        if channel is not None and timed_out and (silent := channel.silent()):
            detail = f"{ranks_text(silent)} did not arrive"
            cause = LinkError(None, timed_out=True, detail=detail, awaited=silent)
        elif channel is not None and not timed_out:
            cause = channel.cause(_CAUSE_S if cause is None else _CAUSE_ELSEWHERE_S) or cause
        if channel is not None:
            channel.refuse(Failure.of(cause or error, rank))
        if cause is None:
            raise _error_of(error, rank, timeout_s, operation, timed_out=timed_out) from error
        if cause is not error:
            cause.__cause__ = error
        # The message has the text of the LinkError.
        raise _error_of(cause, rank, timeout_s, operation, timed_out=cause.timed_out) from cause.__cause__
    except BaseException as error:
        if channel is not None:
            channel.refuse(Failure.of(error, rank))
        raise


def _error_of(error: Exception, rank: int, timeout_s: float, operation: str, *, timed_out: bool) -> CollectiveError:
    """Return the CollectiveError for an error that kept ranks from connecting."""
    ranks = error.awaited if isinstance(error, LinkError) else frozenset() if timed_out else {rank}
    if timed_out:
        detail = f"the ranks did not meet: {error}"
        return CollectiveTimeout(timeout_s, ranks, rank=rank, operation=operation, detail=detail)
    if isinstance(error, LinkError) and error.ended and ranks:
        return PeerLost(ranks, rank=rank, operation=operation, has_left=False)
    return CollectiveError(f"could not connect: {error}", rank=rank, operation=operation, ranks=ranks)
