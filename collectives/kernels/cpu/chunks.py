"""The codec chunktopk: of every chunk of numbers the largest, as indices of 12 bits and values of 2."""

from __future__ import annotations

from numba import float32, int32, int64, njit, uint8

from gradwire.collectives.kernels.cpu.blocks import INFINITY, NAN, ZERO, pad16, residual_at
from gradwire.collectives.kernels.cpu.intrinsics import (
    bfloat16_of,
    bits_of,
    field,
    float32_at,
    float_of_bfloat16,
    int32_at,
    uint8_at,
    uint16_at,
)
from gradwire.collectives.kernels.cpu.keys import INFINITY_KEY, LANES, NAN_KEY, bits_set, key_of, lowest_bit, reaching
from gradwire.collectives.kernels.cpu.scratch import clear, room_for
from gradwire.collectives.kernels.layout import CHUNK


@njit
def _count_reaching(keys, least):
    """Return how many of CHUNK keys are at least this one."""
    found = 0
    for at in range(0, CHUNK, LANES):
        found += bits_set(reaching(keys + 4 * at, least))
    return found


@njit
def _select(keys, count, places):
    """Write the places of the `count` largest of CHUNK keys, in ascending order; of equal ones those that come first."""
    low, high = 0, NAN_KEY
    while low < high:  # the largest key that `count` of them reach
        middle = (low + high + 1) // 2
        if _count_reaching(keys, middle) >= count:
            low = middle
        else:
            high = middle - 1
    ties, found = count - _count_reaching(keys, low + 1), 0
    for at in range(0, CHUNK, LANES):
        word = reaching(keys + 4 * at, low)
        while word != 0:
            i = at + lowest_bit(word)
            word &= word - 1
            if int64(int32_at(keys)[i]) == low:
                if ties == 0:
                    continue
                ties -= 1
            places[found] = i
            found += 1


@njit
def _mean_of(sent, reaches, count, which):
    """Return the mean of the magnitudes whose mark is `which`, summed one after the other; 0 if there are none."""
    total, number = ZERO, 0
    for e in range(count):
        if reaches[e] == which:
            total += sent[e]
            number += 1
    return total / float32(number) if number > 0 else ZERO


@njit
def _write_chunk(indices, codes, k, count, places, negative, reaches):
    """Write the entries of a chunk; those beyond `count` are 0."""
    index, code = uint8_at(indices), uint8_at(codes)
    for e in range(count, k):
        places[e] = 0
        negative[e] = 0
        reaches[e] = 0
    for pair in range(k // 2):
        first, second = places[2 * pair], places[2 * pair + 1]
        index[3 * pair] = uint8(first & 0xFF)
        index[3 * pair + 1] = uint8((first >> 8) | ((second & 0xF) << 4))
        index[3 * pair + 2] = uint8(second >> 4)
    for byte in range(k // 4):
        bits = 0
        for e in range(4):
            bits |= (negative[4 * byte + e] * 2 + reaches[4 * byte + e]) << (2 * e)
        code[byte] = uint8(bits)


_chunk_room = room_for(4 * CHUNK)


def chunktopk_encode(values, residual, wire, numel, settings, seed):
    k = field(settings, 0)
    chunks = (numel + CHUNK - 1) // CHUNK
    codes = wire + pad16(chunks * 3 * k // 2)
    scales = uint16_at(codes + pad16(chunks * k // 4))
    keys = _chunk_room()
    numbers, sent = int32_at(keys), float32_at(_chunk_room())
    places, negative, reaches = int32_at(_chunk_room()), int32_at(_chunk_room()), int32_at(_chunk_room())
    for c in range(chunks):
        start = c * CHUNK
        n = min(CHUNK, numel - start)
        count = (n * k + CHUNK - 1) // CHUNK
        v, r = float32_at(values + 4 * start), float32_at(residual_at(residual, start))
        if residual != 0:
            for i in range(n):
                r[i] = v[i] + r[i]
                numbers[i] = int32(key_of(bits_of(r[i])))
        else:
            for i in range(n):
                numbers[i] = int32(key_of(bits_of(v[i])))
        for i in range(n, CHUNK):
            numbers[i] = 0  # behind all others of no magnitude
        _select(keys, count, places)
        for e in range(count):
            number = r[places[e]] if residual != 0 else v[places[e]]
            negative[e] = 1 if number < ZERO else 0
            sent[e] = abs(number)
            reaches[e] = 0
        mean = _mean_of(sent, reaches, count, 0)
        for e in range(count):
            reaches[e] = 1 if sent[e] >= mean else 0
        low, high = _mean_of(sent, reaches, count, 0), _mean_of(sent, reaches, count, 1)
        if not mean < INFINITY:
            low, high = NAN, NAN
        scales[2 * c], scales[2 * c + 1] = bfloat16_of(low), bfloat16_of(high)
        if residual != 0:
            low, high = float_of_bfloat16(scales[2 * c]), float_of_bfloat16(scales[2 * c + 1])
            for e in range(count):
                magnitude = high if reaches[e] == 1 else low
                left = r[places[e]] - (-magnitude if negative[e] == 1 else magnitude)
                r[places[e]] = left if magnitude < INFINITY else ZERO
            for i in range(n):
                if numbers[i] >= INFINITY_KEY:
                    r[i] = ZERO
        _write_chunk(wire + c * 3 * k // 2, codes + c * k // 4, k, count, places, negative, reaches)
    at = wire
    for width in (3 * k // 2, k // 4, 4):
        for i in range(chunks * width, pad16(chunks * width)):
            uint8_at(at)[i] = uint8(0)
        at += pad16(chunks * width)
    return 0


def chunktopk_decode(wire, out, numel, settings, add, scale):
    """Write numbers at their indices. Return how many indices are outside."""
    k = field(settings, 0)
    chunks, outside = (numel + CHUNK - 1) // CHUNK, 0
    codes = wire + pad16(chunks * 3 * k // 2)
    scales = uint16_at(codes + pad16(chunks * k // 4))
    places, numbers = int32_at(_chunk_room()), float32_at(_chunk_room())
    if add == 0:
        clear(out, numel)
    for c in range(chunks):
        n = min(CHUNK, numel - c * CHUNK)
        count = (n * k + CHUNK - 1) // CHUNK
        low, high = float_of_bfloat16(scales[2 * c]) * scale, float_of_bfloat16(scales[2 * c + 1]) * scale
        index, code, to = uint8_at(wire + c * 3 * k // 2), uint8_at(codes + c * k // 4), float32_at(out + 4 * c * CHUNK)
        for e in range(count):
            at = 3 * (e >> 1) + (e & 1)
            places[e] = ((int32(index[at]) | int32(index[at + 1]) << 8) >> 4 * (e & 1)) & 0xFFF
            bits = (int32(code[e >> 2]) >> 2 * (e & 3)) & 3
            magnitude = high if bits & 1 else low
            numbers[e] = -magnitude if bits >= 2 else magnitude
        for e in range(count):  # a loop of its own, so that more of these accesses wait for memory at the same time
            if places[e] < n:
                to[places[e]] += numbers[e]
            else:
                outside += 1
    return outside
