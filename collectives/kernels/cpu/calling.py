"""Calls of the codecs' kernels, with the addresses of tensors."""

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
    """Return the addresses of tensors; 0 for None."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def encoder(function: Callable[..., Any]) -> Callable[..., None]:
    """Return <codec>_encode, with the arguments of the reference, for a kernel (values, residual, wire, numel, <parameters>)."""

    def encode(values: torch.Tensor, residual: torch.Tensor | None, wire: torch.Tensor, *parameters: Any) -> None:
        kernel_of(function)(*addresses(values, residual, wire), values.numel(), *parameters)

    return encode


def decoder(function: Callable[..., Any]) -> Callable[..., None]:
    """Return <codec>_decode, with the arguments of the reference, for a kernel (wire, out, numel, <parameters>).

    It raises ValueError if the kernel counts indices on the wire that are outside of the result.
    """

    def decode(wire: torch.Tensor, out: torch.Tensor, *parameters: Any) -> None:
        if kernel_of(function)(*addresses(wire, out), out.numel(), *parameters):
            raise ValueError(
                f"the wire holds indices outside of [0, {out.numel()}): it was encoded from another number of elements"
            )

    return decode
