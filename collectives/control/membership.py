"""The ranks of a Communicator, and the exchange of small records between them before a link connects them."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from gradwire.collectives.control.asking import POLL_S, Asking
from gradwire.collectives.control.hub import Failure
from gradwire.collectives.control.listener import Listener
from gradwire.collectives.control.presence import Presence
from gradwire.collectives.environment import AGENT_STORE, TORCH_BACKEND
from gradwire.collectives.errors import CollectiveError, CollectiveTimeout, LinkError, PeerLost, ranks_text
from gradwire.collectives.schedules.topology import Topology

#: The first pause between two checks whether all ranks have arrived; the next ones are longer, up to POLL_S.
_FIRST_POLL_S = 0.0002

#: How much earlier than ours a backend's timeout may end, because the backend counts whole milliseconds.
ROUNDING_S = 0.005

_Answer = TypeVar("_Answer")

#: How long a rank that fails to connect waits for the report of a cause: after an error that concerns another rank, and after
#: one that may be this rank's own fault.
_CAUSE_ELSEWHERE_S, _CAUSE_S = 1.0, 0.3


@dataclass(frozen=True)
class Membership:
    """The ranks that are to be connected. A torch ProcessGroup is one way to get one.

    rank: this rank among them. size: their number. hosts: see Topology. store: used only by these ranks. device_types:
    those whose tensors they exchange. secret: authenticates them when they connect. address: that at which the others
    reach this rank. lost: returns the members whose process is known to have ended. noted: returns, without waiting,
    the members whose end a launcher has noted, possibly before a connection ends; None if it notes nothing.
    global_ranks: their ranks in torch.distributed's default group; empty if they have none. beside_others: whether
    other ranks of the host compute while these wait for each other, so that waits leave the cores to them. presence: of
    the ranks that arrived together; None for a rank alone. places: the members' ranks in `presence`. scope: marks their
    failure reports in `presence`. keepers: the member whose process serves the store, if one does. cards: what each
    member has offered to the others, by rank, for a link of gradwire. listener: to which the other members connect. unshared:
    why ranks cannot share memory with the other ranks of their host.
    """

    rank: int
    size: int
    hosts: tuple[tuple[int, ...], ...]
    store: Store
    device_types: tuple[str, ...]
    secret: bytes = field(repr=False)
    address: str = "127.0.0.1"
    lost: Callable[[], Collection[int]] = field(repr=False, default=tuple)
    noted: Callable[[], Collection[int]] | None = field(repr=False, default=None)
    global_ranks: tuple[int, ...] = ()
    beside_others: bool = False
    presence: Presence | None = field(repr=False, default=None)
    places: tuple[int, ...] = ()
    scope: str = ""
    keepers: tuple[int, ...] = ()
    cards: tuple[dict[str, Any], ...] = field(repr=False, default=())
    listener: Listener | None = field(repr=False, default=None)
    unshared: Mapping[int, str] = field(default_factory=dict)

    def subset(self, ranks: Sequence[int], name: str) -> Membership:
        """Return the Membership of some of these ranks, this one among them; ranks[r] becomes rank r.

        Not a collective call: nothing is sent. name: the same on these ranks, and not used before.
        """
        place = {rank: number for number, rank in enumerate(ranks)}
        noted = self.noted
        hosts = [[place[rank] for rank in host if rank in place] for host in self.hosts]
        return replace(
            self,
            rank=place[self.rank],
            size=len(ranks),
            hosts=tuple(sorted(tuple(sorted(host)) for host in hosts if host)),
            store=PrefixStore(name, self.store),
            secret=hashlib.sha256(self.secret + name.encode()).digest(),
            lost=lambda: [place[rank] for rank in self.lost() if rank in place],
            noted=None if noted is None else lambda: [place[rank] for rank in noted() if rank in place],
            global_ranks=tuple(self.global_ranks[rank] for rank in ranks) if self.global_ranks else (),
            places=tuple(self.places[rank] for rank in ranks) if self.places else (),
            scope=f"{self.scope}/{name}",
            keepers=tuple(place[rank] for rank in self.keepers if rank in place),
        )

    def everyones(self, name: str, mine: bytes, deadline: float, compile_s: float = 0.0) -> list[bytes]:
        """Return every rank's small record, by rank. A collective call, of which nothing stays in the store.

        name: unique among the exchanges of this Membership. mine: this rank's record. deadline: time.monotonic()
        seconds, extended by compile_s for ranks that have called compiles(name).
        Raises LinkError with ranks that are missing or have ended.
        """
        store = self.store
        keys = [f"{name}/{rank}" for rank in range(self.size)]
        complete, number = f"{name}/complete", f"{name}/number"
        with closing(Asking(store, self.lost, self.keepers)) as asking:
            ask = asking.ask
            ask(lambda: store.set(keys[self.rank], mine.hex()), deadline)
            if ask(lambda: store.add(number, 1), deadline) == self.size:
                ask(lambda: store.set(complete, ""), deadline)
            poll_s = _FIRST_POLL_S
            while not ask(lambda: store.check([complete]), deadline):
                try:
                    self.check()
                except LinkError:
                    if ask(lambda: store.check([complete]), deadline):  # a rank may leave once it has all records
                        break
                    raise
                if time.monotonic() >= deadline:
                    missing = [rank for rank, key in enumerate(keys) if not ask(partial(store.check, [key]), deadline)]
                    if not missing:  # the last rank stopped before it set `complete`
                        break
                    if time.monotonic() < deadline + compile_s:
                        missing = [
                            rank
                            for rank in missing
                            if not ask(partial(store.check, [f"{name}/compiles/{rank}"]), deadline)
                        ]
                    if missing:
                        detail = f"{ranks_text(missing)} did not arrive"
                        raise LinkError(None, timed_out=True, detail=detail, awaited=missing)
                time.sleep(poll_s)
                poll_s = min(2 * poll_s, POLL_S)
            records = [bytes.fromhex(record.decode()) for record in ask(lambda: store.multi_get(keys), deadline)]
            with suppress(LinkError, RuntimeError):  # the rank that serves the store may leave once it has all records
                if ask(lambda: store.add(number, 1), deadline) == 2 * self.size:  # no other rank reads any more
                    compiling = [f"{name}/compiles/{rank}" for rank in range(self.size)] if compile_s else []
                    for key in (*keys, *compiling, complete, number):
                        ask(partial(store.delete_key, key), deadline)
            return records

    def compiles(self, name: str, deadline: float) -> None:
        """Report in the store that this rank compiles kernels before it calls everyones(name). Raises as Asking.ask."""
        self.ask(lambda: self.store.set(f"{name}/compiles/{self.rank}", ""), deadline)

    def exchange(
        self,
        name: str,
        mine: dict[str, Any],
        deadline: float,
        compile_s: float = 0.0,
    ) -> list[dict[str, Any]]:
        """Return every rank's record of numbers, strings, and lists and dicts of them, by rank. See everyones()."""
        record = json.dumps(mine).encode()
        return [json.loads(each) for each in self.everyones(name, record, deadline, compile_s)]

    def ask(self, call: Callable[[], _Answer], deadline: float) -> _Answer:
        """Return the result of a call to the store that may block while a rank is missing. Raises as Asking.ask."""
        with closing(Asking(self.store, self.check, self.keepers)) as asking:
            return asking.ask(call, deadline)

    def check(self) -> None:
        """Raise LinkError with the ranks, if ranks are known to have ended or to be unable to connect."""
        lost = self.lost()  # first, as in cause()
        if (error := self._reported()) is not None:
            raise error
        if lost:
            raise Failure.loss_of(lost).as_link_error()

    def report(self, failure: Failure) -> None:
        """Report to the other ranks the reason why the members cannot connect."""
        if self.presence is not None:
            places = tuple(self.places[rank] for rank in failure.ranks)
            self.presence.report(replace(failure, ranks=places), self.scope)

    def withdraw(self, error: Exception) -> None:
        """Report to the other members that this one raises an error, and does not connect."""
        self.report(Failure.of(error, self.rank))

    def silent(self) -> tuple[int, ...]:
        """Return the other ranks that do not answer: they have not ended, and do not wait for the others to connect."""
        return () if self.presence is None else self._numbers(self.presence.silent(self.scope))

    def cause(self, within_s: float) -> LinkError | None:
        """Return the error of other ranks that keeps the members from connecting; None if it is not known within
        within_s seconds. A rank that has left is no cause: it has connected, or has reported why it has not."""
        deadline = time.monotonic() + within_s
        while self.presence is not None:
            ended = self._numbers(self.presence.ended())  # first: a rank reports a failure before it ends
            if (error := self._reported()) is not None:
                return error
            if ended:
                return Failure.loss_of(ended).as_link_error()
            if time.monotonic() >= deadline:
                break
            time.sleep(POLL_S)
        return None

    def close(self) -> None:
        """Close the presence. Only for the Membership of all ranks that arrived together, when no other needs it."""
        if self.presence is not None:
            self.presence.close()

    def _reported(self) -> LinkError | None:
        """Return the error for a reported failure of these ranks; None without one."""
        if self.presence is None or (failure := self.presence.failure(self.scope)) is None:
            return None
        return replace(failure, ranks=self._numbers(failure.ranks)).as_link_error()

    def _numbers(self, places: Collection[int]) -> tuple[int, ...]:
        return tuple(rank for rank, place in enumerate(self.places) if place in places)


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
    presence: Presence, store: Store, device_types: tuple[str, ...], global_ranks: tuple[int, ...]
) -> Membership:
    """Return the Membership of ranks that have arrived together. store: only they use the names below presence.key."""
    hosts = Topology.from_host_ids(presence.rank, [card["host"] for card in presence.cards]).hosts
    size = len(presence.cards)
    return Membership(
        presence.rank,
        size,
        hosts,
        PrefixStore(presence.key, store),
        device_types,
        bytes.fromhex(presence.secret),
        presence.cards[presence.rank]["address"],
        lost=presence.gone,
        global_ranks=global_ranks,
        presence=presence,
        places=tuple(range(size)),
        keepers=keepers_among(global_ranks),
    )


