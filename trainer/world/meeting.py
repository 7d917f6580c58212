"""How the ranks of a world meet: in the store that rank 0 or torchrun keeps at an address that all know, the meeting point."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError  # in Python 3.10 not the built-in one
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from gradwire.collectives.daemon import DaemonThread
from gradwire.collectives.environment import AGENT_STORE
from gradwire.collectives.errors import LinkError
from gradwire.collectives.link.arrival import arrive
from gradwire.collectives.link.asking import connections, shut
from gradwire.collectives.link.membership import (
    Membership,
    coming_together,
    device_types_of,
    keepers_among,
    membership_from,
)
from gradwire.collectives.link.own_address import card_of
from gradwire.collectives.plan.topology import host_id, machine_id
from gradwire.collectives.torch_internals import left_to_parent
from gradwire.trainer.world.epochs import RESTART_COUNT, WORKER
from gradwire.trainer.world.jobs import OneJob, identity_of
from gradwire.trainer.world.launch import Launch, meeting_point

#: What torch has beyond its deadline to say itself whom it waited for, and to notice that its connection is shut.
_GRACE_S = 2.0
_KNOCK_AGAIN_S = 0.05

#: How long one attempt to connect to the store takes at most, and for how long nobody listens where the store has ended.
_ATTEMPT_S, _GONE_S = 1.0, 1.0

#: How long the ranks of an epoch of an elastic job may take to arrive: all of them waited for it to begin.
_EPOCH_S = 10.0

#: Which rank keeps the hub, for a rank 0 that finds its port taken: none that would come later.
_NO_RANK = -1

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Meeting:
    """How the processes that were launched have met. store: of the meeting point, which earlier and later worlds use, too. key:
    a name that no other meeting has."""

    store: Store
    membership: Membership
    key: str


def meet(
    launch: Launch,
    timeout_s: float,
    backend: str,
    left: Container[str] = (),
    lost: Callable[[], Collection[int]] | None = None,
) -> Meeting:
    """Find the other ranks, and initialize torch.distributed with them. Collective over all processes that were launched.

    left: the keys of the meetings that this process has left. A store may outlive a world: torchrun's agent keeps one
    for all, and rank 0 keeps its own for as long as anything in its process holds it. So rank 0 opens each meeting anew,
    and the others do not enter one that they have left. lost: returns, without waiting, the ranks that the launcher of an
    elastic job counts as lost, so that neither this meeting nor a later operation waits for them.

    Raises ValueError where the environment does not say how to find rank 0. Within timeout_s seconds and at most four it raises
    CollectiveError, which says what was found at the meeting point: PeerLost where a rank has ended, CollectiveTimeout with
    the ranks that did not come. A process of another job gets one that says which job it has met.
    """
    address, port = meeting_point(os.environ, launch)
    place = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    deadline, ranks = time.monotonic() + timeout_s, tuple(range(launch.size))
    arrival_s = min(timeout_s, _EPOCH_S) if WORKER in os.environ else timeout_s
    arrive_by = time.monotonic() + arrival_s
    with coming_together(launch.rank, arrival_s, operation="init"):
        card = card_of(launch.rank, host_id(), machine_id(), os.environ) | {"identity": identity_of(os.environ, launch)}
        with _meeting_at(place):
            opened = _bounded(
                lambda: _open_store(launch, address, port, arrive_by), arrive_by + _GRACE_S, address, port
            )
            store, keeps_hub = opened
            hub_rank = 0 if launch.rank != 0 or keeps_hub else _NO_RANK
            keepers = keepers_among(ranks)
            admission = OneJob(card, place)
            presence = arrive(
                store,
                launch.size,
                card,
                arrive_by,
                hub_rank=hub_rank,
                admission=admission,
                left=left,
                keepers=keepers,
                by_agent=os.environ.get(AGENT_STORE) == "True" and WORKER not in os.environ,
                lost=lost,
            )
    membership = membership_from(presence, store, (), ranks)
    if lost is not None:
        membership = replace(membership, noted=lost, lost=lambda: presence.gone() or lost())
    group_store = PrefixStore("torch", membership.store)

    def make_group() -> None:
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(backend, timeout=timeout, store=group_store, rank=launch.rank, world_size=launch.size)

    try:
        with coming_together(launch.rank, timeout_s, membership, "init"):
            _bounded(make_group, deadline + _GRACE_S, address, port, membership.check)
            membership.everyones("met", b"", deadline)  # who leaves from now on leaves nobody behind who still connects
            group = dist.group.WORLD
            assert group is not None
            return Meeting(store, replace(membership, device_types=device_types_of(group)), presence.key)
    except BaseException:
        membership.close()
        raise


@contextmanager
def _meeting_at(place: str) -> Iterator[None]:
    """Raise LinkError, which names the meeting point, for what goes wrong there."""
    try:
        yield
    except LinkError as error:
        error.args = (f"at {place}: {error}",)
        raise
    except (dist.DistError, OSError) as error:
        timed_out = isinstance(error, TimeoutError | ConnectionError | dist.DistError)
        raise LinkError(0, timed_out=timed_out, detail=f"at {place}: {error}") from error


def _open_store(launch: Launch, address: str, port: int, deadline: float) -> tuple[Store, bool]:
    """Return the store at an address, and whether this process is the rank 0 whose job meets there: not where another program has
    taken the port before."""
    timeout = timedelta(seconds=max(0.1, deadline - time.monotonic()))
    if os.environ.get(AGENT_STORE) == "True":
        if launch.rank != 0:
            _knock(address, port, deadline)
        store, _, _ = next(rendezvous("env://", launch.rank, launch.size, timeout=timeout))
        if WORKER in os.environ:  # nobody ends a process that comes to what another epoch has left behind
            store = PrefixStore(f"epoch {os.environ[RESTART_COUNT]}", store)
        return store, True

    if launch.rank == 0:
        try:
            return _store(launch, address, port, timeout, keeps=True), True
        except dist.DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
    return _reach(launch, address, port, deadline), False


def _store(launch: Launch, address: str, port: int, timeout: timedelta, *, keeps: bool) -> Store:
    store = TCPStore(address, port, launch.size, keeps, timeout, multi_tenant=True, wait_for_workers=False)
    return left_to_parent(store)


def _reach(launch: Launch, address: str, port: int, deadline: float) -> Store:
    """Connect to the store that rank 0 keeps, once there is one. Raises LinkError where there is none any more, and the error of
    the last attempt at the deadline."""
    last_seen = math.inf
    while True:
        try:
            _knock(address, port, min(deadline, max(time.monotonic(), last_seen + _GONE_S)))
            last_seen = time.monotonic()
            # One attempt goes on for as long as it may, also where nobody listens any more.
            store = _store(launch, address, port, timedelta(seconds=_ATTEMPT_S), keeps=False)
            store.set_timeout(timedelta(seconds=max(_ATTEMPT_S, deadline - time.monotonic())))
            return store
        except (OSError, dist.DistError) as error:
            if time.monotonic() >= deadline:
                raise
            if isinstance(error, ConnectionRefusedError) and time.monotonic() >= last_seen + _GONE_S:
                detail = "the process that listened there, that of rank 0, has ended"
                raise LinkError(0, timed_out=False, detail=detail, ended=True) from error


def agreed_ranks(launched: Membership, comm: Sequence[int] | None, timeout_s: float) -> list[int]:
    """Return which of the processes launched are this one's world: comm, or all for None and an empty one. Collective.

    Raises ValueError on all processes unless each is in what it gives, and everyone in there has given the same.
    """
    with coming_together(launched.rank, timeout_s, launched, "init"):
        said = launched.everyones("comm", json.dumps(list(comm or ())).encode(), time.monotonic() + timeout_s)
    given = [json.loads(ranks) or list(range(launched.size)) for ranks in said]
    for rank, ranks in enumerate(given):
        others = [given[other] if 0 <= other < launched.size else None for other in ranks]
        if rank not in ranks or len(set(ranks)) < len(ranks) or any(other != ranks for other in others):
            raise ValueError(
                f"rank {launched.rank}: init(comm=) takes different ranks from 0 to {launched.size - 1}, this process's among "
                f"them, the same on each of these; rank {rank} gave {ranks}"
            )
    return given[launched.rank]


def _knock(address: str, port: int, deadline: float) -> None:
    """Wait until something listens at an address. Raises the OSError of the last attempt at the deadline."""
    while True:
        try:
            socket.create_connection((address, port), max(_KNOCK_AGAIN_S, deadline - time.monotonic())).close()
        except OSError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_KNOCK_AGAIN_S)
        else:
            return


def _bounded(
    call: Callable[[], _Result], deadline: float, address: str, port: int, check: Callable[[], None] | None = None
) -> _Result:
    """Return call(), which connects to an address. At the deadline its connection is shut, and ConnectionError raised.
    check: raises LinkError where there is no use in waiting; then all connections to the address are shut.

    torch's store waits without a deadline for the first answer of whatever has accepted its connection. A thread that
    is left waiting in there would abort the process, were it to wake while the interpreter ends.
    """
    before = connections(address, port) if check is None else set()
    # A process that has yet to arrive goes on without a thread where it cannot start one, or the others would wait for it.
    thread = DaemonThread("gradwire.init", or_callers=check is None)
    future = thread.submit(call)
    thread.close()
    try:
        while not wait([future], min(_KNOCK_AGAIN_S, max(0.0, deadline - time.monotonic()))).done:
            if check is not None:
                check()
            if time.monotonic() >= deadline:
                raise FutureTimeoutError
        return future.result()
    except BaseException as error:  # an interrupt, too
        end = time.monotonic() + _GRACE_S
        while not future.done() and time.monotonic() < end:
            shut(connections(address, port) - before)
            wait([future], _KNOCK_AGAIN_S)
        if isinstance(error, FutureTimeoutError):
            silent = (
                "the process that listens there does not answer as rank 0 would; does another program use the port?"
            )
            raise ConnectionError(silent) from error
        raise
