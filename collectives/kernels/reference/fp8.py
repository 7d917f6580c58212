"""The codec fp8: a float of 8 bits for each number, and a scale for each block."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.collectives.kernels.reference.blocks import (
    corrected,
    divided,
    in_blocks,
    keep_dense_loss,
    largest_magnitudes,
    put,
    quotient,
    scaled,
    scales_of,
    with_nan,
    write,
)


class Float8(NamedTuple):
    dtype: torch.dtype
    largest: float


FLOAT8 = {"e4m3": Float8(torch.float8_e4m3fn, 448.0), "e5m2": Float8(torch.float8_e5m2, 57344.0)}


# fp8: scale = maximum / largest number of the format; code = the format's number nearest to c * (largest / maximum).


def fp8_encode(values: Tensor, residual: Tensor | None, wire: Tensor, format: str, block: int, seed: int) -> None:
    dtype, largest = FLOAT8[format]
    blocks = in_blocks(corrected(values, residual), block)
    maximum, finite = largest_magnitudes(blocks)
    codes = torch.where(finite, blocks * quotient(largest, maximum), torch.zeros_like(blocks))
    codes = codes.clamp(-largest, largest).to(dtype).view(torch.uint8)
    write(wire, codes.view(-1)[: values.numel()], with_nan(divided(maximum, largest), finite))
    keep_dense_loss(residual, blocks, codes.view(dtype).to(torch.float32), with_nan(divided(maximum, largest), finite))


def fp8_decode(wire: Tensor, out: Tensor, format: str, block: int, add: bool, scale: float) -> None:
    codes = in_blocks(wire[: out.numel()].view(FLOAT8[format].dtype).to(torch.float32), block)
    put(out, scaled(codes, scales_of(wire, out.numel(), len(codes)), out.numel()), add, scale)
