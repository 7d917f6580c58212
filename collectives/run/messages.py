"""Messages between two ranks: beside the operations, in which all ranks take part, and in order with them."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from datetime import timedelta

from collectives.errors import CollectiveTimeout, LinkError
from collectives.link.base import Pending, Transport
from collectives.reduction import carried
from collectives.run.operations import Operations
from collectives.run.staging import Buffer

MOST_TAG = 2**16 - 1

#: Beyond all tags of operations, and below what the process group's link keeps for itself.
_HIGHEST = 2**31 - 2

_POLL_S = 0.0005


class _Way:
    """The way of one message. peer: the other rank, None for one that may come from any."""

    def __init__(self, transport: Transport, buffer: Buffer, peer: int | None, tag: int, *, sends: bool) -> None:
        self.sender = None if sends else peer
        self._transport = transport
        self._buffer = buffer
        self.sends = sends
        self._peer = peer
        self._tag = _HIGHEST - tag
        self._pending: Pending | None = None

    def begin(self, deadline: float) -> None:
        """Post it, unless it is not known yet from whom it comes."""
        if self._peer is not None:
            self._post(self._peer)

    def finish(self, deadline: float) -> None:
        """Wait until it is sent or received. Raises LinkError."""
        if self._pending is None:
            self._hear(deadline)
        if self._pending is None:
            raise LinkError(None, timed_out=True, detail="nothing came from any rank")
        self._pending.wait(deadline)
        if not self.sends:
            self._buffer.store()

    def is_done(self) -> bool:
        """Return whether finish() would return, or raise, at once."""
        try:
            if self._pending is None:
                self._hear(0.0)
            return self._pending is not None and self._pending.is_done()
        except LinkError:
            return True

    def _hear(self, deadline: float) -> None:
        sender = self._transport.next_sender(self._tag, deadline)
        if sender is not None:
            self.sender = sender
            self._post(sender)

    def _post(self, peer: int) -> None:
        message = [(peer, carried(self._buffer.flat, "sum")[0])]
        sent, received = self._transport.post(message if self.sends else [], [] if self.sends else message, self._tag)
        (self._pending,) = sent or received


class MessageWork:
    """Handle of one message under way, as Communicator.send and recv return it with async_op=True."""

    def __init__(self, operations: Operations, rank: int, call: str, peers: frozenset[int], way: _Way) -> None:
        self._operations = operations
        self._rank = rank
        self._call = call
        self._peers = peers
        self._way = way
        self._beginning = operations.submit_message(call, peers, way.begin, async_op=True)
        self._is_over = False

    @property
    def sender(self) -> int | None:
        """The rank that a received message comes from, as soon as that is known; None for one that is sent."""
        return self._way.sender

    def wait(self, timeout: float | timedelta | None = None) -> None:
        """Block until the tensor is filled, or free again.

        timeout: seconds, or a timedelta; None waits as long as the Communicator's own deadline lets it. Raises the message's
        error; CollectiveTimeout when `timeout` passes first (the message stays under way).
        """
        if timeout is not None:
            seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
            deadline = time.monotonic() + seconds
            while not self.is_completed():
                if time.monotonic() >= deadline:
                    raise CollectiveTimeout(seconds, (), rank=self._rank, operation=self._call)
                time.sleep(_POLL_S)
        if self._beginning is not None:
            self._beginning.wait()
        if not self._is_over:
            self._operations.submit_message(self._call, self._peers, self._way.finish, async_op=False)
            self._is_over = True

    def is_completed(self) -> bool:
        """Return True once wait() would return, or raise, at once. What this rank has under way moves on meanwhile."""
        if self._is_over or not self._operations.usable:
            return True
        if self._beginning is not None and not self._beginning.is_completed():
            return False
        found: list[bool] = []
        self._operations.try_message(self._call, self._peers, lambda _: found.append(self._way.is_done()))
        return found == [True]

    def finish_sending(self, deadline: float) -> None:
        """Wait for what is sent, at the end of its Communicator, where all turns are over. Raises LinkError."""
        if self._way.sends and not self._is_over:
            self._way.finish(deadline)


class Messages:
    """Sends and receives the messages of one Communicator."""

    def __init__(self, transport: Transport, operations: Operations) -> None:
        self._transport = transport
        self._operations = operations
        self._lock = threading.Lock()
        self._under_way: list[MessageWork] = []  # nobody else may keep the memory of what is never waited for

    def send(self, call: str, buffer: Buffer, peer: int, tag: int, *, async_op: bool) -> MessageWork | None:
        """Send a buffer to a rank."""
        way = _Way(self._transport, buffer, peer, tag, sends=True)
        if async_op:
            return self._start(call, frozenset({peer}), way)
        self._run(call, frozenset({peer}), way)
        return None

    def receive(
        self, call: str, buffer: Buffer, peer: int | None, tag: int, *, async_op: bool
    ) -> MessageWork | int | None:
        """Fill a buffer with a message from a rank, or from any (None)."""
        others = frozenset(range(self._transport.size)) - {self._transport.rank}
        peers = others if peer is None else frozenset({peer})
        way = _Way(self._transport, buffer, peer, tag, sends=False)
        if async_op:
            return self._start(call, peers, way)
        self._run(call, peers, way)
        return way.sender

    def drain(self, deadline: float) -> None:
        """Finish sending what nobody has waited for, but not beyond the deadline (time.monotonic())."""
        with suppress(LinkError):
            for work in self._under_way:
                work.finish_sending(deadline)
        self._under_way = []

    def _run(self, call: str, peers: frozenset[int], way: _Way) -> None:
        def body(deadline: float) -> None:
            way.begin(deadline)
            way.finish(deadline)

        self._operations.submit_message(call, peers, body, async_op=False)

    def _start(self, call: str, peers: frozenset[int], way: _Way) -> MessageWork:
        work = MessageWork(self._operations, self._transport.rank, call, peers, way)
        with self._lock:
            self._under_way = [*(other for other in self._under_way if not other.is_completed()), work]
        return work
