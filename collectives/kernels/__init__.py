"""What is compiled. Each kind of processor has one file with the heavy imports, loaded when it is first needed."""

from __future__ import annotations

import fcntl
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

_SOURCE = Path(__file__).with_name("cpu.py")


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Processes of one machine compile one after the other, so that all but the first find the result on the disk."""
    with _SOURCE.open() as source:
        fcntl.flock(source, fcntl.LOCK_EX)
        yield


def cpu_kernels() -> ModuleType | str:
    """The module collectives.kernels.cpu, its kernels compiled or loaded from the disk; or why there is none."""
    try:
        importlib.import_module("numba")  # takes a while, and needs no lock

        with one_at_a_time():
            from collectives.kernels import cpu
    except ImportError as error:
        return f"{error}: pip install numba"
    return cpu
