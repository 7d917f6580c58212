"""The codecs int8 and int4: the integers nearest to, or stochastically around, multiples of each block's scale."""

from __future__ import annotations

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
from gradwire.collectives.kernels.reference.digits import pack, signed, unpack
from gradwire.collectives.kernels.reference.randomness import stochastic, uniform

# int8: scale = maximum / 127, code = c * (127 / maximum) as an integer.


def _integers(blocks: Tensor, inverse: Tensor, finite: Tensor, limit: int, stochastically: bool, seed: int) -> Tensor:
    """Return the codes as they are multiplied by the scales, (blocks, block) float32."""
    numbers = torch.where(finite, blocks * inverse, torch.zeros_like(blocks))
    if stochastically:
        numbers = stochastic(numbers, uniform(blocks.numel(), seed, blocks.device).view_as(blocks))
    return numbers.round().clamp(-limit, limit).to(torch.int8).to(torch.float32)  # an integer zero has no sign


def int8_encode(values: Tensor, residual: Tensor | None, wire: Tensor, block: int, stochastic: bool, seed: int) -> None:
    blocks = in_blocks(corrected(values, residual), block)
    maximum, finite = largest_magnitudes(blocks)
    codes = _integers(blocks, quotient(127.0, maximum), finite, 127, stochastic, seed)
    scales = with_nan(divided(maximum, 127.0), finite)
    write(wire, codes.to(torch.int8).view(torch.uint8).view(-1)[: values.numel()], scales)
    keep_dense_loss(residual, blocks, codes, scales)


def int8_decode(wire: Tensor, out: Tensor, block: int, add: bool, scale: float) -> None:
    codes = in_blocks(wire[: out.numel()].view(torch.int8).to(torch.float32), block)
    put(out, scaled(codes, scales_of(wire, out.numel(), len(codes)), out.numel()), add, scale)


# int4: scale = maximum / 7, rounded up to bfloat16; code = c * (1 / scale) as an integer; two codes a byte.


def _bfloat16_above(numbers: Tensor) -> Tensor:
    """Return the bfloat16 that is not below a positive float32, as a float32."""
    return ((numbers.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)


def int4_encode(values: Tensor, residual: Tensor | None, wire: Tensor, block: int, stochastic: bool, seed: int) -> None:
    blocks = in_blocks(corrected(values, residual), block)
    maximum, finite = largest_magnitudes(blocks)
    scales = _bfloat16_above(divided(maximum, 7.0))
    codes = _integers(blocks, quotient(1.0, scales), finite, 7, stochastic, seed)
    write(wire, pack(codes.view(-1)[: values.numel()], 4), with_nan(scales.to(torch.bfloat16), finite))
    keep_dense_loss(residual, blocks, codes, with_nan(scales, finite))


def int4_decode(wire: Tensor, out: Tensor, block: int, add: bool, scale: float) -> None:
    code_bytes = (out.numel() + 1) // 2
    codes = in_blocks(signed(unpack(wire[:code_bytes], 4, out.numel()), 4), block)
    put(out, scaled(codes, scales_of(wire, code_bytes, len(codes), torch.bfloat16), out.numel()), add, scale)
