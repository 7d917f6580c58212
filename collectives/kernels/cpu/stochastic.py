"""The codecs that always round stochastically: qsgd, terngrad and natural."""

from __future__ import annotations

import numpy as np
from numba import float32, int8, int32, njit, uint8, uint32

from gradwire.collectives.kernels.cpu.blocks import (
    LARGEST,
    NAN,
    ONE,
    ZERO,
    corrected,
    decode_blocks,
    decode_each,
    encode_blocks,
    encode_each,
    maximum_of,
    ordered_sum,
    quotient,
    residual_at,
    scaling_to,
)
from gradwire.collectives.kernels.cpu.digits import decode_fours, decode_twos, pack_fours, pack_twos
from gradwire.collectives.kernels.cpu.intrinsics import bits_of, field, float32_at, float_of, int8_at, uint8_at
from gradwire.collectives.kernels.cpu.randomness import random_bits, rounded_stochastically, uniform
from gradwire.collectives.kernels.cpu.scratch import PIECE

_NAN_BITS, _INFINITY_BITS = np.int32(0x7FC00000), np.int32(0x7F800000)
_NATURAL_OFFSET = np.int32(127 - 77)  # exponent field of a float less the code of its power of two: 1 stands for 2^-76


_QSGD, _TERNGRAD = (4, 4), (2, 4)  # bits of a code, bytes of a scale


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
def _levels(values, residual, digits, n, scale, inverse, levels, start, seed):
    v, r, digits = float32_at(values), float32_at(residual), int8_at(digits)
    for i in range(n):
        c = corrected(v, r, i, residual != 0)
        level = int32(min(rounded_stochastically(abs(c) * inverse, start + i, seed), levels))
        sign = bits_of(c) >> int32(31)
        digit = int32(int32(level ^ sign) - sign)
        digits[i] = int8(digit)
        if residual != 0:
            r[i] = c - float32(digit) * scale


@njit
def _nibbles(values, residual, codes, digits, n, scale, inverse, levels, way, start, seed):
    for at in range(0, n, PIECE):
        v, r, length = values + 4 * at, residual_at(residual, at), min(PIECE, n - at)
        _levels(v, r, digits, length, scale, inverse, levels, start + at, seed)
        pack_fours(digits, codes + at // 2, length)


def qsgd_encode(values, residual, wire, numel, settings, seed):
    levels, block = field(settings, 0), field(settings, 1)
    return encode_blocks(_QSGD, _to_norm, _nibbles, values, residual, wire, numel, block, float32(levels), 0, seed)


def qsgd_decode(wire, out, numel, settings, add, scale):
    return decode_blocks(_QSGD, decode_fours, wire, out, numel, field(settings, 0), 0, scale, add)


@njit
def _ternaries(values, residual, digits, n, scale, inverse, start, seed):
    v, r, digits = float32_at(values), float32_at(residual), int8_at(digits)
    for i in range(n):
        c = corrected(v, r, i, residual != 0)
        kept = uniform(start + i, seed) < abs(c) * inverse
        digit = int32((bits_of(c) >> int32(31)) | int32(1)) if kept else int32(0)
        digits[i] = int8(digit)
        if residual != 0:
            r[i] = c - float32(digit) * scale


@njit
def _pairs(values, residual, codes, digits, n, scale, inverse, limit, way, start, seed):
    for at in range(0, n, PIECE):
        v, r, length = values + 4 * at, residual_at(residual, at), min(PIECE, n - at)
        _ternaries(v, r, digits, length, scale, inverse, start + at, seed)
        pack_twos(digits, codes + at // 4, length)


def terngrad_encode(values, residual, wire, numel, settings, seed):
    block = field(settings, 0)
    return encode_blocks(_TERNGRAD, scaling_to, _pairs, values, residual, wire, numel, block, ONE, 0, seed)


def terngrad_decode(wire, out, numel, settings, add, scale):
    return decode_blocks(_TERNGRAD, decode_twos, wire, out, numel, field(settings, 0), 0, scale, add)


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


def natural_encode(values, residual, wire, numel, settings, seed):
    return encode_each(_natural_of, _float_of_natural, uint8_at(wire), 1, values, residual, wire, numel, seed)


def natural_decode(wire, out, numel, settings, add, scale):
    return decode_each(_float_of_natural, uint8_at(wire), out, numel, add, scale)
