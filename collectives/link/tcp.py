"""Messages between hosts over TCP connections, which compiled kernels drive without Python and without threads."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, closing, suppress

import numpy as np
import torch

from gradwire.collectives.errors import LinkError, ranks_text
from gradwire.collectives.kernels import cpu_arithmetic, cpu_sockets
from gradwire.collectives.link.base import KIND_BITS, Transport, WholeRun
from gradwire.collectives.link.handshake import Listener
from gradwire.collectives.link.membership import Membership
from gradwire.collectives.link.own_address import own_address
from gradwire.collectives.link.paths import check_paths
from gradwire.collectives.link.rows import Table
from gradwire.collectives.plan.program import Program

_FIRST_ROWS = 256

#: After how many messages, at the earliest, the unfinished ones are renumbered.
FIRST_LOOK = 256

#: The longest call of the kernel next_sender, so that Ctrl-C takes effect.
_SLICE_S = 0.05

#: How often a wait polls before it sleeps: about 300 us, but not at all beside work that needs the core.
_TRIES, _TRIES_BESIDE_WORK = 600, 0

#: How long close() waits for a kernel to return. After an abort, it returns within 50 ms.
_LEAVE_S = 1.0


def tcp(membership: Membership, timeout_s: float, *, but: Collection[int] = ()) -> Transport:
    """Connect the members to each other. but: the ranks that this one leaves out; they must leave it out too.

    Raises RuntimeError if there are no kernels; LinkError if the members do not connect within timeout_s seconds;
    OSError if this rank cannot listen.
    """
    kernels = cpu_sockets()
    if isinstance(kernels, str):
        raise RuntimeError(f"link 'tcp': {kernels}")
    deadline = time.monotonic() + timeout_s
    rank, check = membership.rank, membership.check
    peers = [peer for peer in range(membership.size) if peer != rank and peer not in but]
    with ExitStack() as made:
        listener = made.enter_context(closing(Listener(own_address(os.environ, deadline))))
        cards = [card.decode() for card in membership.everyones("tcp", listener.card.encode(), deadline)]
        connections = listener.join(rank, peers, cards, membership.secret, deadline, check)
        for connection in connections.values():
            made.enter_context(connection)
        check_paths(rank, connections, deadline, check)
        made.pop_all()
    transport = TcpTransport(rank, membership.size, connections)
    transport.routes = (f"{ranks_text(peers)}: TCP, from {listener.card.split()[0]}",)
    return transport


class TcpTransport(Table):
    """A Transport over TCP. connections: nonblocking sockets, by rank; the TcpTransport closes them.

    A wait for any message moves all messages that this rank has posted.
    """

    quick = True
    eager = True
    receives_from_any = True
    waits_again = True

    def __init__(self, rank: int, size: int, connections: Mapping[int, socket.socket]) -> None:
        super().__init__()
        kernels = cpu_sockets()
        assert not isinstance(kernels, str)
        self.rank = rank
        self.size = size
        self._kernels = kernels
        self._sockets = dict(connections)
        self._running = threading.Lock()
        self._closed = False
        self._context = np.zeros(kernels.FIELDS, dtype=np.int64)
        self._address: int = self._context.ctypes.data
        self._rows = np.zeros((_FIRST_ROWS, kernels.ROW_FIELDS), dtype=np.int64)
        self._connections = np.zeros((size, kernels.CONNECTION_FIELDS), dtype=np.int64)
        self._stages = np.empty((size, kernels.STAGE_BYTES), dtype=np.uint8)
        self._wanted = np.zeros(size, dtype=np.int64)
        self._polls = np.zeros((size, kernels.POLL_BYTES), dtype=np.uint8)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._last_sender = rank
        self._tidy_at = FIRST_LOOK  # number of the message before which _tidy() renumbers
        self._connections[:, kernels.DESCRIPTOR] = -1
        for peer, connection in self._sockets.items():
            self._connections[peer, kernels.DESCRIPTOR] = connection.fileno()
        self._connections[:, kernels.STAGE] = self._stages.ctypes.data + np.arange(size) * kernels.STAGE_BYTES
        self._connections[:, kernels.CURRENT] = -1
        context = {
            kernels.RANK: rank,
            kernels.SIZE: size,
            kernels.ROWS: self._rows.ctypes.data,
            kernels.CAPACITY: _FIRST_ROWS,
            kernels.CONNECTIONS: self._connections.ctypes.data,
            kernels.WANTED: self._wanted.ctypes.data,
            kernels.POLLS: self._polls.ctypes.data,
        }
        self._context[list(context)] = list(context.values())
        self.wait_beside_work(False)

    def finish(self, number: int, deadline: float) -> None:
        self._run(self._kernels.wait_for, (self._address, number), deadline)

    def is_done(self, number: int) -> bool:
        kernels = self._kernels
        return number < self._context[kernels.FIRST] or bool(self._rows[number % len(self._rows), kernels.ROW_DONE])

    def has_unfinished_send(self) -> bool:
        return bool(np.any(self._unfinished()[:, self._kernels.ROW_SENDS]))

    def is_busy(self) -> bool:
        return len(self._unfinished()) > 0

    def progress(self) -> None:
        self._run(self._kernels.wait_for, (self._address, -1), time.monotonic())

    def next_sender(self, tag: int, deadline: float) -> int | None:
        kernels = self._kernels
        while True:
            left_s = deadline - time.monotonic()
            milliseconds = math.ceil(1000 * min(max(left_s, 0.0), _SLICE_S))
            first = (self._last_sender + 1) % self.size
            self._run(kernels.next_sender, (self._address, tag, first, milliseconds), deadline)
            peer = int(self._context[kernels.PEER])
            if peer >= 0:
                self._last_sender = peer
                return peer
            if left_s <= 0:
                return None

    def follow(self, program: Program, dtype: torch.dtype, op: str) -> WholeRun:
        kernels, address = self._kernels, self._address
        arithmetic = cpu_arithmetic(dtype).address if program.scratch else 0
        itemsize, operation = dtype.itemsize, kernels.OPS[op]
        scratch_bytes = program.scratch * itemsize

        def run(source: torch.Tensor, destination: torch.Tensor, tag: int, deadline: float) -> None:
            base = self._tidy()
            if self._scratch.numel() < scratch_bytes:
                self._scratch = torch.empty(scratch_bytes, dtype=torch.uint8)
            buffers = (source.data_ptr(), destination.data_ptr(), self._scratch.data_ptr())
            for table in program.tables():
                instructions, words = table.buffer_info()
                count = words // kernels.INSTRUCTION_FIELDS
                arguments = (address, instructions, count, base, tag, *buffers, itemsize, arithmetic, operation)
                self._run(kernels.follow, arguments, deadline)

        return run

    def wait_beside_work(self, beside_work: bool) -> None:
        tries = _TRIES_BESIDE_WORK if beside_work else _TRIES
        self._context[[self._kernels.MOST_TRIES, self._kernels.TRIES]] = tries

    def abort(self) -> None:
        self._context[self._kernels.ABORTED] = 1
        for connection in self._sockets.values():
            with suppress(OSError):  # the connection has ended already
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """See Transport. If a kernel still uses the connections, they stay open until the process ends."""
        if self._running.acquire(timeout=_LEAVE_S):
            self._closed = True
            for connection in self._sockets.values():
                connection.close()
            self.pending.clear()
            self._running.release()

    def disown(self) -> None:
        for connection in self._sockets.values():
            connection.close()

    def _add(self, sends: int, peer: int, tensor: torch.Tensor, tag: int) -> int:
        number = self._tidy()
        nbytes = tensor.numel() * tensor.element_size()
        arguments = (self._address, sends, peer, tag, tensor.data_ptr(), nbytes)
        self._run(self._kernels.add, arguments, time.monotonic())
        return number

    def _run(self, kernel: Callable[..., int], arguments: tuple[int, ...], deadline: float) -> None:
        """Call a kernel until it has finished. Raises LinkError if it fails or the deadline passes."""
        kernels = self._kernels
        with self._running:
            if self._closed:
                raise LinkError(None, timed_out=False, detail="this rank has closed its Communicator")
            while (status := kernel(*arguments)) != kernels.FINISHED:
                peer = int(self._context[kernels.PEER])
                if status == kernels.FULL:
                    self._grow()
                elif status == kernels.DISAGREED:
                    found = int(self._context[kernels.FOUND_TAG]) >> KIND_BITS, int(self._context[kernels.FOUND_NBYTES])
                    raise LinkError(peer, timed_out=False, detail=f"rank {peer} called another operation", found=found)
                elif self._context[kernels.ABORTED]:  # before LOST, because a kernel may report an abort as LOST
                    raise LinkError(None, timed_out=False, detail="the wait was ended")
                elif status == kernels.LOST:
                    error = int(self._context[kernels.ERROR])
                    detail = os.strerror(error) if error else "the connection has ended"
                    raise LinkError(peer, timed_out=False, detail=f"rank {peer}: {detail}")
                elif time.monotonic() >= deadline:
                    raise LinkError(peer, timed_out=True, detail=f"received nothing from rank {peer}", awaited={peer})

    def _unfinished(self) -> np.ndarray:
        """Return the rows of messages that are not done."""
        kernels, context = self._kernels, self._context
        rows = self._rows[np.arange(context[kernels.FIRST], context[kernels.COUNT]) % len(self._rows)]
        unfinished: np.ndarray = rows[rows[:, kernels.ROW_DONE] == 0]
        return unfinished

    def _tidy(self) -> int:
        """From time to time, give unfinished messages new numbers, so that kernels do not scan the rows of finished
        ones. Return the number of the next message."""
        kernels, context, rows = self._kernels, self._context, self._rows
        count = int(context[kernels.COUNT])
        if count < self._tidy_at:
            return count
        with self._running:
            stay = [n for n in range(int(context[kernels.FIRST]), count) if not rows[n % len(rows), kernels.ROW_DONE]]
            saved = rows[np.array(stay, dtype=np.int64) % len(rows)]
            new = {number: count + place for place, number in enumerate(stay)}
            rows[np.arange(count, count + len(stay)) % len(rows)] = saved
            for connection in self._connections:
                connection[kernels.CURRENT] = new.get(int(connection[kernels.CURRENT]), -1)
            context[kernels.FIRST], context[kernels.COUNT] = count, count + len(stay)
        self._renumber(new)
        self._tidy_at = count + len(stay) + max(FIRST_LOOK, 2 * len(stay))
        return count + len(stay)

    def _grow(self) -> None:
        """Double the number of rows in the table."""
        kernels = self._kernels
        old, numbers = self._rows, np.arange(self._context[kernels.FIRST], self._context[kernels.COUNT])
        self._rows = np.zeros((2 * len(old), kernels.ROW_FIELDS), dtype=np.int64)
        self._rows[numbers % len(self._rows)] = old[numbers % len(old)]
        self._context[kernels.ROWS] = self._rows.ctypes.data
        self._context[kernels.CAPACITY] = len(self._rows)
