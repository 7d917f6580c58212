"""Compiles with Numba for the CPU: once per machine, kept on the disk; if that is not possible, once per process.

Numba uses a kept result as long as the file of the compiled function itself is unchanged, even if functions that it calls in
other files have changed. Numba names its files after the function's qualified name, so digests of all sources of the kernels
and of the signature are added to that name.
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

#: How long one process may compile; one that holds the lock for longer counts as stopped.
COMPILE_S = 60.0
_POLL_S = 0.01

#: The version of the kernels: a digest of their sources. Kernels call nothing outside of this package.
_SOURCES = sorted(Path(__file__).parents[1].rglob("*.py"))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


_DIGEST = _digest(b"".join(source.read_bytes() for source in _SOURCES))


def compiled(decorate: Callable[..., Any], *signature: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that compiles a function at once by numba.njit or numba.cfunc, for a signature and with options.

    The result is loaded from the disk if it is there, and saved there if Numba finds a writable folder. Processes wait for each
    other only to compile: one that is stopped while it loads a kernel delays no other.
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
                    _warn(str(error.strerror))
            return decorate(*signature, **options)(function)

    return finish


@cache
def kernel_folder() -> Path | None:
    """Return the writable folder of Numba for kernels, or None, and delete the kernels of other sources in it."""
    try:
        folder = Path(str(njit(cache=True)(_nothing).stats.cache_path))  # compiles nothing yet
    except RuntimeError:
        _warn("it has no writable folder")
        return None
    for kept in folder.glob("*.nb[ci]"):
        if _DIGEST not in kept.name:
            with suppress(OSError):
                kept.unlink()
    return folder


def _nothing() -> None:
    pass


@cache
def _warn(reason: str) -> None:
    """Warn that nothing is kept, once for each reason."""
    _log.warning(
        "gradwire: Numba's cache cannot be used (%s), so every process compiles for itself, which takes some seconds: "
        "set NUMBA_CACHE_DIR to a writable folder",
        reason,
    )


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Wait for the other processes of the machine, so that all but the first find the compiled kernels on the disk.

    If there are no locks, or the first one takes too long, they compile at the same time, which only costs time.
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
