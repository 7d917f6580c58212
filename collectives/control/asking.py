"""Calls that may not return, each with a deadline: to a store, and for the address of a host. No call to a store is still
running when the process ends."""

from __future__ import annotations

import atexit
import os
import socket
import stat
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from gradwire.collectives.control.addresses import address_text
from gradwire.collectives.daemon_thread import DaemonThread
from gradwire.collectives.errors import LinkError

#: Seconds between two checks of anything that ranks wait for while they connect.
POLL_S = 0.03

#: How long the store may take at least for an answer: after its deadline, a rank still asks which ranks are missing.
_LAST_ANSWER_S = 1.0

#: How long a process waits for a call whose connection it has shut down.
_UNBLOCK_S = 2.0

_Answer = TypeVar("_Answer")


class Asking:
    """Calls a store on a separate thread. While the process that serves the store is stopped, torch waits without a deadline;
    the thread can be abandoned in that wait. If no thread can be started, only torch's own timeouts bound the calls.

    check: called repeatedly; raises LinkError to end a useless wait. keepers: the rank whose process serves the store, if
    it is one of the ranks that connect.
    """

    def __init__(self, store: Store, check: Callable[[], object] | None = None, keepers: Collection[int] = ()) -> None:
        self._store = store
        self._check, self._keepers = check, keepers
        self._thread = DaemonThread("gradwire-store", or_callers=True)

    def ask(self, call: Callable[[], _Answer], deadline: float) -> _Answer:
        """Return the result of a call to the store. deadline: time.monotonic() seconds; one that is less than a second
        away counts as a second away. Raises LinkError if there is no answer by then, or if the store has ended; and the
        errors of check."""
        answer = self._thread.submit(call)
        until = max(deadline, time.monotonic() + _LAST_ANSWER_S)
        try:
            while not wait([answer], POLL_S).done:
                if self._check is not None:
                    self._check()
                if time.monotonic() >= until:
                    silent = "the store does not answer: is the process that holds it, rank 0 or the launcher, stopped?"
                    raise LinkError(None, timed_out=True, detail=silent, awaited=self._keepers)
        except BaseException:
            end = partial(unblock, answer, partial(hang_up, self._store))
            atexit.register(end)
            answer.add_done_callback(lambda _: atexit.unregister(end))
            raise
        try:
            return answer.result()
        except dist.DistNetworkError as error:
            detail = f"the process that holds the store has ended: {error}"
            raise LinkError(None, timed_out=False, detail=detail, awaited=self._keepers, ended=True) from error

    def close(self) -> None:
        """Release the thread once its call has returned."""
        self._thread.close()


def unblock(answer: Future[Any], hang_up: Callable[[float], object]) -> None:
    """End a call that still waits, and wait until it returns, for at most two seconds: a thread that returns from it while the
    interpreter exits aborts the process. hang_up: is given a deadline, and shuts down the connections of the call."""
    end = time.monotonic() + _UNBLOCK_S
    while not answer.done() and time.monotonic() < end:
        hang_up(end)
        wait([answer], POLL_S)


def hang_up(store: Store, deadline: float) -> None:
    """Shut down this process's connections to a TCPStore: calls that wait there raise RuntimeError. Calls to other stores end
    soon after their deadline. deadline: see shut()."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        shut(store.host, store.port, deadline)


def shut(address: str, port: int, deadline: float, but: Collection[int] = ()) -> None:
    """Shut down this process's connections to an address; none if the look-up of the address has not returned by the
    deadline (time.monotonic() seconds). Their owner closes the descriptors. but: descriptors of connections that stay
    open."""
    found = set[int]()
    with suppress(LinkError):
        found = connections(address, port, deadline)
    for descriptor in found.difference(but):
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.shutdown(socket.SHUT_RDWR)


def connections(address: str, port: int, deadline: float) -> set[int]:
    """Return the descriptors of this process's sockets that are connected to an address; none if it does not resolve.
    Raises LinkError if its look-up has not returned by the deadline (time.monotonic() seconds)."""
    found = set()
    places = set[tuple[str, int]]()
    with suppress(OSError):
        places = {(each, port) for each in look_up(address, deadline)}
    places |= {(f"::ffff:{host}", at) for host, at in places if "." in host}  # IPv4 through a socket of IPv6
    for descriptor in map(int, os.listdir("/dev/fd")):
        with suppress(OSError):  # it has been closed, or is not connected
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as copy:
                    if copy.family in (socket.AF_INET, socket.AF_INET6):
                        peer = copy.getpeername()
                        found |= {descriptor} if (address_text(peer), peer[1]) in places else set()
    return found


def look_up(host: str, deadline: float) -> list[str]:
    """Return the numeric addresses of a host. host: a name or a numeric address. deadline: time.monotonic() seconds.

    A name is looked up on a separate thread, which can be abandoned: while name servers are down, the system may wait
    beyond the deadline. If no thread can be started, only the system's own timeouts bound the look-up. Raises LinkError,
    which contains the name, at the deadline; OSError or UnicodeError for a name that has no address.
    """
    with suppress(socket.gaierror):  # raised for a name
        return _addresses(host, socket.AI_NUMERICHOST)
    thread = DaemonThread("gradwire-names", or_callers=True)
    answer = thread.submit(lambda: _addresses(host))
    thread.close()
    if not wait([answer], max(0.0, deadline - time.monotonic())).done:
        late = f"the look-up of {host!r} on host {socket.gethostname()} has not returned: is a name server down?"
        raise LinkError(None, timed_out=True, detail=late)
    return answer.result()


def _addresses(host: str, flags: int = 0) -> list[str]:
    return [address_text(each[4]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)]
