"""The codecs that always round stochastically: qsgd, terngrad and natural."""

from __future__ import annotations

import numpy as np
from numba import float32, int8, int32, njit, uint8, uint32

from gradwire.collectives.kernels.cpu.blocks import (
    LARGEST,
    NAN,
    ZERO,
    always,
    block_by_block,
    corrected,
    each_by_itself,
    maximum_of,
    ordered_sum,
    quotient,
    random_bits,
    rounded_stochastically,
    scaling_to,
    uniform,
)
from gradwire.collectives.kernels.cpu.digits import decode_fours, decode_twos, pack_fours, pack_twos, packing
from gradwire.collectives.kernels.cpu.intrinsics import bits_of, float32_at, float_of, int8_at, uint8_at

_NAN_BITS, _INFINITY_BITS = np.int32(0x7FC00000), np.int32(0x7F800000)
_NATURAL_OFFSET = np.int32(127 - 77)  # exponent field of a float less the code of its power of two: 1 stands for 2^-76


@njit
def _to_norm(values, residual, n, levels, partials):
    """Return (scale, inverse) of a block, by squares of c over the power of two of its largest magnitude."""
    norm = maximum = maximum_of(values, residual, n)
    if maximum > ZERO:
        power = int32(bits_of(maximum) & int32(0x7F800000))
        inverse_power = float_of(int32(int32(254 << 23) - power))
        norm = np.sqrt(ordered_sum(values, residual, n, partials, inverse_power, True)) * float_of(power)
    if bits_of(norm) >= LARGEST:
        norm = NAN
    return norm / levels, quotient(levels, norm)


@njit
def _levels(values, residual, digits, n, scale, inverse, levels, way, start, seed):
    v, r, digits = float32_at(values), float32_at(residual), int8_at(digits)
    for i in range(n):
        c = corrected(v, r, i, residual != 0)
        level = int32(min(rounded_stochastically(abs(c) * inverse, start + i, seed), levels))
        sign = bits_of(c) >> int32(31)
        digit = int32(int32(level ^ sign) - sign)
        digits[i] = int8(digit)
        if residual != 0:
            r[i] = c - float32(digit) * scale


_nibbles = packing(_levels, pack_fours, 2)
qsgd_encode, qsgd_decode = block_by_block(4, 4, float32, _to_norm, _nibbles, decode_fours, block_at=1, way_at=0)


@njit
def _ternaries(values, residual, digits, n, scale, inverse, limit, way, start, seed):
    v, r, digits = float32_at(values), float32_at(residual), int8_at(digits)
    for i in range(n):
        c = corrected(v, r, i, residual != 0)
        kept = uniform(start + i, seed) < abs(c) * inverse
        digit = int32((bits_of(c) >> int32(31)) | int32(1)) if kept else int32(0)
        digits[i] = int8(digit)
        if residual != 0:
            r[i] = c - float32(digit) * scale


_pairs = packing(_ternaries, pack_twos, 4)
terngrad_encode, terngrad_decode = block_by_block(2, 4, always(1), scaling_to, _pairs, decode_twos)


# natural: bits of the magnitude + 23 random ones, whose carry is the rounding; the exponent that is then there, less an
# offset


@njit
def _natural_of(number, index, seed):
    bits = bits_of(number)
    magnitude = int32(bits & int32(0x7FFFFFFF))
    exponent = int32(uint32(magnitude + int32(random_bits(index, seed) >> uint32(9))) >> uint32(23))
    code = int32(min(max(int32(exponent - _NATURAL_OFFSET), int32(0)), int32(126)))
    code = int32(code | (int32(bits >> int32(24)) & int32(0x80)))
    return uint8(127) if magnitude >= _INFINITY_BITS else uint8(code)


@njit
def _float_of_natural(code):
    exponent = int32(code & int32(127))
    bits = int32(int32(exponent + _NATURAL_OFFSET) << int32(23))
    bits = int32(0) if exponent == int32(0) else bits
    bits = _NAN_BITS if exponent == int32(127) else bits
    return float_of(int32(bits | int32(int32(code & int32(128)) << int32(24))))


natural_encode, natural_decode = each_by_itself(_natural_of, _float_of_natural, uint8_at, 1)
