"""The common parts of codecs: the loops over blocks, the sums and maxima of a block, the residual, and random numbers.

Addresses are int64. The encoded numbers c are the values, or values + residual if the residual's address is not 0.

Loops are written so that LLVM turns them into vector code: no early exit, 32-bit lanes, maxima and tests on the bits
of a float (as integers they have an order that NaN and Inf do not disturb), rounding by adding a constant.
"""

from __future__ import annotations

import numpy as np
from numba import float32, int32, int64, njit, uint32

from gradwire.collectives.kernels import layout
from gradwire.collectives.kernels.cpu.intrinsics import (
    FLOAT,
    bfloat16_of,
    bits_of,
    call,
    field,
    float32_at,
    float_of,
    float_of_bfloat16,
    instruction,
    uint16_at,
)
from gradwire.collectives.kernels.cpu.scratch import clear_bytes, room

NAN, INFINITY = np.float32(np.nan), np.float32(np.inf)
ZERO, ONE = np.float32(0), np.float32(1)
SMALLEST = np.int32((127 - 100) << 23)  # the bits of 2^-100: a block whose largest magnitude is below is zero
LARGEST = np.int32((127 + 127) << 23)  # of 2^127: a block with this or a larger magnitude, NaN or Inf is not finite
_STEP = np.float32(2.0**-24)

pad16 = njit(layout.pad16)


@njit
def clear_padding(wire, code_bytes, scale_bytes):
    """Fill the two sections of a wire up with zeros."""
    clear_bytes(wire + code_bytes, pad16(code_bytes) - code_bytes)
    clear_bytes(wire + pad16(code_bytes) + scale_bytes, pad16(scale_bytes) - scale_bytes)


@njit
def residual_at(residual, start):
    """Return the address of an element of the residual; 0 without one."""
    return residual + 4 * start if residual != 0 else int64(0)


@njit
def corrected(v, r, i, corrects):
    """Return the number to encode for an element."""
    return v[i] + r[i] if corrects else v[i]


@njit
def _largest_bits(values, residual, n):
    """Return the bits of the largest magnitude; a NaN is larger than Inf."""
    v, r = float32_at(values), float32_at(residual)
    largest = int32(0)
    for i in range(n):
        magnitude = int32(bits_of(corrected(v, r, i, residual != 0)) & int32(0x7FFFFFFF))
        largest = magnitude if magnitude > largest else largest
    return largest


@njit
def quotient(numerator, maximum):
    """Return numerator / maximum, and 0 for 0."""
    return numerator / maximum if maximum > ZERO else ZERO


@njit
def maximum_of(values, residual, n):
    """Return the largest magnitude of a block: 0 for a block that is zero, NaN for one that is not finite."""
    largest = _largest_bits(values, residual, n)
    if largest >= LARGEST:
        return NAN
    return float_of(largest) if largest >= SMALLEST else ZERO


@njit
def scaling_to(values, residual, n, limit, partials):
    """Return (scale, inverse) that make `limit` the code of a block's largest magnitude."""
    maximum = maximum_of(values, residual, n)
    return maximum / limit, quotient(limit, maximum)


@njit
def _add_terms(v, r, s, n, inverse_power, squared, corrects):
    for j in range(n):
        number = corrected(v, r, j, corrects)
        scaled = number * inverse_power
        s[j] += scaled * scaled if squared else abs(number)


@njit
def folded(partials):
    """Return the sum of 128 partial sums, added in the order of reference.block_sums. They are overwritten."""
    for j in range(32):
        partials[j] = (partials[4 * j] + partials[4 * j + 1]) + (partials[4 * j + 2] + partials[4 * j + 3])
    for half in (16, 8, 4, 2, 1):
        for j in range(half):
            partials[j] += partials[j + half]
    return partials[0]


@njit
def ordered_sum(values, residual, n, partials, inverse_power, squared):
    """Return the sum of the magnitudes, or of the squares of c * inverse_power. partials: room for 128 floats."""
    s = float32_at(partials)
    for j in range(128):
        s[j] = ZERO
    corrects = residual != 0
    for start in range(0, n, 128):
        v, r = float32_at(values + 4 * start), float32_at(residual + 4 * start)
        if n - start >= 128:
            _add_terms(v, r, s, 128, inverse_power, squared, corrects)
        else:
            _add_terms(v, r, s, n - start, inverse_power, squared, corrects)
    return folded(s)


@njit
def put(out, i, number, add):
    """Set an element, or add to it."""
    out[i] = out[i] + number if add else number


@njit
def loss(c, decoded):
    """Return the error of a code of c; 0 if the decoded number is not finite."""
    return c - decoded if abs(decoded) < INFINITY else ZERO


