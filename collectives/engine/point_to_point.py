"""Messages between two ranks. They have no sequence number, but run in the order of issue together with the operations."""

from __future__ import annotations

import logging
import math
import threading
import time
from datetime import timedelta
from typing import cast

from gradwire.collectives.engine.buffers import Buffer
from gradwire.collectives.engine.failure_monitor import LAST_WORDS_S
from gradwire.collectives.engine.host_copies import HostCopies
from gradwire.collectives.engine.operations import Operations
from gradwire.collectives.engine.prepared import PreparedCall
from gradwire.collectives.engine.streams import DeviceOperation
from gradwire.collectives.engine.work import Work
from gradwire.collectives.errors import CollectiveTimeout, LinkError
from gradwire.collectives.reduction import MOVED, carried
from gradwire.collectives.torch_internals import uncompiled
from gradwire.collectives.transports.base import DONE_POLL_S, KIND_BITS, Pending, Transport
from gradwire.collectives.transports.requests import FromAny

MOST_TAG = 2**16 - 1

#: The highest tag of a message: above all tags of operations, and below the tag that transports/process_group.py reserves.
_HIGHEST = 2**31 - 2

#: How many messages are sent before finished ones are dropped.
_FIRST_CHECK = 64

_log = logging.getLogger("gradwire")


class MessageWork:
    """Handle of one message, which Communicator.isend and irecv return.

    Attribute sender: the rank that sends a received message; None until the rank is known, and for a sent message.
    """

    def __init__(
        self,
        messages: Messages,
        call: str,
        buffer: Buffer,
        peer: int | None,
        tag: int,
        *,
        sends: bool,
        device: DeviceOperation | None = None,
        copies: HostCopies | None = None,
    ) -> None:
        """peer: the other rank; None receives from any. device: orders the message on the GPU of its tensor. copies: of this
        tensor, with one of which the buffer shares its memory, if the transport moves CPU tensors only."""
        self._transport = transport = messages.transport
        self._operations = messages.operations
        self._call = PreparedCall(call, call, _in_parts, digest=0)
        self._buffer: Buffer | None = buffer  # None once the message is done
        self._peer = peer
        others = frozenset(range(transport.size)) - {transport.rank}
        self._peers = others if peer is None else frozenset({peer})
        self._device, self._copies = device, copies
        self._sends = sends
        self.sender = None if sends else peer
        self._tag = (MOVED.index(buffer.flat.dtype) + 1) << KIND_BITS | (_HIGHEST - tag)
        self._beginning: Work | None = None
        self._pending: Pending | None = None
        self._is_over = False
        self._vain_since = math.inf

    @uncompiled
    def wait(self, timeout: float | timedelta | None = None) -> None:
        """Block until the received tensor is filled, or the sent tensor may be changed.

        timeout: seconds, or a timedelta; None waits until the Communicator's own deadline. Raises the message's error;
        CollectiveTimeout when `timeout` passes first (the transfer continues).
        """
        if timeout is not None and not self._is_over:
            seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
            deadline = time.monotonic() + seconds
            while not self.is_completed():
                if time.monotonic() >= deadline:
                    raise CollectiveTimeout(seconds, (), rank=self._transport.rank, operation=self._call.text)
                time.sleep(DONE_POLL_S)
        if self._beginning is not None:
            self._beginning.wait()
        if not self._is_over and self._peer is not None:
            self._operations.run_message(self._call, self._peers, self._finish, async_op=False)
        self._order()

    def _order(self) -> None:
        """Let the current stream continue after a message that GPUs have been given."""
        if self._device is not None:
            self._device.order()
            self._device.check()

    @uncompiled
    def is_completed(self) -> bool:
        """Return True once wait() would return or raise at once. The call also advances this rank's messages."""
        if self._is_over or not self._operations.usable:
            return True
        if self._beginning is not None and not self._beginning.is_completed():
            return False
        if self._peer is None:
            return True
        if self._operations.monitor.all_gone(self._peers):
            self._vain_since = min(self._vain_since, time.monotonic())
            if time.monotonic() >= self._vain_since + LAST_WORDS_S:
                return True
        found: list[bool] = []
        try:
            self._operations.try_message(self._call, self._peers, lambda _: found.append(self._has_finished()))
        except Exception:  # the Communicator is broken now: wait() raises the error
            return True
        return found == [True]

    def start(self) -> None:
        """Begin the message, and return without waiting for it."""
        # A receive from any rank cannot be posted before its sender is known. It keeps its turn until the message has arrived,
        # so later calls wait.
        knows_peer = self._peer is not None
        body = self._begin if knows_peer else self._run
        at_once = knows_peer and self._copies is None  # else the host waits
        self._beginning = self._operations.run_message(self._call, self._peers, body, async_op=True, at_once=at_once)

    def run(self) -> None:
        """Begin the message and wait for it."""
        self._operations.run_message(self._call, self._peers, self._run, async_op=False)
        self._order()

    def finish_sending(self, deadline: float) -> None:
        """Wait for a sent message when its Communicator closes, after the last turn."""
        if self._is_over or not self._sends:
            return
        try:
            self._finish(deadline)
        except LinkError as error:
            rank = self._transport.rank
            _log.warning("gradwire: rank %d closes before %s has completed: %s", rank, self._call.text, error)

    # The parts of a turn, which may raise LinkError

    def _begin(self, deadline: float) -> None:
        """Post the message."""
        if self._device is None:
            self._post()
        elif self._copies is None:
            self._device.run(self._post)
        else:
            if self._sends:
                self._device.start(self._copies.copy_out, follows=True)
                self._copies.await_out(deadline)
            self._post()

    def _post(self) -> None:
        assert self._buffer is not None
        message = [(self._peer, carried(self._buffer.flat, "sum")[0])]
        sent, received = self._transport.post(message if self._sends else [], [] if self._sends else message, self._tag)
        (self._pending,) = sent or received

    def _finish(self, deadline: float) -> None:
        """Wait for the transfer, once, and release the tensor."""
        if self._is_over:  # in the turn of another thread
            return
        device, copies = self._device, self._copies
        if device is None:
            self._land(deadline)
        elif copies is None:
            device.run(self._land, deadline)
            self._operations.in_flight.add(device, self._operations.timeout_s, self._peers)
        else:
            self._land(deadline)
            if not self._sends:
                device.run(copies.copy_back)
        self._is_over = True
        self._buffer = self._pending = self._copies = None

    def _land(self, deadline: float) -> None:
        assert self._pending is not None
        assert self._buffer is not None
        self._pending.wait(deadline)
        if self._peer is None:
            self.sender = cast(FromAny, self._pending).sender
        if not self._sends:
            self._buffer.store()

    def _run(self, deadline: float) -> None:
        self._begin(deadline)
        self._finish(deadline)

    def _has_finished(self) -> bool:
        """Return whether _finish() would return, or raise, at once."""
        if self._is_over:
            return True
        assert self._pending is not None
        try:
            return self._pending.is_done()
        except LinkError:
            return True


