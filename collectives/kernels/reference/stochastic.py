"""The codecs that always round stochastically: qsgd, terngrad and natural."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.collectives.kernels.reference.blocks import (
    LARGEST,
    block_sums,
    corrected,
    divided,
    in_blocks,
    keep_dense_loss,
    keep_loss,
    largest_magnitudes,
    put,
    quotient,
    scaled,
    scales_of,
    with_nan,
    write,
)
from gradwire.collectives.kernels.reference.digits import pack, signed, unpack
from gradwire.collectives.kernels.reference.randomness import random_bits, stochastic, uniform

#: natural: code 1 stands for 2^NATURAL_LEAST, code 126 for 2^(NATURAL_LEAST + 125).
NATURAL_LEAST = -76
_NATURAL_NAN = 127


def _square_root(numbers: Tensor) -> Tensor:
    """Return square roots rounded to nearest, as IEEE has it; torch's own in float32 may be a unit off."""
    return numbers.to(torch.float64).sqrt().to(torch.float32)


# qsgd: scale = norm / levels; code = sign and |c| * (levels / norm) rounded stochastically; two codes a byte.


def qsgd_encode(values: Tensor, residual: Tensor | None, wire: Tensor, levels: int, block: int, seed: int) -> None:
    """Encode with the norm of each block.

    Squares are of c over the power of two at or below the block's maximum, so that they neither overflow nor vanish.
    """
    blocks = in_blocks(corrected(values, residual), block)
    maximum, finite = largest_magnitudes(blocks)
    power = torch.where(maximum > 0, (maximum.view(torch.int32) & 0x7F800000).view(torch.float32), maximum + 1)
    norm = torch.where(maximum > 0, _square_root(block_sums((blocks * (1 / power)).square())) * power, maximum)
    finite = finite & (norm < LARGEST)
    levels_up = torch.where(finite, blocks.abs() * quotient(float(levels), norm), torch.zeros_like(blocks))
    levels_up = stochastic(levels_up, uniform(blocks.numel(), seed, blocks.device).view_as(blocks)).clamp(max=levels)
    codes = torch.where(blocks.signbit(), 0 - levels_up, levels_up)
    scales = with_nan(divided(norm, levels), finite)
    write(wire, pack(codes.view(-1)[: values.numel()], 4), scales)
    keep_dense_loss(residual, blocks, codes, scales)


def qsgd_decode(wire: Tensor, out: Tensor, block: int, add: bool, scale: float) -> None:
    code_bytes = (out.numel() + 1) // 2
    codes = in_blocks(signed(unpack(wire[:code_bytes], 4, out.numel()), 4), block)
    put(out, scaled(codes, scales_of(wire, code_bytes, len(codes)), out.numel()), add, scale)


# terngrad: scale = maximum; code = sign with probability |c| / maximum, else 0; four codes a byte, two's complement.


def terngrad_encode(values: Tensor, residual: Tensor | None, wire: Tensor, block: int, seed: int) -> None:
    blocks = in_blocks(corrected(values, residual), block)
    maximum, finite = largest_magnitudes(blocks)
    kept = uniform(blocks.numel(), seed, blocks.device).view_as(blocks) < blocks.abs() * quotient(1.0, maximum)
    codes = torch.where(kept & finite, torch.where(blocks < 0, -1.0, 1.0), 0.0)
    scales = with_nan(maximum, finite)
    write(wire, pack(codes.view(-1)[: values.numel()], 2), scales)
    keep_dense_loss(residual, blocks, codes, scales)


def terngrad_decode(wire: Tensor, out: Tensor, block: int, add: bool, scale: float) -> None:
    code_bytes = (out.numel() + 3) // 4
    codes = in_blocks(signed(unpack(wire[:code_bytes], 2, out.numel()), 2), block)
    put(out, scaled(codes, scales_of(wire, code_bytes, len(codes)), out.numel()), add, scale)


# natural: one byte, bit 7 the sign, the rest an exponent (0: zero, 127: NaN and Inf). 23 random bits are added to the
# mantissa; a carry rounds the magnitude up to the next power of two.


def natural_encode(values: Tensor, residual: Tensor | None, wire: Tensor, seed: int) -> None:
    c = corrected(values, residual)
    magnitude = c.abs().view(torch.int32).to(torch.int64)
    exponent = ((magnitude + (random_bits(c.numel(), seed, c.device) >> 9)) >> 23) - 127
    codes = (exponent - NATURAL_LEAST + 1).clamp(0, _NATURAL_NAN - 1) + 128 * c.signbit()
    codes = torch.where(c.isfinite(), codes, _NATURAL_NAN).to(torch.uint8)
    write(wire, codes, codes[:0])
    keep_loss(residual, c, _powers(codes))


def natural_decode(wire: Tensor, out: Tensor, add: bool, scale: float) -> None:
    put(out, _powers(wire[: out.numel()]), add, scale)


def _powers(codes: Tensor) -> Tensor:
    exponent = codes.to(torch.int64) & 127
    magnitude = torch.exp2((exponent - 1 + NATURAL_LEAST).to(torch.float64)).to(torch.float32)
    magnitude = torch.where(exponent == 0, 0.0, torch.where(exponent == _NATURAL_NAN, float("nan"), magnitude))
    return torch.where(codes >= 128, -magnitude, magnitude)
