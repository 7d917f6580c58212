"""The codec randomk: numbers at indices that are drawn from a seed."""

from __future__ import annotations

import numpy as np
from numba import float32, int64, njit

from gradwire.collectives.kernels.cpu.blocks import pad16
from gradwire.collectives.kernels.cpu.calling import decoder, encoder
from gradwire.collectives.kernels.cpu.intrinsics import float32_at, int32_at
from gradwire.collectives.kernels.cpu.keys import INFINITY_KEY, LANES, TILE, forget_non_finite, reaching
from gradwire.collectives.kernels.cpu.randomness import random_bits


@njit
def _begins(n, k, seed):
    """Return where the ring of n that random-k divides into k parts begins."""
    return (random_bits(k, seed) * n) >> 32


@njit
def _drawn(j, k, n, seed, begins):
    """Return the index, n too large if it lies beyond the end, that random-k takes from the j-th part."""
    begin = j * n // k
    return begins + begin + ((random_bits(j, seed) * ((j + 1) * n // k - begin)) >> 32)


def _draw(values, residual, wire, n, k, seed):
    v, r, out = float32_at(values), float32_at(residual), float32_at(wire)
    sums = residual if residual != 0 else values
    numbers = float32_at(sums)
    for j in range(k, pad16(4 * k) // 4):
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


def _place(wire, out, n, k, seed, add, scale):
    numbers, to = float32_at(wire), float32_at(out)
    if add == 0:
        for i in range(n):
            to[i] = 0
    begins = _begins(n, k, seed)
    for j in range(k):
        i = _drawn(j, k, n, seed, begins)
        i = i - n if i >= n else i
        to[i] += numbers[j] * scale


randomk_encode, randomk_decode = encoder(_draw), decoder(_place)
