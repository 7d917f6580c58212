"""The handle of an operation in progress."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from gradwire.collectives.errors import CollectiveError, CollectiveTimeout

if TYPE_CHECKING:
    from gradwire.collectives.engine.queue import WorkQueue

_log = logging.getLogger("gradwire")


class Work:
    """Handle of one operation, which verbs return. The operation is done, unless `async_op=True` was given.

    counted: whether this is one of the operations that all ranks number and call in the same order; False for a message.
    timeout_s: seconds for which functions that were given to when_done() may delay the operation. is_of_cuda: whether the
    operation may concern CUDA tensors. Attributes of an operation that is done: seconds, how long it ran, including waits for
    other ranks; ended_s, the end by time.perf_counter()."""

    def __init__(
        self, rank: int, operation: str, run: Callable[[], None], *, counted: bool = True, timeout_s: float = math.inf
    ) -> None:
        self.rank, self.operation = rank, operation
        self.counted = counted
        self.timeout_s = timeout_s
        self.seconds = self.ended_s = 0.0
        self.queue: WorkQueue | None = None
        self.queued_s = math.inf  # time.monotonic() of WorkQueue.submit()
        self._run: Callable[[], None] | None = run
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._issued = _cuda_event() if torch.cuda.is_initialized() else None
        self.is_of_cuda = self._issued is not None
        self._finished: torch.cuda.Event | None = None

    def wait(self, timeout: float | timedelta | None = None) -> None:
        """Block until the operation is done; other Python threads run meanwhile. If the operation is the next one in the queue,
        the calling thread may run it: docs/decisions/0022-a-waiting-thread-runs-the-operation.md lists the conditions.

        timeout: seconds, or a timedelta; None waits until the operation ends, at its own deadline at the latest.
        Raises the operation's error; CollectiveTimeout when `timeout` passes first (the operation continues); CollectiveError
        where the wait could never end: see WorkQueue.check_may_wait().
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if not self.is_completed():
            if self.queue is not None:
                if seconds is None:
                    self.queue.check_may_wait(self.rank, self.operation)
                self.queue.hasten(self, may_run=seconds is None)
            if not self._done.wait(seconds):
                assert seconds is not None
                raise CollectiveTimeout(seconds, (), rank=self.rank, operation=self.operation)
        if self._error is not None:
            raise self._error
        if self._finished is not None:
            torch.cuda.current_stream().wait_event(self._finished)

    def is_completed(self) -> bool:
        """Return whether wait() would return or raise without waiting."""
        return self._done.is_set()

    @classmethod
    def done(cls) -> Work:
        """Return the handle of an operation that is done."""
        work = cls(0, "an operation", lambda: None)
        work.run()
        return work

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call a function when the operation is done: at once if it is done already, else on a thread of the queue that only
        calls such functions. Operations that were submitted after this call begin when the function has returned; those that
        the function itself submits run at once, on its thread, before they are returned."""
        if self.queue is None or not self.queue.call_after(self, callback):
            call_back(self.operation, callback)

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
        """Run the operation in the calling thread and complete the handle.

        CUDA work runs on the device that was current when this handle was made, on the calling thread's current stream. The
        stream first waits for all work that was queued on the stream that was current when the handle was made.
        """
        began = time.perf_counter()
        run, self._run = self._run, None  # it refers to tensors
        assert run is not None
        try:
            if self._issued is None:
                run()
            else:
                with torch.cuda.device(self._issued.device):
                    torch.cuda.current_stream().wait_event(self._issued)
                    run()
                    self._finished = _cuda_event()
        except BaseException as error:  # wait() raises it, in the thread that calls wait()
            self._error = error
        finally:
            del run
            self.ended_s = time.perf_counter()
            self.seconds = self.ended_s - began
            self._done.set()


def call_back(operation: str, callback: Callable[[], None]) -> None:
    """Call a function that was given to Work.when_done()."""
    try:
        callback()
    except Exception:  # the thread must go on
        _log.exception("gradwire: a function that was called after %s has failed", operation)


def _cuda_event() -> torch.cuda.Event:
    """Return an event after all work queued on the current stream so far."""
    event: torch.cuda.Event = torch.cuda.current_stream().record_event()
    return event


#: The handle of every operation that was done when its verb returned.
DONE = Work.done()
