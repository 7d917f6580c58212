"""Waits of the host, and blocks of code in which a thread must not wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.simulated_gpu.clocks import is_inside, report, where


class _Thread(threading.local):
    forbidden: frozenset[str] = frozenset()


_thread = _Thread()

#: A wait for the device: synchronize(), a copy, a number that is read, or a loop of query().
DEVICE = "device"
#: A wait for another thread, or a sleep.
THREAD = "thread"

_MOST_QUERIES = 2  # of one event that is not done, without a loop


@contextmanager
def asynchronous(*, threads: bool = True) -> Iterator[None]:
    """Report every wait of the calling thread in the block. threads: also those for another thread."""
    before = _thread.forbidden
    _thread.forbidden = frozenset({DEVICE, THREAD} if threads else {DEVICE})
    try:
        yield
    finally:
        _thread.forbidden = before


def waits(what: str, kind: str = DEVICE) -> None:
    """Record that this thread waits here."""
    if kind in _thread.forbidden and not is_inside():
        report("wait", f"{what} waits at {where()} in {threading.current_thread().name}")


def queries(event: Any) -> None:
    """Record that this thread has asked for an event which is not done."""
    event.asked_by[threading.get_ident()] += 1
    if event.asked_by[threading.get_ident()] > _MOST_QUERIES:
        waits("a loop of query()")


def watch() -> None:
    """Record the waits for other threads, and sleeps."""
    sleep, wait = time.sleep, threading.Condition.wait

    def sleeping(seconds: Any) -> None:
        waits(f"sleep({seconds})", THREAD)
        sleep(seconds)

    def waiting(self: threading.Condition, timeout: float | None = None) -> bool:
        waits("a thread", THREAD)
        return wait(self, timeout)

    time.sleep = sleeping
    threading.Condition.wait = waiting  # type: ignore[method-assign]