@contextmanager
def coming_together(
    rank: int, timeout_s: float, membership: Membership | None = None, operation: str = "making a Communicator"
) -> Iterator[None]:
    """Turn a RuntimeError, LinkError or OSError while ranks connect into a CollectiveError. Report any error except a
    CollectiveError to the other members."""
    end = time.monotonic() + timeout_s - ROUNDING_S
    try:
        yield
    except CollectiveError:
        raise
    except (RuntimeError, LinkError, OSError) as error:
        timed_out = time.monotonic() >= end or isinstance(error, TimeoutError) or getattr(error, "timed_out", False)
        cause: LinkError | None = error if isinstance(error, LinkError) else None
        if membership is not None and timed_out and (silent := membership.silent()):
            detail = f"{ranks_text(silent)} did not arrive"
            cause = LinkError(None, timed_out=True, detail=detail, awaited=silent)
        elif membership is not None and not timed_out:
            cause = membership.cause(_CAUSE_S if cause is None else _CAUSE_ELSEWHERE_S) or cause
        if membership is not None:
            membership.report(Failure.of(cause or error, rank))
        if cause is None:
            raise _error_of(error, rank, timeout_s, operation, timed_out=timed_out) from error
        if cause is not error:
            cause.__cause__ = error
        raise _error_of(cause, rank, timeout_s, operation, timed_out=cause.timed_out) from cause
    except BaseException as error:
        if membership is not None:
            membership.report(Failure.of(error, rank))
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
