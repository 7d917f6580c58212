"""Messages between hosts over TCP connections, which compiled kernels drive without Python and without threads."""

from __future__ import annotations

import errno
import math
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from threading import get_ident

import numpy as np

from gradwire.collectives.control.membership import Membership
from gradwire.collectives.control.paths import lossy_paths
from gradwire.collectives.control.records import Connection, Seal, seals_of
from gradwire.collectives.cores import quota_is_short
from gradwire.collectives.environment import checksum_wanted
from gradwire.collectives.errors import ForgedMessage, LinkError, ranks_text
from gradwire.collectives.kernels import cpu_sockets
from gradwire.collectives.transports.base import KIND_BITS, Capabilities, Operation, Run, Transport
from gradwire.collectives.transports.compiled import CompiledLoop
from gradwire.collectives.transports.requests import Table

#: The longest call of the kernel next_sender, so that Ctrl-C takes effect.
_SLICE_S = 0.05

#: How often a wait polls before it sleeps: about 300 us, but about 10 us where the quota of a container is less than its ranks
#: need for this, and not at all beside work that needs the core.
_TRIES, _TRIES_IN_QUOTA, _TRIES_BESIDE_WORK = 600, 20, 0

#: How long close() waits for a kernel to return. After an abort, it returns within 50 ms.
_LEAVE_S = 1.0


def tcp(membership: Membership, timeout_s: float, *, but: Collection[int] = ()) -> Transport:
    """Connect the members to each other. but: the ranks that this one leaves out; they must leave it out too.

    Raises RuntimeError if there are no kernels; LinkError if the members do not connect within timeout_s seconds.
    """
    kernels = cpu_sockets()
    if isinstance(kernels, str):
        raise RuntimeError(f"link 'tcp': {kernels}")
    rank, channel = membership.rank, membership.channel
    peers = [peer for peer in range(membership.size) if peer != rank and peer not in but]
    connections = channel.connect(peers, time.monotonic() + timeout_s) if peers else {}
    local_size = next(len(host) for host in membership.hosts if rank in host)
    has_checksums = checksum_wanted(os.environ)
    transport = TcpTransport(rank, membership.size, connections, local_size, has_checksums=has_checksums)
    how = "encrypted TCP" if membership.is_private else "TCP with checksums" if has_checksums else "TCP"
    transport.routes = (f"{ranks_text(peers)}: {how}, from {membership.address}",)
    return transport


