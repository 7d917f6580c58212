"""Waits of the host, and blocks of code in which a thread must not wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.simulated_gpu.clocks import Clock, Timeline, calls, is_inside, launched, report, where


@dataclass(frozen=True)
class _Block:
    """What asynchronous() was given. began: what was launched before."""

    threads: bool
    began: Clock | None
    but: tuple[str, ...]


class _Thread(threading.local):
    block: _Block | None = None


_thread = _Thread()

#: How often a thread asks for an event before it may be done, so that nothing is right only because the device was quick; and how
#: often without a loop.
_EARLY, _MOST = 2, 20


@contextmanager
def asynchronous(*, threads: bool = True, earlier: bool = True, but: tuple[str, ...] = ()) -> Iterator[None]:
    """Report waits and sleeps of the calling thread in the block. threads: also waits for other threads. earlier: also waits
    for work that was launched before the block. but: modules whose functions, and what they call, may wait."""
    before = _thread.block
    _thread.block = _Block(threads, None if earlier else launched(), but)
    try:
        yield
    finally:
        _thread.block = before


def waits(what: str, clock: Mapping[Timeline, int] | None = None, *, is_thread: bool = False) -> None:
    """Record that this thread waits here. clock: the work for which it waits. is_thread: whether it waits for another thread."""
    block = _thread.block
    if block is None or is_inside() or (is_thread and not block.threads) or calls(block.but):
        return
    if clock is None or block.began is None or any(block.began.get(each, 0) < at for each, at in clock.items()):
        report("wait", f"{what} waits at {where(5)} in {threading.current_thread().name}")


def queries(event: Any) -> bool:
    """Record that this thread asks for an event. Return whether it is too early for an answer."""
    event.asked_by[threading.get_ident()] += 1
    times: int = event.asked_by[threading.get_ident()]
    if times > _MOST:
        waits("a loop of query()", event.clock)
    return times <= _EARLY


def watch() -> None:
    """Record the waits for other threads, and sleeps."""
    sleep, wait = time.sleep, threading.Condition.wait

    def sleeping(seconds: Any) -> None:
        waits(f"sleep({seconds})")
        sleep(seconds)

    def waiting(self: threading.Condition, timeout: float | None = None) -> bool:
        waits("a thread", is_thread=True)
        return wait(self, timeout)

    time.sleep = sleeping
    threading.Condition.wait = waiting  # type: ignore[method-assign]
