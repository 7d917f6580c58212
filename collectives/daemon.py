"""A thread for calls that may never return."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_Calls = SimpleQueue[tuple[Callable[[], Any], "Future[Any]"] | None]


class DaemonThread:
    """Runs calls one after the other on a thread of its own, for which the end of the process does not wait, as it would for that
    of a ThreadPoolExecutor.

    close: lets the thread end after the last call, and does not wait for it. What nobody uses any more is closed, too.
    """

    def __init__(self, name: str) -> None:
        calls: _Calls = SimpleQueue()
        self._calls = calls
        self.close = weakref.finalize(self, calls.put, None)
        threading.Thread(target=_serve, args=(calls,), name=name, daemon=True).start()

    def submit(self, call: Callable[[], _Result]) -> Future[_Result]:
        """Run a call after those submitted before it; return what will hold its result or error."""
        future: Future[_Result] = Future()
        self._calls.put((call, future))
        return future


class CallersThread:
    """Runs each call when it is submitted, on the thread of the caller, which waits until it returns."""

    def submit(self, call: Callable[[], _Result]) -> Future[_Result]:
        """Run a call; return what holds its result or error."""
        future: Future[_Result] = Future()
        _run(call, future)
        return future

    def close(self) -> None:
        """Do nothing."""


def daemon_or_callers_thread(name: str) -> DaemonThread | CallersThread:
    """Return a new thread, or the caller's in a process that cannot start one: it still has to reach the other ranks, to report
    that it cannot go on."""
    try:
        return DaemonThread(name)
    except RuntimeError:
        return CallersThread()


def _serve(calls: _Calls) -> None:
    while (each := calls.get()) is not None:
        call, future = each
        _run(call, future)
        del each, call, future  # with what they hold on to


def _run(call: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # raised where the result is asked for
        future.set_exception(error)
    finally:
        del call, future  # which the error's traceback would keep
