"""The codecs fp16, bf16, int8, int4 and fp8.

Each works block by block, and passes several times over a block, which stays in the first-level cache: memory is read and
written once. Error feedback is fused in: every pass adds the residual to the values, and the last one writes the new residual.
"""

from __future__ import annotations

import numpy as np
from numba import float32, int8, int32, njit, uint8, uint16

from gradwire.collectives.kernels.cpu.blocks import (
    ONE,
    always,
    block_by_block,
    corrected,
    each_by_itself,
    maximum_of,
    put,
    quotient,
    rounded_stochastically,
    scaling_to,
)
from gradwire.collectives.kernels.cpu.digits import decode_fours, pack_fours, packing
from gradwire.collectives.kernels.cpu.intrinsics import (
    bfloat16_of,
    bits_of,
    float32_at,
    float_of,
    float_of_bfloat16,
    float_of_half,
    half_of,
    int8_at,
    uint8_at,
    uint16_at,
)

# fp16, bf16: a number of 16 bits for each of 32.


@njit
def _to_half(number, index, seed):
    return uint16(0x7E00) if number != number else half_of(number)


@njit
def _to_bfloat16(number, index, seed):
    return bfloat16_of(number)


fp16_encode, fp16_decode = each_by_itself(_to_half, float_of_half, uint16_at, 2)
bf16_encode, bf16_decode = each_by_itself(_to_bfloat16, float_of_bfloat16, uint16_at, 2)


# int8, int4: the integers nearest to, or stochastically around, multiples of each block's scale.

_ROUND = np.float32(1.5 * 2**23)  # added to a number below 2^22, rounds it, half to even, and puts that in the low bits


@njit
def _integers(values, residual, digits, n, scale, inverse, limit, stochastic, start, seed):
    v, r, digits = float32_at(values), float32_at(residual), int8_at(digits)
    for i in range(n):
        c = corrected(v, r, i, residual != 0)
        number = c * inverse
        if stochastic:
            rounded = min(max(rounded_stochastically(number, start + i, seed), -limit), limit)
            digits[i] = int8(int32(rounded))
        else:  # not beyond the limit, which `number` exceeds by some units in the last place at most
            shifted = number + _ROUND
            rounded = shifted - _ROUND
            digits[i] = int8(bits_of(shifted))
        if residual != 0:
            r[i] = c - rounded * scale


@njit
def _bytes(values, residual, codes, digits, n, scale, inverse, limit, stochastic, start, seed):
    _integers(values, residual, codes, n, scale, inverse, limit, stochastic, start, seed)


@njit
def _bytes_decoded(codes, digits, out, n, block_scale, way, scale, add):
    codes, out = int8_at(codes), float32_at(out)
    for i in range(n):
        put(out, i, float32(codes[i]) * block_scale * scale, add)


@njit
def _to_rounded_up(values, residual, n, limit, partials):
    """Return (scale, inverse) of a block, the scale rounded up to bfloat16."""
    exact = maximum_of(values, residual, n) / limit
    scale = float_of_bfloat16(int32(bits_of(exact) + int32(0xFFFF)) >> int32(16))
    return scale, quotient(ONE, scale)


_nibbles = packing(_integers, pack_fours, 2)
int8_encode, int8_decode = block_by_block(8, 4, always(127), scaling_to, _bytes, _bytes_decoded)
int4_encode, int4_decode = block_by_block(4, 2, always(7), _to_rounded_up, _nibbles, decode_fours)


# fp8
#
# A magnitude is rounded by adding the number whose last bit is the last that the format keeps at that exponent; what the
# sum has more than that number are the format's units, to which the exponent is added above the mantissa.

_SIGN = np.int32(-(2**31))


@njit
def _float8(values, residual, codes, digits, n, scale, inverse, limit, e5m2, start, seed):
    v, r, codes = float32_at(values), float32_at(residual), uint8_at(codes)
    mantissa = int32(2 if e5m2 else 3)
    least = int32(int32(127 - 14 if e5m2 else 127 - 6) << int32(23))  # the bits of the smallest normal number
    drop = int32(int32(23) - mantissa)
    for i in range(n):
        c = corrected(v, r, i, residual != 0)
        number = c * inverse
        magnitude = min(abs(number), limit)
        exponent = max(int32(bits_of(magnitude) & int32(0x7F800000)), least)
        rounder = int32(exponent + int32(drop << int32(23)))
        rounded = magnitude + float_of(rounder)
        sign = int32(bits_of(number) & _SIGN)
        units = int32(bits_of(rounded) - rounder)
        codes[i] = uint8(int32(int32(int32(exponent - least) >> drop) + units) | (sign >> int32(24)))
        if residual != 0:
            r[i] = c - float_of(int32(bits_of(rounded - float_of(rounder)) | sign)) * scale


@njit
def _float8_decoded(codes, digits, out, n, block_scale, e5m2, scale, add):
    codes, out = uint8_at(codes), float32_at(out)
    mantissa = int32(2 if e5m2 else 3)
    unit = float32(2.0**-16) if e5m2 else float32(2.0**-9)  # of a subnormal number
    offset = int32(int32(127 - 15 if e5m2 else 127 - 7) << int32(23))
    drop = int32(int32(23) - mantissa)
    for i in range(n):
        code = int32(codes[i])
        magnitude = int32(code & int32(127))
        bits = int32(int32(magnitude << drop) + offset)
        bits = bits if magnitude >> mantissa else bits_of(float32(magnitude) * unit)
        number = float_of(int32(bits | int32(int32(code & int32(128)) << int32(24))))
        put(out, i, number * block_scale * scale, add)


@njit
def _largest(e5m2):
    """Return the largest number of a format."""
    return float32(57344) if e5m2 else float32(448)


fp8_encode, fp8_decode = block_by_block(8, 4, _largest, scaling_to, _float8, _float8_decoded, block_at=1, way_at=0)
