"""What is compiled. Each kind of processor has one file with the heavy imports, loaded when it is first needed."""

from __future__ import annotations

import sys
from functools import cache
from types import ModuleType
from typing import Any

import torch


@cache
def cpu_kernels() -> ModuleType | str:
    """The module collectives.kernels.cpu, its kernels compiled or loaded from the disk; or why there is none."""
    if sys.platform != "linux":
        return "it needs Linux"
    try:
        from collectives.kernels import cpu
    except ImportError as error:
        return f"{error}: pip install numba"
    return cpu


@cache
def cpu_arithmetic(dtype: torch.dtype) -> Any:
    """The C function of collectives.kernels.cpu that reduces a dtype, compiled or loaded from the disk."""
    kernels = cpu_kernels()
    assert not isinstance(kernels, str)
    return kernels.arithmetic(dtype)