class TcpTransport(Table):
    """A Transport over TCP. connections: nonblocking sockets, by rank; the TcpTransport closes them. local_size: the number of
    ranks of this host, which share its cores. has_checksums: whether messages that are not encrypted have checksums, the same at
    both ends of a connection.

    A wait for any message moves all messages that this rank has posted.
    """

    capabilities = Capabilities(quick=True, eager=True, interruptible=True, receives_from_any=True, waits_again=True)

    def __init__(
        self,
        rank: int,
        size: int,
        connections: Mapping[int, Connection],
        local_size: int = 1,
        *,
        has_checksums: bool = False,
    ) -> None:
        kernels = cpu_sockets()
        assert not isinstance(kernels, str)
        super().__init__(kernels, np.zeros(kernels.TCP_FIELDS, dtype=np.int64), threading.Lock())
        self.rank = rank
        self.size = size
        self._sockets = dict(connections)
        self._local_size = local_size
        self._closed = False
        self._connections = np.zeros((size, kernels.CONNECTION_FIELDS), dtype=np.int64)
        self._seals = {peer: pair for peer, each in connections.items() if (pair := seals_of(each)) is not None}
        if has_checksums:
            checked = {peer: (Seal(None, encrypts=True), Seal(None, encrypts=False)) for peer in connections}
            self._seals = checked | self._seals
        stage_bytes = kernels.ARRIVING_BYTES if self._seals else kernels.STAGE_BYTES
        self._stages = np.empty((size, stage_bytes), dtype=np.uint8)
        self._leaving = np.empty((size if self._seals else 0, kernels.LEAVING_BYTES), dtype=np.uint8)
        self._wanted = np.zeros(size, dtype=np.int64)
        self._polls = np.zeros((size, kernels.POLL_BYTES), dtype=np.uint8)
        self._last_sender = rank
        self._connections[:, kernels.DESCRIPTOR] = -1
        for peer, connection in self._sockets.items():
            self._connections[peer, kernels.DESCRIPTOR] = connection.fileno()
        self._connections[:, kernels.STAGE] = self._stages.ctypes.data + np.arange(size) * stage_bytes
        self._connections[:, kernels.CURRENT] = -1
        for peer, (leaving, arriving) in self._seals.items():
            self._connections[peer, [kernels.SEALS, kernels.UNSEALS]] = leaving.address, arriving.address
            self._connections[peer, kernels.LEAVING] = self._leaving[peer].ctypes.data
        context = {
            kernels.RANK: rank,
            kernels.SIZE: size,
            kernels.CONNECTIONS: self._connections.ctypes.data,
            kernels.WANTED: self._wanted.ctypes.data,
            kernels.POLLS: self._polls.ctypes.data,
        }
        self.context[list(context)] = list(context.values())
        self._compiled: CompiledLoop | None = None
        self._process = os.getpid()
        self._waiting_thread = 0

    def finish(self, number: int, deadline: float) -> None:
        self._run(self.kernels.wait_for, (self.context_address, number), deadline)

    def move(self) -> None:
        self._run(self.kernels.wait_for, (self.context_address, -1), time.monotonic())

    def next_sender(self, tag: int, deadline: float) -> int | None:
        kernels = self.kernels
        while True:
            left_s = deadline - time.monotonic()
            milliseconds = math.ceil(1000 * min(max(left_s, 0.0), _SLICE_S))
            first = (self._last_sender + 1) % self.size
            self._run(kernels.next_sender, (self.context_address, tag, first, milliseconds), deadline)
            peer = int(self.context[kernels.PEER])
            if peer >= 0:
                self._last_sender = peer
                return peer
            if left_s <= 0:
                return None

    def prepare(self, operation: Operation) -> Run:
        if self._compiled is None:
            self._compiled = CompiledLoop(weakref.proxy(self))  # which does not keep this object alive
        return self._compiled.prepare(operation, self) or super().prepare(operation)

    def lossy_paths(self) -> Mapping[int, str]:
        return lossy_paths(self.rank, self._sockets)

    def abort(self) -> None:
        self.context[self.kernels.ABORTED] = 1
        for connection in self._sockets.values():
            with suppress(OSError):  # the connection has ended already
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """See Transport. If a kernel still uses the connections, they stay open until the process ends."""
        if os.getpid() != self._process:
            for connection in self._sockets.values():
                connection.close()
        elif self.running.acquire(timeout=_LEAVE_S):
            self._closed = True
            for connection in self._sockets.values():
                connection.close()
            self.pending.clear()
            self.running.release()

    def begin(self) -> None:
        self._ensure_open()
        self.tidy()

    def check(self, status: int, deadline: float, lost: set[int]) -> set[int]:
        kernels, context = self.kernels, self.context
        peer = int(context[kernels.PEER])
        if status == kernels.DISAGREED:
            found = int(context[kernels.FOUND_TAG]) >> KIND_BITS, int(context[kernels.FOUND_NBYTES])
            raise LinkError(peer, timed_out=False, detail=f"rank {peer} called another operation", found=found)
        if status == kernels.STOPPED or context[kernels.ABORTED]:  # a kernel may report an abort as LOST
            raise LinkError(None, timed_out=False, detail="the wait was ended")
        if status == kernels.LOST:
            error = int(context[kernels.ERROR])
            if error == errno.EBADMSG:
                raise ForgedMessage(peer, self.rank)
            if error == errno.ENOTRECOVERABLE:
                here = f"a call of OpenSSL's libcrypto failed on rank {self.rank}"
                raise LinkError(self.rank, timed_out=False, detail=here, awaited={self.rank})
            detail = os.strerror(error) if error else "the connection has ended"
            raise LinkError(peer, timed_out=False, detail=f"rank {peer}: {detail}")
        if time.monotonic() >= deadline:
            raise LinkError(peer, timed_out=True, detail=f"received nothing from rank {peer}", awaited={peer})
        return lost

    def place(self, peer: int) -> int:
        return peer

    def _ensure_open(self) -> None:
        if self._closed:
            raise LinkError(None, timed_out=False, detail="this rank has closed its Communicator")
        if (thread := get_ident()) != self._waiting_thread:
            self._waiting_thread = thread
            # The main thread waits in place of its own work. Another one leaves the core to the work of the main thread.
            tries = _TRIES_BESIDE_WORK
            if thread == threading.main_thread().ident:
                tries = _TRIES_IN_QUOTA if quota_is_short(self._local_size) else _TRIES
            self.context[[self.kernels.MOST_TRIES, self.kernels.TRIES]] = tries

    def _run(self, kernel: Callable[..., int], arguments: tuple[int, ...], deadline: float) -> None:
        """Call a kernel until it has finished. Raises LinkError if it fails or the deadline passes."""
        with self.running:
            self._ensure_open()
            while (status := kernel(*arguments)) != self.kernels.FINISHED:
                self.check(status, deadline, set())

    def _renumber(self, new: dict[int, int]) -> None:
        super()._renumber(new)
        for connection in self._connections:
            connection[self.kernels.CURRENT] = new.get(int(connection[self.kernels.CURRENT]), -1)
