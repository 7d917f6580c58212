"""Record operations and their parts in a lane of a timeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradwire.collectives.diagnostics.timeline import Lane, now_ns
from gradwire.collectives.engine.operations import Turn


def recorded(lane: Lane, call: str, body: Callable[[Turn], None]) -> Callable[[Turn], None]:
    """Return a function that runs `body`, and records its span and how long it was queued."""
    issued_ns = now_ns()

    def run(turn: Turn) -> None:
        begin_ns = now_ns()
        try:
            body(turn)
        finally:
            queued_us = (begin_ns - issued_ns) / 1e3
            lane.span(call.partition("(")[0], begin_ns, call=call, queued_us=queued_us, **lane.take_notes())

    return run


def not_now(*arguments: Any) -> bool:
    """Return False in place of Operations.run_now, which would run an operation without recording it."""
    return False