def each_by_itself(narrow, widen, codes_at, code_bytes):
    """Return the kernels that encode and decode number after number, without scales.

    narrow: returns a number's code. widen: returns a code's number. codes_at: returns the codes at an address, of so many bytes.
    """

    def encode(values, residual, wire, numel, settings, seed):
        v, r, codes = float32_at(values), float32_at(residual), codes_at(wire)
        seed = uint32(seed)
        for i in range(numel):
            c = corrected(v, r, i, residual != 0)
            code = narrow(c, i, seed)
            codes[i] = code
            if residual != 0:
                r[i] = loss(c, widen(code))
        clear_padding(wire, code_bytes * numel, 0)
        return 0

    def decode(wire, out, numel, settings, add, scale):
        o, codes = float32_at(out), codes_at(wire)
        for i in range(numel):
            put(o, i, widen(codes[i]) * scale, add)
        return 0

    return encode, decode


def block_by_block(bits, scale_bytes, limit_of, scaling, coding, decoding, block_at=0, way_at=1):
    """Return the kernels that encode and decode block after block.

    bits: of a code. scale_bytes: 4 of a float32, or 2 of a bfloat16. block_at: the place of the length of a block among the
    settings. way_at: that of the codec's other setting, if there is one: `way`. limit_of: returns `limit` for `way`. scaling:
    returns a block's scale, NaN if the block is not finite, and another number for `coding`. coding: writes codes and residual of
    a block; it has room for PIECE digits. decoding: decodes a block, given its scale.
    """

    def encode(values, residual, wire, numel, settings, seed):
        block, way = field(settings, block_at), field(settings, way_at)
        limit = limit_of(way)
        code_bytes = (numel * bits + 7) // 8
        scales = wire + pad16(code_bytes)
        partials, digits = room(), room()
        seed = uint32(seed)
        blocks = (numel + block - 1) // block
        for index in range(blocks):
            start = index * block
            n = min(block, numel - start)
            codes = wire + start * bits // 8
            v, r = values + 4 * start, residual_at(residual, start)
            scale, factor = scaling(v, r, n, limit, partials)
            if scale_bytes == 2:
                uint16_at(scales)[index] = bfloat16_of(scale)
            else:
                float32_at(scales)[index] = scale
            if scale != scale:
                clear_bytes(codes, (n * bits + 7) // 8)
                if residual != 0:
                    clear_bytes(r, 4 * n)
                continue
            coding(v, r, codes, digits, n, scale, factor, limit, way, start, seed)
        clear_padding(wire, code_bytes, scale_bytes * blocks)
        return 0

    def decode(wire, out, numel, settings, add, scale):
        block, way = field(settings, block_at), field(settings, way_at)
        scales = wire + pad16((numel * bits + 7) // 8)
        digits = room()
        for index in range((numel + block - 1) // block):
            start = index * block
            n = min(block, numel - start)
            block_scale = float_of_bfloat16(uint16_at(scales)[index]) if scale_bytes == 2 else float32_at(scales)[index]
            decoding(wire + start * bits // 8, digits, out + 4 * start, n, block_scale, way, scale, add != 0)
        return 0

    return encode, decode


def always(limit):
    """Return a limit_of() that returns the same number for every `way`."""
    number = np.float32(limit)

    @njit
    def limit_of(way):
        return number

    return limit_of


# The random numbers of the codecs: a function of a position and a seed, the same on every kind of processor.


@instruction(float32, float32)
def _floor(builder, number):
    """Return the largest integer that is not above, as a float (math.floor makes 64-bit integers)."""
    return call(builder, "llvm.floor.f32", FLOAT, number)


@njit
def random_bits(index, seed):
    """Return 32 random bits for a position: Wellons' lowbias32 (2018) of index * 0x9E3779B9 + seed."""
    x = uint32(uint32(uint32(index) * uint32(0x9E3779B9)) + seed)
    x = uint32(uint32(x ^ (x >> uint32(16))) * uint32(0x7FEB352D))
    x = uint32(uint32(x ^ (x >> uint32(15))) * uint32(0x846CA68B))
    return uint32(x ^ (x >> uint32(16)))


@njit
def uniform(index, seed):
    """Return a float32 in [0, 1) for a position, in steps of 2^-24."""
    return float32(int32(random_bits(index, seed) >> uint32(8))) * _STEP


@njit
def rounded_stochastically(number, index, seed):
    """Return one of the two integers beside a number, as a float, of which the number is the mean."""
    below = _floor(number)
    return below + (np.float32(1) if uniform(index, seed) < number - below else np.float32(0))
