"""Compiling with Numba for the CPU: once a machine, and kept on the disk; where that cannot be, once a process."""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from numba import njit

_log = logging.getLogger("gradwire")

#: What one process may take to compile; one that holds the lock for longer has been stopped.
_COMPILE_S = 60.0
_POLL_S = 0.01


def compiled(decorate: Callable[..., Any], *signature: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return what decorates a function with numba.njit or numba.cfunc, for a signature and with options, now.

    The result is loaded from the disk where it is there already, and put there where Numba finds a folder that it may write.
    """

    def finish(function: Callable[..., Any]) -> Any:
        if _keeps():
            try:
                with _one_at_a_time():
                    return decorate(*signature, cache=True, **options)(function)
            except OSError as error:  # a full disk
                _say(str(error.strerror))
        return decorate(*signature, **options)(function)

    return finish


@cache
def _keeps() -> bool:
    """Whether Numba finds a folder that it may write for the functions of this one."""
    try:
        njit(cache=True)(_nothing)  # looks for the folder, and compiles nothing yet
    except RuntimeError:
        _say("no folder for it can be written")
        return False
    return True


def _nothing() -> None:
    pass


@cache
def _say(reason: str) -> None:
    """Warn once that nothing is kept."""
    _log.warning(
        "gradwire: Numba's cache cannot be used (%s), so every process compiles for itself, which takes some seconds: "
        "set NUMBA_CACHE_DIR to a folder that can be written",
        reason,
    )


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Processes of one machine compile one after the other, so that all but the first find the result on the disk.

    Where there are no locks, or the first one takes too long, they compile at the same time, which costs time and nothing else.
    """
    deadline = time.monotonic() + _COMPILE_S
    with Path(__file__).open() as source:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(source, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_POLL_S)
            except OSError:  # a file system without locks
                break
        yield
