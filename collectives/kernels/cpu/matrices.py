"""The products of powersgd."""

from __future__ import annotations

import numpy as np
from numba import njit

from gradwire.collectives.kernels.cpu.blocks import folded
from gradwire.collectives.kernels.cpu.intrinsics import float32_at, float64_at
from gradwire.collectives.kernels.cpu.scratch import PIECE, clear, room, settle, stream, streams


@njit
def _dot(a, b, length):
    """Return the sum of a * b, of a length that 128 divides, in the order of reference.block_sums."""
    sums = float64_at(room())
    for e in range(128):
        sums[e] = 0
    for begin in range(0, length, 128):
        for e in range(128):
            sums[e] += a[begin + e] * b[begin + e]
    return folded(sums)


def orthonormalize(vectors, out, batch, rank, length, done, first, errors, numel):
    """Write orthonormal vectors to `out`, which may be `vectors`. done: zeros, float64, room for `rank` vectors whose lengths are
    rounded up to a multiple of 128. first, errors: 0, or those of powersgd_begin_next. numel: the length of an error."""
    padded = (length + 127) // 128 * 128
    for b in range(batch):
        finite = True
        for a in range(rank):
            begin = 4 * (b * rank + a) * length
            vector, to, left = float32_at(vectors + begin), float32_at(out + begin), float64_at(done + 8 * a * padded)
            for e in range(length):
                left[e] = vector[e]
            before = _dot(left, left, padded)
            for c in range(a):
                other = float64_at(done + 8 * c * padded)
                part = _dot(other, left, padded)
                for e in range(length):
                    left[e] -= part * other[e]
            after = _dot(left, left, padded)
            norm = np.sqrt(after)
            lost = after <= 1e-12 * before and before < np.inf
            for e in range(length):
                left[e] = 0.0 if lost else left[e] / norm
                to[e] = left[e]
            if lost and first != 0:
                for e in range(length):
                    to[e] = float32_at(first + begin)[e]
            finite &= before < np.inf  # in float64, no sum of finite squares overflows
        if first != 0 and not finite:
            begin = 4 * b * rank * length
            for e in range(rank * length):
                float32_at(out + begin)[e] = float32_at(first + begin)[e]
            clear(errors + 4 * b * numel, numel)
    return batch


def multiply(left, right, out, rank, rows, columns):
    streaming = streams(out, rows * columns) and columns % 16 == 0  # so that every row begins where a vector may
    piece = room()
    for begin in range(0, columns, PIECE):
        n = min(PIECE, columns - begin)
        for i in range(rows):
            target = out + 4 * (i * columns + begin)
            to = float32_at(piece if streaming else target)
            for a in range(rank):
                factor, row = float32_at(left)[a * rows + i], float32_at(right + 4 * (a * columns + begin))
                if a == 0:
                    for e in range(n):
                        to[e] = factor * row[e]
                else:
                    for e in range(n):
                        to[e] += factor * row[e]
            if streaming:
                stream(piece, target, n)
    if streaming:
        settle()
    return rows
