"""How the codecs call their kernels: with the addresses of tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from numba import float32, int64, njit

from gradwire.collectives.kernels.cpu.compiling import compiled


@cache
def kernel_of(function: Callable[..., Any]) -> Any:
    """Return a function compiled, or loaded from the disk: `scale` and `decay` are float32, all else is int64."""
    kinds = [float32 if name in ("scale", "decay") else int64 for name in inspect.signature(function).parameters]
    return compiled(njit, tuple(kinds), nogil=True, error_model="numpy")(function)


def addresses(*tensors: torch.Tensor | None) -> list[int]:
    """Return where tensors begin, 0 for one that is not there."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
