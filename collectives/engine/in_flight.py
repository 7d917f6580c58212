"""The operations that GPUs have not finished, and the thread that watches over them."""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections import deque
from contextlib import suppress

from gradwire.collectives import torch_internals
from gradwire.collectives.engine.failure_monitor import LAST_WORDS_S, FailureMonitor
from gradwire.collectives.engine.streams import DeviceOperation
from gradwire.collectives.errors import LinkError, PeerJoined
from gradwire.collectives.forks import in_forked_child
from gradwire.collectives.transports.base import Transport

#: How often the watchdog looks at operations in flight.
_LOOK_S = 0.05

_log = logging.getLogger("gradwire")

ENDED = "the wait was ended, because another rank no longer takes part"


class InFlight:
    """The operations of one Communicator that were given to GPUs, in their order, until they are done.

    NCCL has no deadlines of its own here, and reports no lost ranks. So one thread of the process, the *watchdog*, calls look().
    """

    def __init__(self, monitor: FailureMonitor, transport: Transport) -> None:
        self._monitor, self._transport = monitor, transport
        self._operations: deque[DeviceOperation] = deque()
        self._lock = threading.RLock()
        self._is_failing = False
        in_forked_child(self, InFlight.forget)

    def add(self, operation: DeviceOperation, timeout_s: float, peers: frozenset[int] = frozenset()) -> None:
        """Watch over an operation, in whose turn this is called. timeout_s: seconds that it may take once the devices have
        reached it. peers: the other ranks of a message."""
        operation.watch(self, -1 if peers else self._monitor.running, timeout_s, peers)
        self._operations.append(operation)
        _watchdog.watch(self)

    def oldest(self) -> tuple[int, str] | None:
        """Return the number and the call of the first operation in flight; None if none is. Messages have no number."""
        for operation in list(self._operations):
            if operation.sequence >= 0:
                return operation.sequence, operation.text
        return None

    @property
    def is_broken(self) -> bool:
        """Return whether no operation in flight can be done any more."""
        return self._monitor.is_broken

    def look(self) -> bool:
        """Drop the operations that are done. If one cannot be done any more, break the Communicator, and end all of them with its
        error. Return whether any is left."""
        with self._lock:
            while self._operations and not self._is_failing:
                first = self._operations[0]
                try:
                    is_done = first.look()
                    error = None if is_done else self._error_of(first)
                except RuntimeError as failure:  # of the device
                    is_done, detail = False, str(failure).partition("\n")[0]
                    error = LinkError(None, timed_out=False, detail=detail)
                # After this look: what is aborted ends too, with results that are not those of the operation.
                if self.is_broken:
                    self._fail(LinkError(None, timed_out=False, detail=ENDED))
                elif error is not None:
                    self._fail(error)
                elif is_done:
                    self._finish(self._operations.popleft())
                else:
                    break
            return bool(self._operations)

    def _finish(self, operation: DeviceOperation) -> None:
        """End an operation that is done."""
        monitor = self._monitor
        if operation.peers or monitor.joined.refused != operation.sequence:
            operation.end()
            return
        # Its caller may have gone on with a result in which the joined ranks have no part.
        operation.end(PeerJoined(monitor.joined.absent, rank=self._transport.rank, operation=operation.text))
        monitor.break_off(operation.text, "a rank that has joined", operation.sequence + 1)

    def _error_of(self, operation: DeviceOperation) -> LinkError | None:
        """Return why an operation cannot be done; None if it may be."""
        if (detail := self._transport.trouble()) is not None:
            return LinkError(None, timed_out=False, detail=detail)
        if operation.ends is None:
            return None
        now = time.monotonic()
        if operation.peers and self._monitor.all_gone(operation.peers):  # their last messages may have arrived
            operation.ends = min(operation.ends, now + LAST_WORDS_S)
        return LinkError(None, timed_out=True, detail="no completion from NCCL") if now >= operation.ends else None

    def _fail(self, error: LinkError) -> None:
        """End all operations with the error that has broken the Communicator, or with this one, which breaks it. A signal handler
        may call look() meanwhile."""
        self._is_failing = True
        first = self._operations[0]
        ends = time.monotonic() + first.timeout_s if first.ends is None else first.ends
        failure = self._monitor.failure or self._monitor.explain(
            error, first.text, first.timeout_s, ends, first.peers, None if first.peers else first.sequence
        )
        self._is_failing = False
        self._operations.popleft().end(failure)
        while self._operations:
            operation = self._operations.popleft()
            operation.end(failure.again(f"not finished, the Communicator broke before ({failure})", operation.text))

    @property
    def is_empty(self) -> bool:
        """Return whether no operation, and no message, is in flight."""
        return not self._operations

    def drain(self, until: float = math.inf) -> bool:
        """Wait until no operation is in flight, at their deadlines at the latest, nor beyond `until` (time.monotonic() seconds).
        Return False if one is left, as when the devices do not reach it in its time."""
        began_s = time.monotonic()
        while self.look():
            if self._is_failing or time.monotonic() >= until:
                return False
            with suppress(IndexError):
                first = self._operations[0]
                if first.ends is None and time.monotonic() >= began_s + first.timeout_s:
                    return False
            time.sleep(_LOOK_S / 10)
        return True

    def forget(self) -> None:
        """Give up what is in flight, in a forked child, whose lock a thread of the parent may have held."""
        self._lock = threading.RLock()
        self._operations.clear()


class _Watchdog:
    """Looks at the operations in flight of all Communicators of a process. The first one starts the thread."""

    def __init__(self) -> None:
        self._restart()
        in_forked_child(self, _Watchdog._restart)  # which lacks the thread

    def _restart(self) -> None:
        self._watched: set[InFlight] = set()
        self._unseen: weakref.WeakSet[InFlight] = weakref.WeakSet()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def watch(self, operations: InFlight) -> None:
        """Look at the operations of one Communicator until none is left."""
        if operations in self._watched:
            return
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._serve, name="gradwire-watchdog", daemon=True)
                thread.start()
                self._thread = thread
            self._watched.add(operations)
            self._changed.notify()

    def _serve(self) -> None:
        torch_internals.allow_captures()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._watched)
            time.sleep(_LOOK_S)
            for each in tuple(self._watched):
                with self._changed:
                    self._watched.discard(each)  # before the look, so that what is added meanwhile is watched
                try:
                    is_left = each.look()
                except Exception:  # the thread must look at those of other Communicators, too
                    if each not in self._unseen:
                        _log.exception("gradwire: the watchdog cannot look at operations in flight")
                        self._unseen.add(each)
                    is_left = True
                if is_left:
                    with self._changed:
                        self._watched.add(each)
                del each  # it keeps a Communicator's connections


_watchdog = _Watchdog()
