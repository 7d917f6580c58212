"""The dense codecs in plain torch. Every other kernel must write and read the same bytes.

<codec>_encode(values, residual, wire, <parameters>, seed) and <codec>_decode(wire, out, <parameters>, add, scale), with
tensors as in gradwire.collectives.compression.codec; the parameters are the fields of the codec. All arithmetic is float32,
rounded to nearest even after every operation, with denormals and without fused operations. Values and results may be bfloat16
or float16: then a result is rounded once more.

A wire is [codes][scales, one per block], each section padded with zero bytes to a multiple of 16. A block with a NaN, an
Inf or a magnitude of 2^127 or more is *not finite*: its scale is NaN and its codes are 0, so that the whole block decodes
to NaN. A block (of a codec that divides by the scale) whose largest magnitude is below 2^-100 counts as zero: its scale
and codes are 0. These limits keep every scale, inverse and product finite, and scales out of the denormals.

The residual becomes the encoding error, and 0 where the decoded number is not finite, so that one overflow does not spoil all
later steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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
    lengths,
    put,
    quotient,
    random_bits,
    scaled,
    scales_of,
    stochastic,
    uniform,
    with_nan,
    write,
)

# Small integers ("digits") packed into a few bits each, and unpacked.


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return integers packed into `bits` bits each, the first in the lowest bits of a byte; the last byte is padded with
    zeros."""
    per_byte = 8 // bits
    digits = in_blocks(codes.to(torch.int64) & (2**bits - 1), per_byte)
    shifts = torch.arange(per_byte, device=codes.device, dtype=torch.int64) * bits
    return digits.bitwise_left_shift(shifts).sum(1).to(torch.uint8)


