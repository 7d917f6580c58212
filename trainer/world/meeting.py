"""How the ranks of a world connect: by a store of rank 0 or of the launcher at an address known to all, the meeting point. Then
they make the default process group of torch.distributed."""

from __future__ import annotations

import ipaddress
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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

from gradwire.collectives.control.asking import connections, shut, unblock
from gradwire.collectives.control.attempt import Meetings
from gradwire.collectives.control.key import UnusableKey, key_of_process
from gradwire.collectives.control.membership import (
    Membership,
    coming_together,
    device_types_of,
    keepers_among,
    membership_from,
)
from gradwire.collectives.control.own_address import card_of, interface_of
from gradwire.collectives.control.rendezvous import rendezvous as meet_by
from gradwire.collectives.control.rendezvous import withdraw_from
from gradwire.collectives.daemon_thread import DaemonThread
from gradwire.collectives.environment import AGENT_STORE, GLOO_INTERFACE, RUN_ID, TORCH_BACKEND
from gradwire.collectives.errors import LinkError
from gradwire.collectives.schedules.topology import host_id, machine_id
from gradwire.collectives.torch_internals import forget_failed_groups, left_to_parent
from gradwire.trainer.world.generations import RESTART_COUNT, WORKER
from gradwire.trainer.world.jobs import OneJob, identity_of
from gradwire.trainer.world.launch import Launch, meeting_point

#: How long torch may take after its deadline to raise its own error, which names the missing ranks.
_GRACE_S = 2.0
_POLL_S = 0.05

#: The limit of one attempt to connect to the store, and how long no process listens before the store counts as ended.
_ATTEMPT_S, _GONE_S = 1.0, 1.0

#: How long a rank that cannot use its key tries to leave a note in the store, and serves the store to ranks that come to read
#: it; and how long ranks that have arrived may take to read it.
_WITHDRAW_S, _READ_S = 5.0, 1.0

#: How long the ranks of a generation of an elastic job may take to arrive: all of them were waiting when it began.
_GENERATION_S = 10.0

#: The Coordinator's rank for a rank 0 that finds its port taken: none, so that rank 0 uses the Coordinator in the store.
_NO_RANK = -1

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Meeting:
    """Holds the connections of the launched processes. store: that of the meeting point, shared with earlier and later worlds.
    interface: see name_interface()."""

    store: Store
    membership: Membership
    interface: str | None


