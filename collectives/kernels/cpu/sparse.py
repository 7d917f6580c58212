"""The functions of reference.sparse for the CPU: the same bytes.

Each is compiled, or loaded from the disk, when it is first called.
"""

from __future__ import annotations

import numpy as np
import torch

from gradwire.collectives.kernels.cpu.blocks import folded
from gradwire.collectives.kernels.cpu.calling import Decoder, Encoder, addresses, kernel_of
from gradwire.collectives.kernels.cpu.chunks import chunktopk_decode, chunktopk_encode
from gradwire.collectives.kernels.cpu.deferred import float32, int64, njit
from gradwire.collectives.kernels.cpu.intrinsics import field, float32_at, float64_at, int32_at
from gradwire.collectives.kernels.cpu.keys import INFINITY_KEY, LANES, TILE, forget_non_finite, reaching
from gradwire.collectives.kernels.cpu.randomness import random_bits
from gradwire.collectives.kernels.cpu.selection import SAMPLES, SMALL, select
from gradwire.collectives.kernels.cpu.stack import PIECE, clear, room, settle, stream, streams
from gradwire.collectives.kernels.wire import pad16


def _scatter(wire_indices, wire_values, count, out, n, add, scale):
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


def _selected(
    values: torch.Tensor,
    residual: torch.Tensor | None,
    k: int,
    places: int,
    entries: int,
    *,
    momentum: torch.Tensor | None = None,
    decay: float = 0.0,
    tau: torch.Tensor | None = None,
) -> int:
    """Select into the part of a wire that begins at an address and holds so many entries. Return how many were."""
    n, slots = values.numel(), pad16(4 * entries) // 4
    capacity = min(n, max(4 * k + SMALL, SAMPLES))
    gathered = torch.empty((2, capacity + LANES), dtype=torch.int32, device="cpu")  # their indices, and they
    parts = places, places + 4 * slots, slots
    lists = gathered[0].data_ptr(), gathered[1].data_ptr(), capacity
    *numbers, threshold = addresses(values, residual, momentum, tau)
    return kernel_of(select).call(*numbers, decay, n, k, threshold, entries - k, *parts, *lists)


def _scattered(places: int, entries: int, count: int, out: torch.Tensor, add: bool, scale: float) -> None:
    """Scatter from the part of a wire at an address that has room for so many entries, `count` of them used."""
    n = out.numel()
    if kernel_of(_scatter).call(places, places + pad16(4 * entries), count, out.data_ptr(), n, add, scale):
        raise ValueError(f"the wire holds indices outside of [0, {n}): it was encoded from another number of elements")


def topk_encode(values: torch.Tensor, residual: torch.Tensor | None, wire: torch.Tensor, k: int) -> None:
    _selected(values, residual, k, wire.data_ptr(), k)


def topk_decode(wire: torch.Tensor, out: torch.Tensor, k: int, add: bool, scale: float) -> None:
    _scattered(wire.data_ptr(), k, k, out, add, scale)


def dgc_encode(
    values: torch.Tensor, residual: torch.Tensor, wire: torch.Tensor, k: int, momentum: torch.Tensor, decay: float
) -> None:
    _selected(values, residual, k, wire.data_ptr(), k, momentum=momentum, decay=decay)


def threshold_encode(
    values: torch.Tensor,
    residual: torch.Tensor | None,
    wire: torch.Tensor,
    k: int,
    slack: int,
    tau: torch.Tensor | None,
) -> None:
    if tau is None:
        tau = torch.zeros(1, dtype=torch.float32, device="cpu")
    count = _selected(values, residual, k, wire.data_ptr() + 16, k + slack, tau=tau)
    wire[:16].view(torch.int32).copy_(torch.tensor([count, 0, 0, 0], dtype=torch.int32, device="cpu"))


def threshold_decode(wire: torch.Tensor, out: torch.Tensor, k: int, slack: int, add: bool, scale: float) -> None:
    count = int(wire[:4].view(torch.int32))
    if not 0 <= count <= k + slack:
        raise ValueError(f"the wire holds {count} numbers where there is room for {k + slack}")
    _scattered(wire.data_ptr() + 16, k + slack, count, out, add, scale)


@njit
def _begins(n, k, seed):
    """Return where the ring of n that random-k divides into k parts begins."""
    return (random_bits(k, seed) * n) >> 32


@njit
def _drawn(j, k, n, seed, begins):
    """Return the index that random-k draws from the j-th part; past the end of the ring, it is n too large."""
    begin = j * n // k
    return begins + begin + ((random_bits(j, seed) * ((j + 1) * n // k - begin)) >> 32)


def _draw(values, residual, wire, n, settings, seed):
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


def _place(wire, out, n, settings, add, scale):
    k, seed = field(settings, 0), field(settings, 1)
    numbers, to = float32_at(wire), float32_at(out)
    if add == 0:
        for i in range(n):
            to[i] = 0
    begins = _begins(n, k, seed)
    for j in range(k):
        i = _drawn(j, k, n, seed, begins)
        i = i - n if i >= n else i
        to[i] += numbers[j] * scale
    return 0


randomk_encode, randomk_decode = Encoder(_draw), Decoder(_place)


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


def _orthonormalize(vectors, batch, rank, length, done):
    """done: zeros, float64, room for `rank` vectors whose lengths are rounded up to a multiple of 128."""
    padded = (length + 127) // 128 * 128
    for b in range(batch):
        for a in range(rank):
            vector, left = float32_at(vectors + 4 * (b * rank + a) * length), float64_at(done + 8 * a * padded)
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
                vector[e] = left[e]
    return batch


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
    return rows


def powersgd_orthonormalize(vectors: torch.Tensor) -> None:
    _, rank, length = vectors.shape
    done = torch.zeros((rank, (length + 127) // 128 * 128), dtype=torch.float64, device="cpu")
    kernel_of(_orthonormalize).call(vectors.data_ptr(), *vectors.shape, done.data_ptr())


def powersgd_multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    kernel_of(_multiply).call(*addresses(left, right, out), *left.shape, right.shape[1])
