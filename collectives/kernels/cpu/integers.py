"""The codecs int8 and int4: the integers nearest to, or stochastically around, multiples of each block's scale."""

from __future__ import annotations

import numpy as np
from numba import float32, int8, int32, njit, uint16, uint32

from gradwire.collectives.kernels.cpu.blocks import (
    LARGEST,
    NAN,
    ONE,
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
from gradwire.collectives.kernels.cpu.digits import decode_nibbles, pack_fours
from gradwire.collectives.kernels.cpu.intrinsics import bits_of, float32_at, float_of_bfloat16, int8_at, uint16_at
from gradwire.collectives.kernels.cpu.randomness import rounded_stochastically
from gradwire.collectives.kernels.cpu.stack import PIECE, room

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
