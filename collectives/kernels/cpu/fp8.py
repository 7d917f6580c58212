"""The codec fp8: a float of 8 bits for each number, and a scale for each block.

A magnitude is rounded by adding the number whose last bit is the last that the format keeps at that exponent; what the
sum has more than that number are the format's units, to which the exponent is added above the mantissa.
"""

from __future__ import annotations

import numpy as np
from numba import float32, int32, njit, uint8

from gradwire.collectives.kernels.cpu.blocks import (
    LARGEST,
    NAN,
    clear_padding,
    corrected,
    count_blocks,
    forget,
    largest_bits,
    maximum_of,
    pad16,
    put,
    quotient,
    residual_at,
)
from gradwire.collectives.kernels.cpu.calling import decoder, encoder
from gradwire.collectives.kernels.cpu.intrinsics import bits_of, float32_at, float_of, uint8_at

_SIGN = np.int32(-(2**31))


@njit
def _float8_block(values, residual, codes, n, inverse, e5m2, scale):
    v, r, codes = float32_at(values), float32_at(residual), uint8_at(codes)
    mantissa = int32(2 if e5m2 else 3)
    limit = float32(57344) if e5m2 else float32(448)
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
def _float8_decoded(codes, out, n, e5m2, block_scale, scale, add):
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


def _fp8_encode(values, residual, wire, numel, e5m2, block, seed):
    limit = float32(57344) if e5m2 else float32(448)
    scales = float32_at(wire + pad16(numel))
    for index in range(count_blocks(numel, block)):
        start = index * block
        n = min(block, numel - start)
        codes = wire + start
        v, r = values + 4 * start, residual_at(residual, start)
        largest = largest_bits(v, r, n)
        if largest >= LARGEST:
            scales[index] = NAN
            forget(codes, n, r, n)
            continue
        maximum = maximum_of(largest)
        scale = maximum / limit
        scales[index] = scale
        _float8_block(v, r, codes, n, quotient(limit, maximum), e5m2, scale)
    clear_padding(wire, numel, 4 * count_blocks(numel, block))


def _fp8_decode(wire, out, numel, e5m2, block, add, scale):
    scales = float32_at(wire + pad16(numel))
    for index in range(count_blocks(numel, block)):
        start = index * block
        n = min(block, numel - start)
        _float8_decoded(wire + start, out + 4 * start, n, e5m2, scales[index], scale, add != 0)


_encode, _decode = encoder(_fp8_encode), decoder(_fp8_decode)


def fp8_encode(values, residual, wire, format, block, seed):
    _encode(values, residual, wire, format == "e5m2", block, seed)


def fp8_decode(wire, out, format, block, add, scale):
    _decode(wire, out, format == "e5m2", block, add, scale)