def meet(
    launch: Launch,
    timeout_s: float,
    backend: str,
    left: set[str] | None = None,
    lost: Callable[[], Collection[int]] | None = None,
) -> Meeting:
    """Find the other ranks, and initialize torch.distributed with them. Collective over all processes that were launched.

    left: the keys of the meetings that this process has left or will leave, to which that of this meeting is added. A store
    may outlive a world: torchrun's agent keeps one store for all worlds, and rank 0's store exists as long as its process
    refers to it. So rank 0 opens a new meeting each time, and the others ignore meetings in `left`. lost: returns, without
    waiting, the ranks that the launcher of an elastic job counts as lost, so that neither this meeting nor a later operation
    waits for them.

    Raises ValueError if the environment does not say how to find rank 0, or the key cannot be used. Raises CollectiveError, at
    most four seconds after timeout_s, that says what was found at the meeting point: PeerLost if a rank has ended,
    CollectiveTimeout with the ranks that did not arrive. In a process of another job, the error says to which job the process has
    connected.
    """
    address, port = meeting_point(os.environ, launch)
    place = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    deadline, ranks = time.monotonic() + timeout_s, tuple(range(launch.size))
    arrival_s = min(timeout_s, _GENERATION_S) if WORKER in os.environ else timeout_s
    arrive_by = time.monotonic() + arrival_s

    def hang_up(deadline: float) -> None:
        shut(address, port, deadline, but=others)

    def open_store() -> tuple[Store, bool, int]:
        store, may_coordinate = _open_store(launch, address, port, arrive_by)
        return store, may_coordinate, store.add(f"arrivals/{launch.rank}", 1)

    with coming_together(launch.rank, arrival_s, operation="init"):
        # Of earlier worlds, and of this worker of an elastic job to the launcher: they stay open.
        others = connections(address, port, arrive_by)
        card = card_of(launch.rank, host_id(), machine_id(), os.environ, arrive_by, address)
        card["identity"] = identity_of(os.environ, launch)
        with _meeting_at(place):
            store, may_coordinate, number = _bounded(open_store, arrive_by + _GRACE_S, hang_up)
            coordinator_rank = 0 if launch.rank != 0 or may_coordinate else _NO_RANK
            keepers, texts_place = keepers_among(ranks), _place_of(os.environ)
            try:
                key = key_of_process()
            except UnusableKey as error:
                until = min(arrive_by, time.monotonic() + _WITHDRAW_S)
                withdraw_from(store, error, launch.rank, launch.size, keepers, until, place=texts_place, number=number)
                if launch.rank in keepers and may_coordinate:
                    _serve(store, launch.size, number, until)
                raise
            admission = OneJob(card, place)
            monitor = meet_by(
                store,
                launch.size,
                card,
                arrive_by,
                coordinator_rank=coordinator_rank,
                admission=admission,
                left=left,
                keepers=keepers,
                by_agent=os.environ.get(AGENT_STORE) == "True" and WORKER not in os.environ,
                lost=lost,
                number=number,
                key=key,
                place=texts_place,
            )
    membership = membership_from(monitor, store, (), ranks).opened()
    group_store = PrefixStore("torch", membership.store)

    def make_group() -> None:
        init_group(backend, timeout_s, group_store, launch.rank, launch.size)

    interface = None
    try:
        interface = name_interface(membership.address)
        with coming_together(launch.rank, timeout_s, membership.channel, "init"):
            if membership.why_no_gloo:  # gradwire's own backend needs no store: the ranks have met
                init_group(TORCH_BACKEND, timeout_s, group_store, launch.rank, launch.size, membership)
                deadline = time.monotonic() + timeout_s  # it may have compiled kernels
            else:
                _bounded(make_group, deadline + _GRACE_S, hang_up, membership.channel.check)
            membership.everyones("met", b"", deadline)  # from now on a rank may leave: none is still connecting
            group = dist.group.WORLD
            assert group is not None
            membership = replace(membership, device_types=device_types_of(group))
            monitor.hold()
            Meetings.of_default_group().keep(membership)
            return Meeting(store, membership, interface)
    except BaseException:
        destroy_group(interface)  # else the next init() would fail, or adopt a group with a rank that is lost
        membership.close()
        raise


def _place_of(environment: Mapping[str, str]) -> str:
    """Return the place of Texts of this meeting. Only in an elastic job do all ranks have the same RESTART_COUNT: the agents of
    torchrun count for themselves."""
    generation = f"generation {environment[RESTART_COUNT]}/" if WORKER in environment else ""
    return f"{environment.get(RUN_ID, '')}/{generation}init"


@contextmanager
def _meeting_at(place: str) -> Iterator[None]:
    """Raise a LinkError that names the meeting point for errors of links, of torch.distributed and of the system."""
    try:
        yield
    except LinkError as error:
        error.args = (f"at {place}: {error}",)
        raise
    except (dist.DistError, OSError) as error:
        timed_out = isinstance(error, TimeoutError | ConnectionError | dist.DistError)
        raise LinkError(0, timed_out=timed_out, detail=f"at {place}: {error}") from error


def _open_store(launch: Launch, address: str, port: int, deadline: float) -> tuple[Store, bool]:
    """Return the store at an address, and whether a rank 0 may make the Coordinator there: not if another process already
    listens on the port."""
    timeout = timedelta(seconds=max(0.1, deadline - time.monotonic()))
    if os.environ.get(AGENT_STORE) == "True":
        if launch.rank != 0:
            _knock(address, port, deadline)
        store, _, _ = next(rendezvous("env://", launch.rank, launch.size, timeout=timeout))
        if WORKER in os.environ:  # no agent ends a process that finds the Coordinator of another generation
            store = PrefixStore(f"generation {os.environ[RESTART_COUNT]}", store)
        return store, True

    if launch.rank == 0:
        try:
            return _store(launch, address, port, timeout, keeps=True), True
        except dist.DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
    return _reach(launch, address, port, deadline), False


def _serve(store: Store, size: int, number: int, deadline: float) -> None:
    """Return when all ranks have arrived in this attempt and had time to read a note, or at the deadline: the store, which is in
    this process, may end then. number: of the attempt."""
    while time.monotonic() < deadline:
        if all(store.add(f"arrivals/{rank}", 0) >= number for rank in range(size)):
            time.sleep(_READ_S)
            return
        time.sleep(_POLL_S)


