"""The queue that runs operations in the order they were issued, and calls functions when operations are done."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from threading import get_ident

import torch

from gradwire.collectives.daemon_thread import DaemonThread
from gradwire.collectives.engine.work import Work, call_back
from gradwire.collectives.errors import CollectiveError, CollectiveTimeout
from gradwire.collectives.thread_priority import wake_soon

#: After so many works in a row that were awaited at once, that is, within so many seconds of submit(), a new work does not wake
#: up the queue's thread, since the wake-up takes longer than a small message. Instead, the thread looks for works by itself in
#: intervals, so a work that nobody awaits begins at most so many seconds late. This ends with the first work that the thread
#: finds, and after so many looks without any work.
_MANY, _AT_ONCE_S = 8, 0.0005
_LOOK_S, _MOST_LOOKS = 0.005, 20


class _Callback:
    """A function in the queue, to be called when the works before it are done."""

    counted = awaited = False

    def __init__(self, operation: str, function: Callable[[], None]) -> None:
        self.call = partial(call_back, operation, function)


class WorkQueue:
    """Runs works one at a time in the order submitted: on its own thread, or in the caller's when nothing is queued.

    Functions that are to be called after a work are queued, too. A second thread calls them, so that they may submit works and
    wait for them. Works that are queued behind a function begin when it has returned: otherwise the works that it submits would
    have other places in the order on each rank.

    last_begun: returns the number of the last turn in which an operation began, or None once it is not needed. If it is given,
    the main thread runs a work for which it waits, under the conditions of _help(). Attributes: number, the number of the last
    counted turn, starting at 0; sealed, whether the queue refuses new works; overdue, whether a function has delayed a work for
    longer than Work.timeout_s. From then on, no work waits for a function, and the works are expected to fail.
    """

    def __init__(self, name: str, last_begun: Callable[[], int | None] | None = None) -> None:
        self._name = name
        self._last_begun = last_begun
        self._at_once = 0  # how many works in a row were awaited at once
        self._looks = 0  # of the thread since then
        self.number = -1
        self._queue: deque[Work | _Callback] = deque()  # the function that is being called remains in it
        # Reentrant, since finalizers may run anywhere. enter() takes a turn without this lock, since two uses of it cost a
        # third of a microsecond: dict.setdefault() gives the turn to one of several threads that call it at once.
        self._changed = threading.Condition(threading.RLock())
        # "taken" maps to the turn that enter(), _help(), _run_here() or the queue's thread took: a tuple with the thread.
        self._turn: dict[str, tuple[int]] = {}
        self.sealed = self.overdue = False
        self._promised = 0  # turns that seal() has counted
        self._thread: threading.Thread | None = None
        self._caller: DaemonThread | None = None
        self._called: _Callback | None = None  # what the caller calls now, since when, and on which thread
        self._called_s = 0.0
        self._calling_thread = 0

    def submit(self, work: Work, *, awaited: bool = False) -> None:
        """Run `work` on the queue's thread, after all earlier works; in a function of when_done(), run it now. awaited: whether
        the caller waits for it next, so no thread wakes up for it. Raises CollectiveError once the queue is sealed."""
        with self._changed:
            if self.sealed:
                raise CollectiveError("the Communicator is closed", rank=work.rank, operation=work.operation)
            is_inner = self._called is not None and self.calls_here()
            if not is_inner and not awaited:
                self._start()  # raises RuntimeError if the system allows no more threads; nothing is queued then
            work.queue, work.queued_s, work.awaited = self, time.monotonic(), awaited
            if not is_inner:
                self._queue.append(work)
                if not awaited and self._at_once < _MANY:
                    self._changed.notify_all()
        if is_inner:
            self._run_here(work, is_queued=False)

    def _start(self) -> None:
        """Start the queue's thread, if it has not started. The caller holds the lock."""
        if self._thread is None:
            thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            thread.start()
            self._thread = thread

    def call_after(self, work: Work, function: Callable[[], None]) -> bool:
        """Call a function on the second thread after a work that was submitted. Return False, with nothing done, if the work
        is done."""
        with self._changed:
            if work.is_over:
                return False
            self._start()  # raises RuntimeError as submit() does, and so does the next line
            if self._caller is None:
                self._caller = self._new_caller()
            self._queue.append(_Callback(work.operation, function))
            self._changed.notify_all()
        return True

    def _new_caller(self, *, or_callers: bool = False) -> DaemonThread:
        caller = DaemonThread(f"{self._name} callbacks", or_callers=or_callers)
        caller.close.atexit = False  # functions are called until all operations have ended, when the process ends, too
        caller.submit(wake_soon)
        return caller

    def finish_calls(self, timeout_s: float) -> None:
        """Wait until all functions have been called, but not for longer than timeout_s, nor in one of them."""
        with self._changed:
            if not self.calls_here():
                self._changed.wait_for(lambda: not any(isinstance(each, _Callback) for each in self._queue), timeout_s)

    def check_may_wait(self, rank: int, operation: str) -> None:
        """Raise CollectiveError if the calling thread is inside this queue, where only a signal handler or a finalizer can call:
        it interrupted the thread that must run the awaited operation."""
        is_here = self._turn.get("taken", (0,))[0] == get_ident() or self._thread is threading.current_thread()
        with suppress(RuntimeError):  # as this thread does not hold the lock
            self._changed.notify(0)
            is_here = True
        if is_here:
            raise CollectiveError(
                "called in a signal handler or a finalizer that has interrupted another operation of this Communicator, which "
                "cannot go on before the handler returns: let the handler set a flag, and call this after the operation",
                rank=rank,
                operation=operation,
            )

    def wake(self, work: Work) -> None:
        """Let the thread run a queued work, also an awaited one, and those before it, when it is their turn."""
        if self.sealed:  # close() does this; and a forked child must not use the lock
            return
        with self._changed:
            work.awaited = False  # before the thread wakes up: if it finds a turn taken, leave() wakes it up again
            if not work.has_begun:
                self._start()
                self._changed.notify_all()

    def hasten(self, work: Work, *, may_run: bool) -> None:
        """Let a work for which the calling thread is about to wait begin as soon as possible: run it here, if the calling
        thread is the main one and under the conditions of _help(), or wake up the queue's thread. may_run: whether the calling
        thread waits without a timeout."""
        is_main = get_ident() == threading.main_thread().ident
        if may_run and is_main and self._last_begun is not None and not (work.is_over or self.sealed):
            self._help(work, self._last_begun)
        if self._called is not None and self.calls_here():
            while not work.is_over and (first := self._first_work()) is not None:
                self._run_here(first, is_queued=True)  # it would wait for the function that waits for it
        if not work.is_over:
            self.wake(work)

    def _help(self, work: Work, last_begun: Callable[[], int | None]) -> None:
        """Run a work in the main thread, which waits for it, if it is next. hasten() has checked the other conditions. A
        switch to the queue's thread takes longer than a small message."""
        turn = (get_ident(),)
        try:
            with self._changed:
                if not self._queue or self._queue[0] is not work:
                    return
                if self._turn.setdefault("taken", turn) is not turn:
                    return
                if not work.awaited:
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
                if has_begun and not work.is_over:
                    work.end()

    def _run_here(self, work: Work, *, is_queued: bool) -> None:
        """Run a work in the thread of a function that waits for it. Another thread may have a turn that it took before the
        function was called. is_queued: whether the work was in the queue, from which another thread may have taken it by now.
        Raises CollectiveTimeout if the other thread does not end its turn within Work.timeout_s."""
        turn, seconds = (get_ident(),), min(work.timeout_s, threading.TIMEOUT_MAX)
        with self._changed:
            if not self._changed.wait_for(lambda: self._turn.setdefault("taken", turn) is turn, seconds):
                raise CollectiveTimeout(seconds, (), rank=work.rank, operation=work.operation)
            is_mine = not is_queued or work in self._queue
            if is_queued and is_mine:
                self._queue.remove(work)
            self.number += work.counted and is_mine
        try:
            if is_mine:
                work.run()
        finally:
            self.leave(turn, self.number)

    def enter(self, turn: tuple[int], *, counted: bool = True) -> bool:
        """Take the turn for the calling thread, which must call leave() afterwards. Return False if anything runs or is queued,
        or the queue is sealed. In a function of when_done(), what is queued does not count.

        An operation in the calling thread needs no thread switch, which takes longer than a small message. turn: a new tuple
        with the number of the thread. It lets leave() determine whether enter() took the turn, even if an interrupt ended
        enter() early.
        """
        if self._queue and not self.calls_here():
            return False
        if self._turn.setdefault("taken", turn) is not turn:
            return False
        self.number += counted
        if self.sealed:
            with self._changed:  # if seal() has counted this turn, the other ranks wait for it
                is_promised = counted and self.number < self._promised and not self.calls_here()
            if not is_promised:
                self.leave(turn, self.number - counted)
                return False
        return True

    def leave(self, turn: tuple[int], number: int) -> None:
        """End a turn that enter(), _help() or _run_here() took; do nothing if it took none. number: that of the last turn in
        which an operation began. The next turn gets the number after it."""
        if self._turn.get("taken") is turn:
            self.number = number
            del self._turn["taken"]
            if self._queue or self.sealed:
                with self._changed:
                    if self.sealed or not all(each.awaited for each in self._queue):
                        self._changed.notify_all()

    @property
    def issued(self) -> int:
        """The number of counted turns that have begun or are queued."""
        with self._changed:
            return self.number + 1 + sum(each.counted for each in self._queue)

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
        """Refuse new works, and end the threads once they have run the queued ones. Return False if some have not run after
        timeout_s."""
        with self._changed:
            self.sealed = True
            if self._queue:
                # When the process ends, no thread starts: what nobody waits for does not run then.
                with suppress(RuntimeError):
                    self._start()
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self.busy(), timeout_s)

    def _serve(self) -> None:
        wake_soon()
        turn = (get_ident(),)
        while (work := self._next(turn)) is not None:
            work.run()
            del work  # it keeps tensors and their memory alive
            with self._changed:
                del self._turn["taken"]
                self._changed.notify_all()
        if self._caller is not None:
            self._caller.close()

    def _next(self, turn: tuple[int]) -> Work | None:
        """Wait for the next work's turn, take it, and return that work; None once the queue is closed and empty. Let the second
        thread call a function that comes first."""
        with self._changed:
            while True:
                if self._called is not None and self._left_s() == 0.0:
                    self.overdue = True
                    self._queue.popleft()
                    self._called, self._calling_thread = None, 0
                    self._caller = self._new_caller(or_callers=True)  # the other one may never end
                first = self._queue[0] if self._queue else None
                if isinstance(first, Work):
                    if self._turn.setdefault("taken", turn) is turn:
                        break
                elif first is not None:
                    self._begin_call(first)
                elif self.sealed and not self._turn:
                    return None
                looks = self._at_once >= _MANY
                wait_s = _LOOK_S if looks else None if self._called is None else self._left_s()
                if not self._changed.wait(wait_s) and looks:
                    self._looks += 1
                    if self._looks == _MOST_LOOKS:
                        self._at_once = 0
            self._at_once = 0
            self._queue.popleft()
            self.number += first.counted
            return first

    def _begin_call(self, callback: _Callback) -> None:
        """Let the second thread call the function that comes first, unless it is called already or a turn is taken."""
        if self._called is None and not self._turn:
            assert self._caller is not None
            self._called, self._called_s = callback, time.monotonic()
            self._caller.submit(partial(self._call, callback))

    def _first_work(self) -> Work | None:
        with self._changed:
            return next((each for each in self._queue if isinstance(each, Work)), None)

    def _left_s(self) -> float | None:
        """Return after how many seconds the first work will have waited for a function for too long; None if it does not
        wait for one."""
        if self._called is None or (work := self._first_work()) is None:
            return None
        waited_s = time.monotonic() - max(self._called_s, work.queued_s)
        return 0.0 if self.overdue else max(0.0, min(work.timeout_s - waited_s, threading.TIMEOUT_MAX))

    def _call(self, callback: _Callback) -> None:
        """Call a function, on the second thread."""
        with self._changed:
            if self._called is callback:  # else works no longer wait for it
                self._calling_thread = get_ident()
        callback.call()
        with self._changed:
            if self._called is callback:
                self._called = None
                self._queue.popleft()
                self._changed.notify_all()

    def calls_here(self) -> bool:
        """Return whether a function that the second thread calls has called this."""
        return self._called is not None and self._calling_thread == get_ident()
