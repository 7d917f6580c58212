"""The handle of an operation in progress, and the queue that runs operations in the order they were issued."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta

import torch

from gradwire.collectives.errors import CollectiveError, CollectiveTimeout
from gradwire.collectives.scheduling import wake_soon

_log = logging.getLogger("gradwire")


class Work:
    """Handle of one asynchronous operation, which verbs return with `async_op=True`.

    counted: whether this is one of the operations that all ranks number and call in the same order; False for a message.
    Attributes of an operation that is done: seconds, how long it ran, including waits for other ranks; ended_s, the end by
    time.perf_counter()."""

    def __init__(self, rank: int, operation: str, run: Callable[[], None], *, counted: bool = True) -> None:
        self.counted = counted
        self.seconds = self.ended_s = 0.0
        self.queue: WorkQueue | None = None
        self.queued_s = math.inf  # time.monotonic() of WorkQueue.submit()
        self._rank = rank
        self._operation = operation
        self._run: Callable[[], None] | None = run
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._issued = _cuda_event()
        self._finished: torch.cuda.Event | None = None

    def wait(self, timeout: float | timedelta | None = None) -> None:
        """Block until the operation is done; other Python threads run meanwhile. If the operation is the next one in the queue,
        the calling thread may run it: docs/decisions/0022-a-waiting-thread-runs-the-operation.md lists the conditions.

        timeout: seconds, or a timedelta; None waits until the operation ends, at its own deadline at the latest.
        Raises the operation's error; CollectiveTimeout when `timeout` passes first (the operation continues).
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if self.queue is not None:
            self.queue.hasten(self, may_run=seconds is None)
        if not self._done.wait(seconds):
            assert seconds is not None
            raise CollectiveTimeout(seconds, (), rank=self._rank, operation=self._operation)
        if self._error is not None:
            raise self._error
        if self._finished is not None:
            torch.cuda.current_stream().wait_event(self._finished)

    def is_completed(self) -> bool:
        """Return whether wait() would return or raise without waiting."""
        return self._done.is_set()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call a function when the operation is done, in the thread that completes it; at once if it is done already."""
        self._callbacks.append(callback)
        if self._done.is_set():
            self._call_back()
        elif self.queue is not None:
            self.queue.wake()

    @property
    def is_of_cuda(self) -> bool:
        """Return whether the operation may concern CUDA tensors."""
        return self._issued is not None

    @property
    def has_begun(self) -> bool:
        """Return whether run() was called."""
        return self._run is None

    @property
    def has_callbacks(self) -> bool:
        """Return whether functions wait to be called when the operation is done."""
        return bool(self._callbacks)

    def end(self) -> None:
        """Complete the handle if an interrupt ended run() before run() completed it."""
        if self.has_begun:
            if self._error is None and not self._done.is_set():
                self._error = CollectiveError("interrupted", rank=self._rank, operation=self._operation)
            self._done.set()
            self._call_back()

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
            self._call_back()

    def _call_back(self) -> None:
        while True:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:  # another thread may run this loop, too: each pops until none is left
                return
            try:
                callback()
            except Exception:  # the thread that runs operations must go on
                _log.exception("gradwire: a function that was called after %s has failed", self._operation)


def _cuda_event() -> torch.cuda.Event | None:
    """Return an event after all work queued on the current stream so far; None in a process that has not used CUDA."""
    return torch.cuda.current_stream().record_event() if torch.cuda.is_initialized() else None


#: After so many works in a row that were awaited at once, that is, within so many seconds of submit(), a new work does not wake
#: up the queue's thread, since the wake-up takes longer than a small message. Instead, the thread looks for works by itself in
#: intervals, so a work that nobody awaits begins at most so many seconds late. This ends with the first work that the thread
#: finds, and after so many looks without any work.
_MANY, _AT_ONCE_S = 8, 0.0005
_LOOK_S, _MOST_LOOKS = 0.005, 20


class WorkQueue:
    """Runs works one at a time in the order submitted: on its own thread, or in the caller's when nothing is queued.

    last_begun: returns the number of the last turn in which an operation began, or None once it is not needed. If it is given,
    the main thread runs a work for which it waits, under the conditions of _help(). Attributes: number, the number of the last
    counted turn, starting at 0; sealed, whether the queue refuses new works.
    """

    def __init__(self, name: str, last_begun: Callable[[], int | None] | None = None) -> None:
        self._name = name
        self._last_begun = last_begun
        self._at_once = 0  # how many works in a row were awaited at once
        self._looks = 0  # of the thread since then
        self.number = -1
        self._queue: deque[Work] = deque()
        # Reentrant, since finalizers may run anywhere. enter() takes a turn without this lock, since two uses of it cost a
        # third of a microsecond: dict.setdefault() gives the turn to one of several threads that call it at once.
        self._changed = threading.Condition(threading.RLock())
        # "taken" maps to the turn that enter() or _help() took, or to the queue itself while its thread runs a work.
        self._turn: dict[str, object] = {}
        self.sealed = False
        self._promised = 0  # turns that seal() has counted
        self._thread: threading.Thread | None = None

    def submit(self, work: Work) -> None:
        """Run `work` on the queue's thread, after all earlier works. Raises CollectiveError once the queue is sealed."""
        with self._changed:
            if self.sealed:
                raise CollectiveError("the Communicator is closed", rank=work._rank, operation=work._operation)
            if self._thread is None:
                thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                thread.start()  # raises RuntimeError if the system allows no more threads; nothing is queued then
                self._thread = thread
            work.queue, work.queued_s = self, time.monotonic()
            self._queue.append(work)
            if self._at_once < _MANY:
                self._changed.notify_all()

    def wake(self) -> None:
        """Let the thread run the queued works now, if it is their turn."""
        if self.sealed:  # close() does this; and a forked child must not use the lock
            return
        with self._changed:
            self._changed.notify_all()

    def hasten(self, work: Work, *, may_run: bool) -> None:
        """Let a work for which the calling thread is about to wait begin as soon as possible: run it here, if the calling
        thread is the main one and under the conditions of _help(), or wake up the queue's thread. may_run: whether the calling
        thread waits without a timeout."""
        is_main = threading.get_ident() == threading.main_thread().ident
        if may_run and is_main and self._last_begun is not None and not (work.is_completed() or self.sealed):
            self._help(work, self._last_begun)
        if not work.is_completed():
            self.wake()

    def _help(self, work: Work, last_begun: Callable[[], int | None]) -> None:
        """Run a work in the main thread, which waits for it, if it is next, cannot concern CUDA tensors, and has no callbacks,
        which could need a lock that the caller holds. hasten() has checked the other conditions. A switch to the queue's thread
        takes longer than a small message."""
        turn = object()
        try:
            with self._changed:
                if not self._queue or self._queue[0] is not work or work.is_of_cuda or work.has_callbacks:
                    return
                if self._turn.setdefault("taken", turn) is not turn:
                    return
                is_at_once = time.monotonic() - work.queued_s < _AT_ONCE_S
                self._at_once, self._looks = (self._at_once + 1, 0) if is_at_once else (0, 0)
                if self._at_once == _MANY:
                    self._changed.notify_all()  # the thread begins to look for works
                self._queue.popleft()
                self.number += work.counted
            # Tensors that the work keeps must be usable in any mode.
            with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
                work.run()
        finally:
            if self._turn.get("taken") is turn:
                has_begun = work.has_begun
                with self._changed:
                    if not has_begun and (not self._queue or self._queue[0] is not work):
                        self._queue.appendleft(work)  # an interrupt came first
                    number = last_begun()
                    self.leave(turn, self.number if number is None else number)
                if has_begun:
                    work.end()

    def enter(self, turn: object, *, counted: bool = True) -> bool:
        """Take the turn for the calling thread, which must call leave() afterwards. Return False if anything runs or is queued,
        or the queue is sealed.

        An operation in the calling thread needs no thread switch, which takes longer than a small message. turn: a new object.
        It lets leave() determine whether enter() took the turn, even if an interrupt ended enter() early.
        """
        if self._queue or self._turn.setdefault("taken", turn) is not turn:
            return False
        self.number += counted
        if self.sealed:
            with self._changed:  # if seal() has counted this turn, the other ranks wait for it
                is_promised = counted and self.number < self._promised
            if not is_promised:
                self.leave(turn, self.number - counted)
                return False
        return True

    def leave(self, turn: object, number: int) -> None:
        """End a turn that enter() or _help() took; do nothing if it took none. number: that of the last turn in which an
        operation began. The next turn gets the number after it."""
        if self._turn.get("taken") is turn:
            self.number = number
            del self._turn["taken"]
            if self._queue or self.sealed:
                with self._changed:
                    self._changed.notify_all()

    @property
    def issued(self) -> int:
        """The number of counted turns that have begun or are queued."""
        with self._changed:
            return self.number + 1 + sum(work.counted for work in self._queue)

    def seal(self) -> int | None:
        """Refuse new works. Return the number of counted turns that have begun or are queued; None if the queue was sealed
        before."""
        with self._changed:
            if self.sealed:
                return None
            self.sealed = True
            self._promised = self.issued
            return self._promised

    def busy(self) -> bool:
        """Return True while anything runs or waits to run."""
        return bool(self._queue or self._turn)  # in this order: the thread takes the turn before it takes a work

    def close(self, timeout_s: float) -> bool:
        """Refuse new works, and end the thread once it has run the queued ones. Return False if some have not run after
        timeout_s."""
        with self._changed:
            self.sealed = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self.busy(), timeout_s)

    def _serve(self) -> None:
        wake_soon()
        while (work := self._next()) is not None:
            work.run()
            del work  # it keeps tensors and their memory alive
            with self._changed:
                del self._turn["taken"]
                self._changed.notify_all()

    def _next(self) -> Work | None:
        """Wait for the next work's turn, and return that work; None once the queue is closed and empty."""
        with self._changed:
            while not self._queue or self._turn.setdefault("taken", self) is not self:
                if self.sealed and not self.busy():
                    return None
                if not self._changed.wait(_LOOK_S if self._at_once >= _MANY else None):
                    self._looks += 1
                    if self._looks == _MOST_LOOKS:
                        self._at_once = 0
            self._at_once = 0
            work = self._queue.popleft()
            self.number += work.counted
            return work