def _store(launch: Launch, address: str, port: int, timeout: timedelta, *, keeps: bool) -> Store:
    store = TCPStore(address, port, launch.size, keeps, timeout, multi_tenant=True, wait_for_workers=False)
    return left_to_parent(store)


def _reach(launch: Launch, address: str, port: int, deadline: float) -> Store:
    """Connect to rank 0's store once it exists. Raises LinkError if the store has ended, and, at the deadline, the error of the
    last attempt."""
    last_seen = math.inf
    while True:
        try:
            _knock(address, port, min(deadline, max(time.monotonic(), last_seen + _GONE_S)))
            last_seen = time.monotonic()
            # An attempt lasts until its timeout, even if no process listens any more.
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
    """Return the launched ranks that form this process's world: comm, or all ranks if comm is None or empty. Collective.

    Raises ValueError on all processes unless each process is in its own comm, and all ranks in a comm give the same one.
    """
    with coming_together(launched.rank, timeout_s, launched.channel, "init"):
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
    """Wait until a process listens at an address. Raises the OSError of the last attempt at the deadline. The look-up of a
    name may take longer: this runs in _bounded(), which then stops waiting for it."""
    while True:
        try:
            socket.create_connection((address, port), max(_POLL_S, deadline - time.monotonic())).close()
        except OSError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_POLL_S)
        else:
            return


def _bounded(
    call: Callable[[], _Result],
    deadline: float,
    hang_up: Callable[[float], None],
    check: Callable[[], None] | None = None,
) -> _Result:
    """Return the result of call(), which uses the store. At the deadline, call hang_up(), which shuts down its connections, and
    raise ConnectionError. check: raises LinkError to end a useless wait. This ends neither a wait of gloo for a lost rank
    nor the look-up of a name: the thread stays until they return.

    torch's store waits without a deadline for the first answer after a process has accepted its connection. A thread that
    still waits there would abort the process if it returned while the interpreter exits.
    """
    # A process that has not arrived yet continues without a thread if it cannot start one: the others would wait for it.
    thread = DaemonThread("gradwire.init", or_callers=check is None)
    future = thread.submit(call)
    thread.close()
    try:
        while not wait([future], min(_POLL_S, max(0.0, deadline - time.monotonic()))).done:
            if check is not None:
                check()
            if time.monotonic() >= deadline:
                raise FutureTimeoutError
        return future.result()
    except BaseException as error:  # including KeyboardInterrupt
        unblock(future, hang_up)
        if isinstance(error, FutureTimeoutError):
            silent = (
                "the process that listens there does not answer as rank 0 would; does another program use the port, "
                "or is a name server down?"
            )
            raise ConnectionError(silent) from error
        raise


def init_group(
    backend: str, timeout_s: float, store: Store, rank: int, size: int, met: Membership | None = None
) -> None:
    """Initialize torch.distributed. met: the ranks, for gradwire's own backend only. In an elastic job, errors get no prefix by
    torch's hook, which would add one for each world: the launcher names the worker in each line."""
    hook = sys.excepthook
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size, pg_options=met)
    if WORKER in os.environ:
        sys.excepthook = hook


def name_interface(address: str) -> str | None:
    """Let gloo use the interface of an address of this host, in the default group and in a gloo group that the script makes
    itself. Without this, gloo would use the address to which the name of this host resolves, which may be a loopback address.

    Return the name of the interface, for destroy_group(); None if GLOO_SOCKET_IFNAME names one already, if no interface has the
    address as its first one, or if the address is a loopback address: with one host, gloo needs no name, and child processes
    inherit the variable. torch passes nothing to gloo except this variable, and gloo takes an interface's first address.
    """
    if os.environ.get(GLOO_INTERFACE) or ipaddress.ip_address(address).is_loopback:
        return None
    if (interface := interface_of(address)) is None:
        return None
    os.environ[GLOO_INTERFACE] = interface
    return interface


def destroy_group(interface: str | None = None) -> None:
    """Destroy the default group. If init_group() has failed to make it, remove what that left in torch. Afterwards, all ranks
    can make another one. interface: what name_interface() returned."""
    if interface is not None and os.environ.get(GLOO_INTERFACE) == interface:
        del os.environ[GLOO_INTERFACE]
    if dist.is_initialized():
        dist.destroy_process_group()
    else:
        forget_failed_groups()
