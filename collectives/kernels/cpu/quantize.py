"""The functions of reference.quantize for the CPU: the same bytes.

Each works block by block, and passes several times over a block, which stays in the first-level cache: memory is read
and written once. Error feedback is fused in: every pass adds the residual to the values, and the last one writes what
was lost. A function is compiled, or loaded from the disk, when it is first called.
"""

from __future__ import annotations

import numpy as np
from numba import float32, int8, int32, njit, uint8, uint16, uint32

from gradwire.collectives.kernels.cpu.blocks import (
    LARGEST,
    NAN,
    ONE,
    clear_padding,
    corrected,
    count_blocks,
    forget,
    largest_bits,
    loss,
    maximum_of,
    pad16,
    put,
    quotient,
    residual_at,
)
from gradwire.collectives.kernels.cpu.calling import decoder, encoder
from gradwire.collectives.kernels.cpu.digits import decode_nibbles, pack_fours
from gradwire.collectives.kernels.cpu.intrinsics import (
    bfloat16_of,
    bits_of,
    float32_at,
    float_of,
    float_of_bfloat16,
    float_of_half,
    half_of,
    int8_at,
    int32_at,
    uint8_at,
    uint16_at,
)
from gradwire.collectives.kernels.cpu.onebit import onebit_decode, onebit_encode
from gradwire.collectives.kernels.cpu.randomness import rounded_stochastically
from gradwire.collectives.kernels.cpu.stack import PIECE, room
from gradwire.collectives.kernels.cpu.stochastic import (
    natural_decode,
    natural_encode,
    qsgd_decode,
    qsgd_encode,
    terngrad_decode,
    terngrad_encode,
)

# fp16, bf16: a number of 16 bits for each of 32.


def _fp16_encode(values, residual, wire, numel, seed):
    v, r, codes = float32_at(values), float32_at(residual), uint16_at(wire)
    for i in range(numel):
        c = corrected(v, r, i, residual != 0)
        code = uint16(0x7E00) if c != c else half_of(c)
        codes[i] = code
        if residual != 0:
            r[i] = loss(c, float_of_half(code))
    clear_padding(wire, 2 * numel, 0)


def _fp16_decode(wire, out, numel, add, scale):
    codes, o = uint16_at(wire), float32_at(out)
    for i in range(numel):
        put(o, i, float_of_half(codes[i]) * scale, add)


def _bf16_encode(values, residual, wire, numel, seed):
    v, r, codes = float32_at(values), float32_at(residual), uint16_at(wire)
    for i in range(numel):
        c = corrected(v, r, i, residual != 0)
        code = bfloat16_of(c)
        codes[i] = code
        if residual != 0:
            r[i] = loss(c, float_of_bfloat16(code))
    clear_padding(wire, 2 * numel, 0)


def _bf16_decode(wire, out, numel, add, scale):
    codes, o = uint16_at(wire), float32_at(out)
    for i in range(numel):
        put(o, i, float_of_bfloat16(codes[i]) * scale, add)


fp16_encode, fp16_decode = encoder(_fp16_encode), decoder(_fp16_decode)
bf16_encode, bf16_decode = encoder(_bf16_encode), decoder(_bf16_decode)


# int8, int4: the integers nearest to, or stochastically around, multiples of each block's scale.

_ROUND = np.float32(1.5 * 2**23)  # added to a number below 2^22, rounds it, half to even, and puts that in the low bits


@njit
def _integers(values, residual, digits, n, inverse, limit, stochastic, start, seed, scale):
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
def _int8_decoded(codes, out, n, block_scale, scale, add):
    codes, out = int8_at(codes), float32_at(out)
    for i in range(n):
        put(out, i, float32(codes[i]) * block_scale * scale, add)


def _int8_encode(values, residual, wire, numel, block, stochastic, seed):
    scales = float32_at(wire + pad16(numel))
    seed = uint32(seed)
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
        scale = maximum / float32(127)
        scales[index] = scale
        inverse = quotient(float32(127), maximum)
        _integers(v, r, codes, n, inverse, float32(127), stochastic, start, seed, scale)
    clear_padding(wire, numel, 4 * count_blocks(numel, block))


def _int8_decode(wire, out, numel, block, add, scale):
    scales = float32_at(wire + pad16(numel))
    for index in range(count_blocks(numel, block)):
        start = index * block
        _int8_decoded(wire + start, out + 4 * start, min(block, numel - start), scales[index], scale, add != 0)


def _int4_encode(values, residual, wire, numel, block, stochastic, seed):
    code_bytes = (numel + 1) // 2
    scales = uint16_at(wire + pad16(code_bytes))
    digits = room()
    seed = uint32(seed)
    for index in range(count_blocks(numel, block)):
        start = index * block
        n = min(block, numel - start)
        codes = wire + start // 2
        v, r = values + 4 * start, residual_at(residual, start)
        largest = largest_bits(v, r, n)
        if largest >= LARGEST:
            scales[index] = uint16(0x7FC0)
            forget(codes, (n + 1) // 2, r, n)
            continue
        upper = int32(bits_of(maximum_of(largest) / float32(7)) + int32(0xFFFF)) >> int32(16)  # rounded up
        scales[index] = uint16(upper)
        scale = float_of_bfloat16(upper)
        inverse = quotient(ONE, scale)
        for at in range(0, n, PIECE):
            length = min(PIECE, n - at)
            _integers(
                v + 4 * at, residual_at(r, at), digits, length, inverse, float32(7), stochastic, start + at, seed, scale
            )
            pack_fours(digits, codes + at // 2, length)
    clear_padding(wire, code_bytes, 2 * count_blocks(numel, block))


def _int4_decode(wire, out, numel, block, add, scale):
    scales = uint16_at(wire + pad16((numel + 1) // 2))
    digits = room()
    for index in range(count_blocks(numel, block)):
        start = index * block
        n = min(block, numel - start)
        block_scale = float_of_bfloat16(scales[index])
        decode_nibbles(wire + start // 2, digits, out + 4 * start, n, block_scale, scale, add != 0)


int8_encode, int8_decode = encoder(_int8_encode), decoder(_int8_decode)
int4_encode, int4_decode = encoder(_int4_encode), decoder(_int4_decode)


# fp8
#
# A magnitude is rounded by adding the number whose last bit is the last that the format keeps at that exponent; what the
# sum has more than that number are the format's units, to which the exponent is added above the mantissa.

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


_fp8_encoder, _fp8_decoder = encoder(_fp8_encode), decoder(_fp8_decode)


def fp8_encode(values, residual, wire, format, block, seed):
    _fp8_encoder(values, residual, wire, format == "e5m2", block, seed)


def fp8_decode(wire, out, format, block, add, scale):
    _fp8_decoder(wire, out, format == "e5m2", block, add, scale)
