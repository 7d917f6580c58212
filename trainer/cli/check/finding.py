"""The result of one test, and a deadline for calls that may never return."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError  # in Python 3.10 not the built-in one
from dataclasses import dataclass
from typing import Literal, TypeVar

from gradwire.collectives.daemon import DaemonThread

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Finding:
    """Holds the result of one test, as text, and the remedy for a problem.

    state: "note" if training works, but slower or not in every situation.
    """

    state: Literal["ok", "note", "failed"]
    what: str
    do: str | None = None

    def __str__(self) -> str:
        return f"{self.state:<7} {self.what}" + (f"\n        -> {self.do}" if self.do else "")


def bounded(call: Callable[[], _Result], timeout_s: float) -> _Result:
    """Return the result of a call that may not return, such as a look-up of a name. Raises TimeoutError after timeout_s
    seconds."""
    thread = DaemonThread("gradwire.trainer.cli.check")
    future = thread.submit(call)
    thread.close()
    try:
        return future.result(timeout_s)
    except FutureTimeoutError:
        raise TimeoutError(f"no answer within {timeout_s:g} s") from None
