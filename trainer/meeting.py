"""How the ranks of a world find each other: in the store that rank 0 or torchrun keeps at the meeting point."""

from __future__ import annotations

import json
import os
import socket
import stat
import time
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError  # in Python 3.10 not the built-in one
from concurrent.futures import wait
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from collectives.daemon import DaemonThread
from collectives.errors import CollectiveError
from collectives.link.membership import Membership, coming_together
from trainer.launch import TORCHRUN, Launch, meeting_point

#: What torch has beyond its deadline to say itself whom it waited for, and to notice that its connection is shut.
_GRACE_S = 2.0
_KNOCK_AGAIN_S = 0.05

_Result = TypeVar("_Result")


def meet(launch: Launch, timeout_s: float) -> Store:
    """Return the store through which the ranks of one world find each other, with nothing in it from an earlier world.

    A store may outlive a world: torchrun's agent keeps one for all, and rank 0 keeps its own for as long as anything in
    its process holds what this has returned. So the store counts how often each rank has come, and the ranks that come
    for the nth time have the nth prefix to themselves, whoever of them is still leaving the world before.

    Raises ValueError where the environment does not say how to find rank 0; CollectiveError, which says what was found
    at the meeting point, after timeout_s seconds and at most four. A failure is final: ranks that come again would
    count more often than those that come for the first time, so the job must be started again.
    """
    address, port = meeting_point(os.environ, launch)
    host = f"[{address}]" if ":" in address else address
    # torchrun's agent may already keep the store: only env:// knows how to join that
    method = "env://" if launch.launcher == TORCHRUN else f"tcp://{host}:{port}"
    deadline = time.monotonic() + timeout_s

    def come() -> Store:
        timeout = timedelta(seconds=max(0.1, deadline - time.monotonic()))
        store, _, _ = next(rendezvous(method, launch.rank, launch.size, timeout=timeout))
        return PrefixStore(f"trainer/{store.add(f'trainer/{launch.rank}', 1)}", store)

    try:
        if launch.rank != 0:
            _knock(address, port, deadline)
        return _bounded(come, deadline + _GRACE_S, address, port)
    except (dist.DistError, OSError) as error:
        message = f"the ranks did not meet at {host}:{port} within {timeout_s:g} s: {error}"
        raise CollectiveError(message, rank=launch.rank, operation="init") from error


def agreed_ranks(launched: Membership, comm: Sequence[int] | None, timeout_s: float) -> list[int]:
    """Return which of the processes launched are this one's world: comm, or all for None and an empty one. Collective.

    Raises ValueError on all processes unless each is in what it gives, and everyone in there has given the same.
    """
    with coming_together(launched.rank, timeout_s):
        said = launched.everyones("comm", json.dumps(list(comm or ())).encode(), time.monotonic() + timeout_s)
    given = [json.loads(ranks) or list(range(launched.size)) for ranks in said]
    for rank, ranks in enumerate(given):
        others = [given[other] if 0 <= other < launched.size else None for other in ranks]
        if rank not in ranks or len(set(ranks)) < len(ranks) or any(other != ranks for other in others):
            raise ValueError(
                f"rank {launched.rank}: init(comm=) takes different ranks from 0 to {launched.size - 1}, this process's among "
                f"them, the same on each of these; rank {rank} gave {ranks}, which does not fit"
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


def _bounded(call: Callable[[], _Result], deadline: float, address: str, port: int) -> _Result:
    """Return call(), which connects to an address. At the deadline its connection is shut, and ConnectionError raised.

    torch's store waits without a deadline for the first answer of whatever has accepted its connection. A thread that
    is left waiting in there would abort the process, were it to wake while the interpreter ends.
    """
    before = _connections(address, port)
    thread = DaemonThread("trainer.init")
    future = thread.submit(call)
    thread.close()
    try:
        return future.result(deadline - time.monotonic())
    except BaseException as error:  # an interrupt, too
        end = time.monotonic() + _GRACE_S
        while not future.done() and time.monotonic() < end:
            for descriptor in _connections(address, port) - before:
                with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
            wait([future], _KNOCK_AGAIN_S)
        if isinstance(error, FutureTimeoutError):
            silent = "what listens there does not answer as rank 0 would; is the port another program's?"
            raise ConnectionError(silent) from error
        raise


def _connections(address: str, port: int) -> set[int]:
    """Return the descriptors of this process that are connected to an address."""
    found = set()
    places = set[tuple[str, int]]()
    with suppress(OSError):
        places = {(str(each[4][0]), port) for each in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)}
    places |= {(f"::ffff:{host}", at) for host, at in places if "." in host}  # IPv4 through a socket of IPv6
    for descriptor in map(int, os.listdir("/dev/fd")):
        with suppress(OSError):  # it has been closed, or is not connected
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as copy:
                    if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.getpeername()[:2] in places:
                        found.add(descriptor)
    return found
