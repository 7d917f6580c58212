"""The operations that GPUs have not finished, and the thread that watches over them."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress

from gradwire.collectives import torch_internals
from gradwire.collectives.engine.failure_monitor import FailureMonitor
from gradwire.collectives.engine.streams import DeviceOperation
from gradwire.collectives.errors import LinkError
from gradwire.collectives.forks import in_forked_child
from gradwire.collectives.transports.base import Transport

#: How often the watchdog looks at operations in flight.
_LOOK_S = 0.05

ENDED = "the wait was ended, because another rank no longer takes part"


class InFlight:
    """The operations of one Communicator that were given to GPUs, in their order, until they are done.

    NCCL has no deadlines of its own here, and reports no lost ranks. So one thread of the process, the *watchdog*, calls look().
    """

    def __init__(self, monitor: FailureMonitor, transport: Transport) -> None:
        self._monitor, self._transport = monitor, transport
        self._operations: deque[DeviceOperation] = deque()
        self._lock = threading.RLock()

    def add(self, operation: DeviceOperation, timeout_s: float, peers: frozenset[int] = frozenset()) -> None:
        """Watch over an operation, in whose turn this is called. timeout_s: seconds that it may take once the devices have
        reached it. peers: the other ranks of a message."""
        operation.watch(self, -1 if peers else self._monitor.running, timeout_s, peers)
        self._operations.append(operation)
        _watchdog.watch(self)

    def oldest(self) -> tuple[int, str] | None:
        """Return the number and the call of the first operation in flight, with -1 for a message; None if none is."""
        with suppress(IndexError):
            return self._operations[0].sequence, self._operations[0].text
        return None

    @property
    def is_broken(self) -> bool:
        """Return whether no operation in flight can be done any more."""
        return self._monitor.failure is not None or self._monitor.interrupted or self._monitor.exiting

    def look(self) -> bool:
        """Drop the operations that are done. If one cannot be done any more, break the Communicator, and end all of them with its
        error. Return whether any is left."""
        with self._lock:
            while self._operations:
                first = self._operations[0]
                trouble: LinkError | None = None
                is_done = False
                try:
                    is_done = first.has_finished
                except RuntimeError as error:  # the device has failed
                    trouble = LinkError(None, timed_out=False, detail=str(error).partition("\n")[0])
                # After this look: what NCCL leaves off ends too, with results that are not those of the operation.
                if self.is_broken:
                    self._fail(LinkError(None, timed_out=False, detail=ENDED))
                elif is_done:
                    self._operations.popleft().end()
                elif (trouble := trouble or self._error_of(first)) is not None:
                    self._fail(trouble)
                else:
                    break
            return bool(self._operations)

    def _error_of(self, operation: DeviceOperation) -> LinkError | None:
        """Return why an operation cannot be done; None if it may be."""
        if (detail := self._transport.trouble()) is not None:
            return LinkError(None, timed_out=False, detail=detail)
        if operation.peers and self._monitor.all_gone(operation.peers):
            return LinkError(None, timed_out=False, detail=ENDED)
        if (ends := operation.deadline()) is not None and time.monotonic() >= ends:
            return LinkError(None, timed_out=True, detail="no completion from NCCL")
        return None

    def _fail(self, error: LinkError) -> None:
        """End all operations with the error that has broken the Communicator, or with this one, which breaks it."""
        first = self._operations[0]
        ends = first.deadline() or time.monotonic() + first.timeout_s
        failure = self._monitor.failure or self._monitor.explain(
            error, first.text, first.timeout_s, ends, first.peers, None if first.peers else first.sequence
        )
        self._operations.popleft().end(failure)
        while self._operations:
            operation = self._operations.popleft()
            operation.end(failure.again(f"not finished, the Communicator broke before ({failure})", operation.text))

    def drain(self, deadline: float) -> bool:
        """Wait until no operation is in flight, but not beyond the deadline (time.monotonic()); return whether none is."""
        while self.look():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_S / 10)
        return True


class _Watchdog:
    """Looks at the operations in flight of all Communicators of a process. The first one starts the thread."""

    def __init__(self) -> None:
        self._restart()
        in_forked_child(self, _Watchdog._restart)  # which lacks the thread

    def _restart(self) -> None:
        self._watched: set[InFlight] = set()
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
                if each.look():
                    with self._changed:
                        self._watched.add(each)
                del each  # it keeps a Communicator's connections


_watchdog = _Watchdog()
