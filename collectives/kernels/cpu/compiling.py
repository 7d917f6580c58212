"""Compiling with Numba for the CPU: once a machine, and kept on the disk; where that cannot be, once a process.

Numba takes what it kept for fresh as long as the file of the compiled function itself is unchanged, whatever that calls
in other files. Its files are named after the function's qualified name, so that is where digests of all sources of the kernels
and of the signature are put.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

from numba import njit

from gradwire.collectives.kernels.first_use import FIRST_USE

_log = logging.getLogger("gradwire")

#: What one process may take to compile; one that holds the lock for longer has been stopped.
COMPILE_S = 60.0
_POLL_S = 0.01

#: Which version of the kernels a kept file is of. Kernels call nothing outside of this package.
_SOURCES = sorted(Path(__file__).parents[1].rglob("*.py"))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


_DIGEST = _digest(b"".join(source.read_bytes() for source in _SOURCES))


def compiled(decorate: Callable[..., Any], *signature: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return what decorates a function with numba.njit or numba.cfunc, for a signature and with options, now.

    The result is loaded from the disk where it is there already, and put there where Numba finds a folder that it may
    write. Processes wait for each other only where there is something to compile: one that is stopped while it loads
    a kernel keeps nobody waiting.
    """

    def finish(function: Callable[..., Any]) -> Any:
        name = function.__name__
        function.__qualname__ = f"{name}.{_DIGEST}.{_digest(repr(signature).encode())}"
        folder = kernel_folder()
        kept = folder is not None and any(folder.glob(f"*{function.__qualname__}*.nbc"))
        with nullcontext() if kept else FIRST_USE.compiling(name, kept=folder is not None):
            if folder is not None:
                try:
                    with nullcontext() if kept else _one_at_a_time():
                        return decorate(*signature, cache=True, **options)(function)
                except OSError as error:  # a full disk
                    _say(str(error.strerror))
            return decorate(*signature, **options)(function)

    return finish


@cache
def kernel_folder() -> Path | None:
    """Return the folder for kernels that Numba may write, None where there is none, and delete what other sources left
    there."""
    try:
        folder = Path(str(njit(cache=True)(_nothing).stats.cache_path))  # compiles nothing yet
    except RuntimeError:
        _say("it has no writable folder")
        return None
    for kept in folder.glob("*.nb[ci]"):
        if _DIGEST not in kept.name:
            with suppress(OSError):
                kept.unlink()
    return folder


def _nothing() -> None:
    pass


@cache
def _say(reason: str) -> None:
    """Warn that nothing is kept, once for each reason."""
    _log.warning(
        "gradwire: Numba's cache cannot be used (%s), so every process compiles for itself, which takes some seconds: "
        "set NUMBA_CACHE_DIR to a writable folder",
        reason,
    )


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Wait for the other processes of the machine: all but the first find on the disk what that has compiled.

    Where there are no locks, or the first one takes too long, they compile at the same time, which costs nothing but
    time.
    """
    deadline = time.monotonic() + COMPILE_S
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
