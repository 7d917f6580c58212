"""The handle of an operation in progress."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from gradwire.collectives.errors import CollectiveError, CollectiveTimeout
from gradwire.collectives.torch_internals import uncompiled
from gradwire.collectives.transports.base import DONE_POLL_S

if TYPE_CHECKING:
    from gradwire.collectives.engine.queue import WorkQueue
    from gradwire.collectives.engine.streams import DeviceOperation

_log = logging.getLogger("gradwire")


class Work:
    """Handle of one operation, which verbs return. The operation is done, unless `async_op=True` was given.

    With CUDA tensors, the operation is done for the host when GPUs have been given all of it: wait() then lets the current stream
    continue after it, and the host does not wait.

    counted: whether this is one of the operations that all ranks number and call in the same order; False for a message.
    timeout_s: seconds for which functions that were given to when_done() may delay the operation. device: orders the operation on
    GPUs; None if it concerns none. Attribute of an operation that is done: ended_s, its end by time.perf_counter(); on GPUs, that
    of its part on the host."""

    def __init__(
        self,
        rank: int,
        operation: str,
        run: Callable[[], None],
        *,
        counted: bool = True,
        timeout_s: float = math.inf,
        device: DeviceOperation | None = None,
    ) -> None:
        self.rank, self.operation = rank, operation
        self.counted = counted
        self.timeout_s = timeout_s
        self.ended_s = self._host_s = 0.0
        self.queue: WorkQueue | None = None
        self.queued_s, self.awaited = math.inf, False  # time.monotonic() of WorkQueue.submit(), and its argument
        self._device = device
        self._run: Callable[[], None] | None = run
        self._done = threading.Event()
        self._error: BaseException | None = None

    @property
    def seconds(self) -> float | None:
        """How long the operation ran, including waits for other ranks; if GPUs run it, None until it has finished there."""
        return self._device.seconds if self._device is not None and self._device.is_watched else self._host_s

    @uncompiled  # it may run the operation
    def wait(self, timeout: float | timedelta | None = None) -> None:
        """Block until the operation is done; other Python threads run meanwhile. If the operation is the next one in the queue,
        the calling thread may run it: docs/decisions/0022-a-waiting-thread-runs-the-operation.md lists the conditions.

        With CUDA tensors, what is enqueued on the current streams from then on comes after the operation. With a timeout, the
        host also waits until it has finished on the GPU.

        timeout: seconds, or a timedelta; None waits until the operation ends, at its own deadline at the latest.
        Raises the operation's error; CollectiveTimeout when `timeout` passes first (the operation continues); CollectiveError
        where the wait could never end: see WorkQueue.check_may_wait().
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        limit = None if seconds == math.inf else seconds
        until = None if seconds is None or self._device is None else time.monotonic() + seconds
        if not self._done.is_set():
            if self.queue is not None:
                if limit is None:
                    self.queue.check_may_wait(self.rank, self.operation)
                self.queue.hasten(self, may_run=limit is None)
            if not self._done.wait(limit):
                assert seconds is not None
                raise CollectiveTimeout(seconds, (), rank=self.rank, operation=self.operation)
        if self._error is not None:
            if self._device is not None:
                self._device.order()  # what was enqueued may still use the tensors
            raise self._error
        if self._device is not None:
            if until is not None:
                assert seconds is not None
                while not self.is_completed():
                    if time.monotonic() >= until:
                        raise CollectiveTimeout(seconds, (), rank=self.rank, operation=self.operation)
                    time.sleep(DONE_POLL_S)
            self._device.order()
            self._device.check()

    def begin(self) -> None:
        """Let the operation begin in the background when the operations before it are done, as it does by itself unless its
        caller has announced that it waits next."""
        if self.queue is not None and not self.is_over:
            self.queue.wake(self)

    def is_completed(self) -> bool:
        """Return whether wait() would return or raise without waiting; on GPUs, whether they have finished the operation."""
        if not self._done.is_set():
            return False
        return self._device is None or self._error is not None or self._device.is_over()

    @classmethod
    def done(cls) -> Work:
        """Return the handle of an operation that is done."""
        work = cls(0, "an operation", lambda: None)
        work.run()
        return work

    @classmethod
    def launched(cls, rank: int, operation: str, device: DeviceOperation) -> Work:
        """Return the handle of an operation that GPUs have been given."""
        work = cls(rank, operation, lambda: None, device=device)
        work.run()
        return work

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call a function when the operation is done: at once if it is done already, else on a thread of the queue that only
        calls such functions. Operations that were submitted after this call begin when the function has returned; those that
        the function itself submits run at once, on its thread, before they are returned."""
        if self.queue is None or not self.queue.call_after(self, callback):
            call_back(self.operation, callback)

    @property
    def is_over(self) -> bool:
        """Return whether the host's part of the operation is done."""
        return self._done.is_set()

    @property
    def has_begun(self) -> bool:
        """Return whether run() was called."""
        return self._run is None

    def end(self) -> None:
        """Complete the handle if an interrupt ended run() before run() completed it."""
        if self.has_begun:
            if self._error is None and not self._done.is_set():
                self._error = CollectiveError("interrupted", rank=self.rank, operation=self.operation)
            self._done.set()

    def run(self) -> None:
        """Run the operation in the calling thread and complete the handle."""
        began = time.perf_counter()
        run, self._run = self._run, None  # it refers to tensors
        assert run is not None
        try:
            run()
        except BaseException as error:  # wait() raises it, in the thread that calls wait()
            self._error = error
        finally:
            del run
            self.ended_s = time.perf_counter()
            if self._device is not None and self._device.turn_began_s is not None:
                began = self._device.turn_began_s
            self._host_s = self.ended_s - began
            self._done.set()


def call_back(operation: str, callback: Callable[[], None]) -> None:
    """Call a function that was given to Work.when_done()."""
    try:
        callback()
    except Exception:  # the thread must go on
        _log.exception("gradwire: a function that was called after %s has failed", operation)


#: The handle of every operation that was done when its verb returned.
DONE = Work.done()
