"""The signals that ask a launcher to end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def signals_heard() -> Iterator[list[int]]:
    """Yield a list to which each SIGINT and SIGTERM is appended. The job ends after the first, and at once after the
    second."""
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
