"""The codec powersgd: vectors made orthonormal, and the product of two factors."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from gradwire.collectives.kernels.cpu.blocks import folded
from gradwire.collectives.kernels.cpu.calling import addresses, kernel_of
from gradwire.collectives.kernels.cpu.intrinsics import float32_at
from gradwire.collectives.kernels.cpu.stack import PIECE, room, settle, stream, streams


@njit
def _dot(a, b):
    """Return the sum of a * b, of a length that 128 divides, in the order of reference.block_sums."""
    sums = np.zeros(128)
    for begin in range(0, len(a), 128):
        for e in range(128):
            sums[e] += a[begin + e] * b[begin + e]
    return folded(sums)


def _orthonormalize(vectors, batch, rank, length):
    done = np.zeros((rank, (length + 127) // 128 * 128))
    for b in range(batch):
        for a in range(rank):
            vector, left = float32_at(vectors + 4 * (b * rank + a) * length), done[a]
            for e in range(length):
                left[e] = vector[e]
            before = _dot(left, left)
            for other in done[:a]:
                part = _dot(other, left)
                for e in range(length):
                    left[e] -= part * other[e]
            after = _dot(left, left)
            norm = np.sqrt(after)
            lost = after <= 1e-12 * before and before < np.inf
            for e in range(length):
                left[e] = 0.0 if lost else left[e] / norm
                vector[e] = left[e]


def _multiply(left, right, out, rank, rows, columns):
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


def powersgd_orthonormalize(vectors: torch.Tensor) -> None:
    kernel_of(_orthonormalize)(vectors.data_ptr(), *vectors.shape)


def powersgd_multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    kernel_of(_multiply)(*addresses(left, right, out), *left.shape, right.shape[1])