def unpack(packed: Tensor, bits: int, numel: int) -> Tensor:
    """Return the (numel,) integers packed by pack(), as unsigned numbers, int64."""
    shifts = torch.arange(8 // bits, device=packed.device, dtype=torch.int64) * bits
    codes: Tensor = packed.to(torch.int64).view(-1, 1).bitwise_right_shift(shifts) & (2**bits - 1)
    return codes.view(-1)[:numel]


def signed(codes: Tensor, bits: int) -> Tensor:
    """Return two's complement integers as float32."""
    return torch.where(codes >= 2 ** (bits - 1), codes - 2**bits, codes).to(torch.float32)


# fp16, bf16: a number that is too large for the format becomes Inf; every NaN has the same code (0x7E00, 0x7FC0).


def _cast_encode(dtype: torch.dtype) -> Callable[[Tensor, Tensor | None, Tensor, int], None]:
    def encode(values: Tensor, residual: Tensor | None, wire: Tensor, seed: int) -> None:
        c = corrected(values, residual)
        codes = torch.where(c.isnan(), torch.full_like(c, float("nan"), dtype=dtype), c.to(dtype))
        write(wire, codes.view(torch.uint8), codes[:0])
        keep_loss(residual, c, codes.to(torch.float32))

    return encode


def _cast_decode(dtype: torch.dtype) -> Callable[[Tensor, Tensor, bool, float], None]:
    def decode(wire: Tensor, out: Tensor, add: bool, scale: float) -> None:
        put(out, wire.view(dtype)[: out.numel()].to(torch.float32), add, scale)

    return decode


def _digits_decode(bits: int, of_scales: torch.dtype = torch.float32, block_at: int = 0) -> Callable[..., None]:
    """Return <codec>_decode for codes of so many bits. block_at: the place of `block` among the parameters."""

    def decode(wire: Tensor, out: Tensor, *parameters_and_how: Any) -> None:
        *parameters, add, scale = parameters_and_how
        block = parameters[block_at]
        code_bytes = (out.numel() * bits + 7) // 8
        codes = in_blocks(signed(unpack(wire[:code_bytes], bits, out.numel()), bits), block)
        put(out, scaled(codes, scales_of(wire, code_bytes, len(codes), of_scales), out.numel()), add, scale)

    return decode


int4_decode, qsgd_decode, terngrad_decode = (
    _digits_decode(4, torch.bfloat16),
    _digits_decode(4, block_at=1),
    _digits_decode(2),
)
fp16_encode, fp16_decode = _cast_encode(torch.float16), _cast_decode(torch.float16)
bf16_encode, bf16_decode = _cast_encode(torch.bfloat16), _cast_decode(torch.bfloat16)

# int8: scale = maximum / 127, code = c * (127 / maximum) as an integer.


def _integers(blocks: Tensor, inverse: Tensor, finite: Tensor, limit: int, stochastically: bool, seed: int) -> Tensor:
    """Return the codes as integers, (blocks, block) float32."""
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


def int8_decode(wire: Tensor, out: Tensor, block: int, stochastic: bool, add: bool, scale: float) -> None:
    codes = in_blocks(wire[: out.numel()].view(torch.int8).to(torch.float32), block)
    put(out, scaled(codes, scales_of(wire, out.numel(), len(codes)), out.numel()), add, scale)


# int4: scale = maximum / 7, rounded up to bfloat16; code = c * (1 / scale) as an integer; two codes a byte.


def _bfloat16_above(numbers: Tensor) -> Tensor:
    """Return positive float32 numbers rounded up to bfloat16, as float32."""
    return ((numbers.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)


def int4_encode(values: Tensor, residual: Tensor | None, wire: Tensor, block: int, stochastic: bool, seed: int) -> None:
    blocks = in_blocks(corrected(values, residual), block)
    maximum, finite = largest_magnitudes(blocks)
    scales = _bfloat16_above(divided(maximum, 7.0))
    codes = _integers(blocks, quotient(1.0, scales), finite, 7, stochastic, seed)
    write(wire, pack(codes.view(-1)[: values.numel()], 4), with_nan(scales.to(torch.bfloat16), finite))
    keep_dense_loss(residual, blocks, codes, with_nan(scales, finite))


class Float8Format(NamedTuple):
    dtype: torch.dtype
    largest: float


FLOAT8 = {"e4m3": Float8Format(torch.float8_e4m3fn, 448.0), "e5m2": Float8Format(torch.float8_e5m2, 57344.0)}


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


# onebit: scale = mean magnitude of the block, bit = (c >= 0). A block is not finite if its sum of magnitudes is not.


def onebit_encode(values: Tensor, residual: Tensor | None, wire: Tensor, block: int, seed: int) -> None:
    blocks = in_blocks(corrected(values, residual), block)
    sums = block_sums(blocks.abs())
    finite = sums.isfinite()
    bits = ((blocks >= 0) & finite).to(torch.float32)
    scales = with_nan(sums / lengths(values.numel(), block, values.device), finite)
    write(wire, pack(bits.view(-1)[: values.numel()], 1), scales)
    keep_dense_loss(residual, blocks, 2 * bits - 1, scales)


def onebit_decode(wire: Tensor, out: Tensor, block: int, add: bool, scale: float) -> None:
    code_bytes = (out.numel() + 7) // 8
    codes = in_blocks((2 * unpack(wire[:code_bytes], 1, out.numel()) - 1).to(torch.float32), block)
    put(out, scaled(codes, scales_of(wire, code_bytes, len(codes)), out.numel()), add, scale)


#: natural: code 1 means 2^NATURAL_LEAST, code 126 means 2^(NATURAL_LEAST + 125).
NATURAL_LEAST = -76
_NATURAL_NAN = 127


def _square_root(numbers: Tensor) -> Tensor:
    """Return square roots rounded to nearest, as in IEEE 754; torch's in float32 may be off by a unit in the last place."""
    return numbers.to(torch.float64).sqrt().to(torch.float32)


# qsgd: scale = norm / levels; code = sign and |c| * (levels / norm) rounded stochastically; two codes a byte.


def qsgd_encode(values: Tensor, residual: Tensor | None, wire: Tensor, levels: int, block: int, seed: int) -> None:
    """Encode each block relative to its norm.

    For the norm, c is divided by the power of two at or below the block's maximum, so that squares neither overflow nor vanish.
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


# terngrad: scale = maximum; code = sign with probability |c| / maximum, else 0; four codes a byte, two's complement.


def terngrad_encode(values: Tensor, residual: Tensor | None, wire: Tensor, block: int, seed: int) -> None:
    blocks = in_blocks(corrected(values, residual), block)
    maximum, finite = largest_magnitudes(blocks)
    kept = uniform(blocks.numel(), seed, blocks.device).view_as(blocks) < blocks.abs() * quotient(1.0, maximum)
    codes = torch.where(kept & finite, torch.where(blocks < 0, -1, 1), 0).to(torch.float32)
    scales = with_nan(maximum, finite)
    write(wire, pack(codes.view(-1)[: values.numel()], 2), scales)
    keep_dense_loss(residual, blocks, codes, scales)


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
