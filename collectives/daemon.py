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


def _serve(calls: _Calls) -> None:
    while (each := calls.get()) is not None:
        call, future = each
        try:
            future.set_result(call())
        except BaseException as error:  # raised where the result is asked for
            future.set_exception(error)
        del each, call, future  # with what they hold on to