def _in_parts(*given: object) -> None:
    """Stand for PreparedCall.run: the parts of a message run in turns of their own."""


class Messages:
    """Sends and receives the messages of one Communicator."""

    def __init__(self, transport: Transport, operations: Operations) -> None:
        self.transport = transport
        self.operations = operations
        self._lock = threading.Lock()
        self._sent: list[MessageWork] = []  # the caller may never wait for these
        self._check_at = _FIRST_CHECK

    def transfer(
        self,
        call: str,
        buffer: Buffer,
        peer: int | None,
        tag: int,
        *,
        sends: bool,
        async_op: bool,
        device: DeviceOperation | None = None,
        copies: HostCopies | None = None,
    ) -> MessageWork:
        """Send a buffer to a rank, or fill it with a message from a rank, or from any (None). With async_op, only begin. device,
        copies: see MessageWork."""
        work = MessageWork(self, call, buffer, peer, tag, sends=sends, device=device, copies=copies)
        if not async_op:
            work.run()
            return work
        work.start()
        if sends or (
            device is not None and copies is None
        ):  # torch keeps the memory of NCCL's messages while their handles live
            with self._lock:
                self._sent.append(work)
                if len(self._sent) >= self._check_at:
                    self._sent = [each for each in self._sent if not each.is_completed()]
                    self._check_at = max(_FIRST_CHECK, 2 * len(self._sent))
        return work

    def drain(self, deadline: float) -> None:
        """Wait for the sent messages, but not beyond the deadline (time.monotonic())."""
        for work in self._sent:
            work.finish_sending(deadline)
        self._sent = []
