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
    """Runs calls one after the other on a separate thread. The end of the process does not wait for it, as it would for the
    threads of a ThreadPoolExecutor.

    or_callers: whether, in a process that cannot start a thread, each call runs on the thread of its caller, which waits until
    it returns: such a process must still reach the other ranks, to report that it cannot go on. Without or_callers, it raises
    RuntimeError. close: lets the thread end after the last call, and does not wait for it. Deleting the object does so too.
    """

    def __init__(self, name: str, *, or_callers: bool = False) -> None:
        self._name = name
        calls: _Calls = SimpleQueue()
        self._calls: _Calls | None = calls
        self.close = weakref.finalize(self, calls.put, None)
        try:
            threading.Thread(target=_serve, args=(calls,), name=name, daemon=True).start()
        except RuntimeError:
            if not or_callers:
                raise
            self._calls = None

    def submit(self, call: Callable[[], _Result]) -> Future[_Result]:
        """Run a call after those submitted before it; return the Future of its result. Raises RuntimeError after close()."""
        if not self.close.alive:
            raise RuntimeError(f"{self._name} is closed")
        future: Future[_Result] = Future()
        if self._calls is None:
            _run(call, future)
        else:
            self._calls.put((call, future))
        return future


def _serve(calls: _Calls) -> None:
    while (each := calls.get()) is not None:
        call, future = each
        _run(call, future)
        del each, call, future  # they keep objects alive


def _run(call: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # result() raises it
        future.set_exception(error)
    finally:
        del call, future  # which the error's traceback would keep
