"""The codecs that always round stochastically: qsgd, terngrad and natural."""

from __future__ import annotations

import numpy as np
from numba import float32, int8, int32, njit, uint8, uint32

from gradwire.collectives.kernels.cpu.blocks import (
    INFINITY,
    LARGEST,
    NAN,
    ONE,
    SMALLEST,
    ZERO,
    clear_padding,
    corrected,
    count_blocks,
    forget,
    largest_bits,
    loss,
    maximum_of,
    ordered_sum,
    pad16,
    put,
    quotient,
    residual_at,
)
from gradwire.collectives.kernels.cpu.calling import decoder, encoder
from gradwire.collectives.kernels.cpu.digits import decode_digits, decode_nibbles, pack_fours, pack_twos, unpack_twos
from gradwire.collectives.kernels.cpu.intrinsics import bits_of, float32_at, float_of, int8_at, uint8_at
from gradwire.collectives.kernels.cpu.randomness import random_bits, rounded_stochastically, uniform
from gradwire.collectives.kernels.cpu.stack import PIECE, room

_NAN_BITS, _INFINITY_BITS = np.int32(0x7FC00000), np.int32(0x7F800000)
_NATURAL_OFFSET = np.int32(127 - 77)  # exponent field of a float less the code of its power of two: 1 stands for 2^-76


@njit
def _levels(values, residual, digits, n, inverse, levels, start, seed, scale):
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
def _norm(values, residual, n, largest, partials):
    """Return the norm of a block whose largest magnitude has these bits, by squares of c over its power of two."""
    if largest < SMALLEST:
        return ZERO
    power = int32(largest & int32(0x7F800000))
    inverse_power = float_of(int32(int32(254 << 23) - power))
    return np.sqrt(ordered_sum(values, residual, n, partials, inverse_power, True)) * float_of(power)


def _qsgd_encode(values, residual, wire, numel, levels, block, seed):
    code_bytes = (numel + 1) // 2
    scales = float32_at(wire + pad16(code_bytes))
    partials = room()
    digits = room()
    levels = float32(levels)
    seed = uint32(seed)
    for index in range(count_blocks(numel, block)):
        start = index * block
        n = min(block, numel - start)
        codes = wire + start // 2
        v, r = values + 4 * start, residual_at(residual, start)
        largest = largest_bits(v, r, n)
        norm = _norm(v, r, n, largest, partials) if largest < LARGEST else INFINITY
        if bits_of(norm) >= LARGEST:
            scales[index] = NAN
            forget(codes, (n + 1) // 2, r, n)
            continue
        scale = norm / levels
        scales[index] = scale
        inverse = quotient(levels, norm)
        for at in range(0, n, PIECE):
            length = min(PIECE, n - at)
            _levels(v + 4 * at, residual_at(r, at), digits, length, inverse, levels, start + at, seed, scale)
            pack_fours(digits, codes + at // 2, length)
    clear_padding(wire, code_bytes, 4 * count_blocks(numel, block))


def _qsgd_decode(wire, out, numel, block, add, scale):
    scales = float32_at(wire + pad16((numel + 1) // 2))
    digits = room()
    for index in range(count_blocks(numel, block)):
        start = index * block
        n = min(block, numel - start)
        decode_nibbles(wire + start // 2, digits, out + 4 * start, n, scales[index], scale, add != 0)


@njit
def _ternaries(values, residual, digits, n, inverse, start, seed, scale):
    v, r, digits = float32_at(values), float32_at(residual), int8_at(digits)
    for i in range(n):
        c = corrected(v, r, i, residual != 0)
        kept = uniform(start + i, seed) < abs(c) * inverse
        digit = int32((bits_of(c) >> int32(31)) | int32(1)) if kept else int32(0)
        digits[i] = int8(digit)
        if residual != 0:
            r[i] = c - float32(digit) * scale


def _terngrad_encode(values, residual, wire, numel, block, seed):
    code_bytes = (numel + 3) // 4
    scales = float32_at(wire + pad16(code_bytes))
    digits = room()
    seed = uint32(seed)
    for index in range(count_blocks(numel, block)):
        start = index * block
        n = min(block, numel - start)
        codes = wire + start // 4
        v, r = values + 4 * start, residual_at(residual, start)
        largest = largest_bits(v, r, n)
        if largest >= LARGEST:
            scales[index] = NAN
            forget(codes, (n + 3) // 4, r, n)
            continue
        maximum = maximum_of(largest)
        scales[index] = maximum
        inverse = quotient(ONE, maximum)
        for at in range(0, n, PIECE):
            length = min(PIECE, n - at)
            _ternaries(v + 4 * at, residual_at(r, at), digits, length, inverse, start + at, seed, maximum)
            pack_twos(digits, codes + at // 4, length)
    clear_padding(wire, code_bytes, 4 * count_blocks(numel, block))


def _terngrad_decode(wire, out, numel, block, add, scale):
    scales = float32_at(wire + pad16((numel + 3) // 4))
    digits = room()
    for index in range(count_blocks(numel, block)):
        start = index * block
        n = min(block, numel - start)
        for at in range(0, n, PIECE):
            length = min(PIECE, n - at)
            unpack_twos(wire + (start + at) // 4, digits, length)
            decode_digits(digits, int32(2), out + 4 * (start + at), length, scales[index], scale, add != 0)


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


def _natural_encode(values, residual, wire, numel, seed):
    v, r, codes = float32_at(values), float32_at(residual), uint8_at(wire)
    seed = uint32(seed)
    for i in range(numel):
        c = corrected(v, r, i, residual != 0)
        code = _natural_of(c, i, seed)
        codes[i] = code
        if residual != 0:
            r[i] = loss(c, _float_of_natural(code))
    clear_padding(wire, numel, 0)


def _natural_decode(wire, out, numel, add, scale):
    codes, o = uint8_at(wire), float32_at(out)
    for i in range(numel):
        put(o, i, _float_of_natural(codes[i]) * scale, add)


qsgd_encode, qsgd_decode = encoder(_qsgd_encode), decoder(_qsgd_decode)
terngrad_encode, terngrad_decode = encoder(_terngrad_encode), decoder(_terngrad_decode)
natural_encode, natural_decode = encoder(_natural_encode), decoder(_natural_decode)
