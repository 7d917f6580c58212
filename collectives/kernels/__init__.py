"""What is compiled. Each kind of processor has one file with the heavy imports, loaded when it is first needed."""

from __future__ import annotations

import fcntl
import importlib
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_SOURCE = Path(__file__).with_name("cpu.py")

#: What one process may take to compile; one that holds the lock for longer has been stopped.
_COMPILE_S = 60.0
_POLL_S = 0.01


@cache
def cpu_kernels() -> ModuleType | str:
    """The module collectives.kernels.cpu, its kernels compiled or loaded from the disk; or why there is none."""
    if sys.platform != "linux":
        return "it needs Linux"
    try:
        importlib.import_module("numba")  # takes a while, and needs no lock

        with one_at_a_time():
            from collectives.kernels import cpu
    except ImportError as error:
        return f"{error}: pip install numba"
    except RuntimeError as error:  # Numba's, where it finds no place for what it compiles
        return f"{error}: set NUMBA_CACHE_DIR to a folder that can be written"
    return cpu


@cache
def cpu_arithmetic(dtype: torch.dtype) -> Any:
    """The C function of collectives.kernels.cpu that reduces a dtype, compiled or loaded from the disk."""
    kernels = cpu_kernels()
    assert not isinstance(kernels, str)
    with one_at_a_time():
        return kernels.arithmetic(dtype)


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Processes of one machine compile one after the other, so that all but the first find the result on the disk.

    Where there are no locks, or the first one takes too long, they compile at the same time, which costs time and nothing else.
    """
    deadline = time.monotonic() + _COMPILE_S
    with _SOURCE.open() as source:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(source, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_POLL_S)
            except OSError:  # a file system without locks
                break
        yield
