"""The codecs fp16 and bf16: a number of 16 bits for each of 32.

A number that the format cannot hold becomes Inf; NaN has one code (0x7E00, 0x7FC0).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.collectives.kernels.reference.blocks import corrected, keep_loss, put, write


def _cast_encode(values: Tensor, residual: Tensor | None, wire: Tensor, dtype: torch.dtype) -> None:
    c = corrected(values, residual)
    codes = torch.where(c.isnan(), torch.full_like(c, float("nan"), dtype=dtype), c.to(dtype))
    write(wire, codes.view(torch.uint8), codes[:0])
    keep_loss(residual, c, codes.to(torch.float32))


def _cast_decode(wire: Tensor, out: Tensor, dtype: torch.dtype, add: bool, scale: float) -> None:
    put(out, wire.view(dtype)[: out.numel()].to(torch.float32), add, scale)


def fp16_encode(values: Tensor, residual: Tensor | None, wire: Tensor, seed: int) -> None:
    _cast_encode(values, residual, wire, torch.float16)


def fp16_decode(wire: Tensor, out: Tensor, add: bool, scale: float) -> None:
    _cast_decode(wire, out, torch.float16, add, scale)


def bf16_encode(values: Tensor, residual: Tensor | None, wire: Tensor, seed: int) -> None:
    _cast_encode(values, residual, wire, torch.bfloat16)


def bf16_decode(wire: Tensor, out: Tensor, add: bool, scale: float) -> None:
    _cast_decode(wire, out, torch.bfloat16, add, scale)
