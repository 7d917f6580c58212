"""Sparse codecs: the decoding of indices and values, and randomk."""

from __future__ import annotations

import numpy as np
from numba import float32, int64, njit

from gradwire.collectives.kernels.cpu.blocks import random_bits
from gradwire.collectives.kernels.cpu.intrinsics import field, float32_at, int32_at, int64_at
from gradwire.collectives.kernels.cpu.keys import INFINITY_KEY, LANES, TILE, forget_non_finite, reaching
from gradwire.collectives.kernels.cpu.scratch import PIECE, clear, room_for


def scatter(wire_indices, wire_values, count, out, n, add, scale):
    """Write numbers at their indices. Return how many indices are outside."""
    places, numbers, to = int32_at(wire_indices), float32_at(wire_values), float32_at(out)
    outside = 0
    if add == 0:
        clear(out, n)
    for e in range(count):
        i = int64(places[e])
        if i < 0 or i >= n:
            outside += 1
        else:
            to[i] += numbers[e] * scale
    return outside


@njit
def _begins(n, k, seed):
    """Return where the ring of n that random-k divides into k parts begins."""
    return (random_bits(k, seed) * n) >> 32


@njit
def _drawn(j, k, n, seed, begins):
    """Return the index that random-k draws from the j-th part; past the end of the ring, it is n too large."""
    begin = j * n // k
    return begins + begin + ((random_bits(j, seed) * ((j + 1) * n // k - begin)) >> 32)


def randomk_encode(values, residual, wire, n, settings, seed):
    k = field(settings, 0)
    v, r, out = float32_at(values), float32_at(residual), float32_at(wire)
    sums = residual if residual != 0 else values
    numbers = float32_at(sums)
    for j in range(k, (k + 3) // 4 * 4):  # up to a multiple of 16 bytes
        out[j] = 0
    # In the order of the indices, which begins with the first part beyond the end, they are read from the cache.
    begins = _begins(n, k, seed)
    j = 0
    while j < k and _drawn(j, k, n, seed, begins) < n:
        j += 1
    taken, j = 0, j % max(k, 1)
    i = _drawn(j, k, n, seed, begins) % n if k > 0 else n
    finite = True
    for begin in range(0, n, TILE):
        end = min(begin + TILE, n)
        if residual != 0:
            for e in range(begin, end):
                r[e] += v[e]
        for block in range(begin, end - LANES + 1, LANES):
            finite &= reaching(sums + 4 * block, INFINITY_KEY) == 0
        for e in range(end - (end - begin) % LANES, end):
            finite &= int64(int32_at(sums)[e]) & 0x7FFFFFFF < INFINITY_KEY
        while i < end and taken < k:
            out[j] = numbers[i]
            if residual != 0:
                r[i] = 0
            taken, j = taken + 1, (j + 1 if j + 1 < k else 0)
            i = _drawn(j, k, n, seed, begins)
            i = i - n if i >= n else i
    if not finite:
        for j in range(k):
            out[j] = float32(np.nan)
        if residual != 0:
            forget_non_finite(residual, 0, n)
    return 0


_places_room = room_for(8 * PIECE)


def randomk_decode(wire, out, n, settings, add, scale):
    k, seed = field(settings, 0), field(settings, 1)
    numbers, to = float32_at(wire), float32_at(out)
    if add == 0:
        for i in range(n):
            to[i] = 0
    places = int64_at(_places_room())
    length, beyond = n // max(k, 1), n % max(k, 1)
    begin, rest = _begins(n, k, seed), 0
    for first in range(0, k, PIECE):
        count = min(PIECE, k - first)
        for e in range(count):  # the index of _drawn, without a division for each
            rest += beyond
            longer = int64(rest >= k)
            rest -= longer * k
            end = begin + length + longer
            i = begin + ((random_bits(first + e, seed) * (end - begin)) >> 32)
            places[e] = i - n if i >= n else i
            begin = end
        for e in range(count):  # a loop of its own, so that more of these accesses wait for memory at the same time
            to[places[e]] += numbers[first + e] * scale
    return 0
