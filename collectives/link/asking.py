"""Calls of a store, each with a deadline, and none left behind when the process ends."""

from __future__ import annotations

import atexit
import os
import socket
import stat
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from gradwire.collectives.daemon import DaemonThread
from gradwire.collectives.errors import LinkError

#: How often a call that waits for its answer checks whether there is any use in waiting.
_LOOK_AGAIN_S = 0.03

#: What the store may take for an answer when the deadline has passed, such as to who has not come.
_LAST_ANSWER_S = 1.0

#: How long the end of the process waits for a call whose connection it has shut.
_UNBLOCK_S = 2.0

_Answer = TypeVar("_Answer")


class Asking:
    """Asks a store, which does not answer while the process that keeps it is stopped: torch waits without a deadline for that,
    so a thread that can be left waiting makes the calls. Where none can be started, torch's own timeouts alone bound them.

    deadline: time.monotonic() seconds. check: called again and again; raises LinkError where there is no use in waiting.
    keepers: the rank whose process keeps the store, where it is one of those that connect.
    """

    def __init__(
        self,
        store: Store,
        deadline: float,
        check: Callable[[], object] | None = None,
        keepers: Collection[int] = (),
    ) -> None:
        self._store, self._deadline = store, deadline
        self._check, self._keepers = check, keepers
        self._thread = DaemonThread("gradwire-store", or_callers=True)

    def ask(self, call: Callable[[], _Answer]) -> _Answer:
        """Return what a call returns that asks the store. Raises LinkError where there is no answer by the deadline or the
        store has ended, and what check raises."""
        answer = self._thread.submit(call)
        until = max(self._deadline, time.monotonic() + _LAST_ANSWER_S)
        try:
            while not wait([answer], _LOOK_AGAIN_S).done:
                if self._check is not None:
                    self._check()
                if time.monotonic() >= until:
                    silent = "the store does not answer: is the process that holds it, rank 0 or the launcher, stopped?"
                    raise LinkError(None, timed_out=True, detail=silent, awaited=self._keepers)
        except BaseException:
            atexit.register(_unblock, answer, self._store)
            raise
        try:
            return answer.result()
        except dist.DistNetworkError as error:
            detail = f"the process that holds the store has ended: {error}"
            raise LinkError(None, timed_out=False, detail=detail, awaited=self._keepers, ended=True) from error

    def close(self) -> None:
        """Give the thread back, once it has its answer."""
        self._thread.close()


def _unblock(answer: Future[Any], store: Store) -> None:
    """End a call that still waits, or wait for it: a thread that wakes in there while the interpreter ends aborts the process."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    end = time.monotonic() + _UNBLOCK_S
    while not answer.done() and time.monotonic() < end:
        if isinstance(store, TCPStore):  # in others a call ends soon after its deadline
            shut(connections(store.host, store.port))
        wait([answer], _LOOK_AGAIN_S)


def shut(descriptors: Collection[int]) -> None:
    """End connections of this process without closing their descriptors, which somebody else will do."""
    for descriptor in descriptors:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.shutdown(socket.SHUT_RDWR)


def connections(address: str, port: int) -> set[int]:
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
