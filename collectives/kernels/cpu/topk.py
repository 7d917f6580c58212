"""The codecs topk, dgc and threshold: the largest numbers, exactly or nearly so many, as indices and values."""

from __future__ import annotations

import torch
from numba import int64, njit

from gradwire.collectives.kernels.cpu.calling import addresses, kernel_of
from gradwire.collectives.kernels.cpu.intrinsics import float32_at, int32_at
from gradwire.collectives.kernels.cpu.keys import LANES
from gradwire.collectives.kernels.cpu.selection import SAMPLES, SMALL, select
from gradwire.collectives.kernels.cpu.stack import PIECE, room, settle, stream, streams
from gradwire.collectives.kernels.wire import pad16


@njit
def clear(out, n):
    """Set numbers to zero, many of them past the caches."""
    zeros, to = room(), float32_at(out)
    if not streams(out, n):
        for i in range(n):
            to[i] = 0
        return
    for i in range(PIECE):
        float32_at(zeros)[i] = 0
    for begin in range(0, n, PIECE):
        stream(zeros, out + 4 * begin, min(PIECE, n - begin))
    settle()


def _scatter(wire_indices, wire_values, count, out, n, add, scale):
    """Put numbers where their indices say. Return how many lie outside."""
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
    gathered = torch.empty((2, capacity + LANES), dtype=torch.int32)  # their indices, and they
    parts = places, places + 4 * slots, slots
    lists = gathered[0].data_ptr(), gathered[1].data_ptr(), capacity
    *numbers, threshold = addresses(values, residual, momentum, tau)
    return int(kernel_of(select)(*numbers, decay, n, k, threshold, entries - k, *parts, *lists))


def _scattered(places: int, entries: int, count: int, out: torch.Tensor, add: bool, scale: float) -> None:
    """Scatter from the part of a wire at an address that has room for so many entries, `count` of them used."""
    n = out.numel()
    if kernel_of(_scatter)(places, places + pad16(4 * entries), count, out.data_ptr(), n, add, scale):
        raise ValueError(f"the wire holds indices outside of [0, {n}): it was not encoded from as many numbers")


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
        tau = torch.zeros(1)
    count = _selected(values, residual, k, wire.data_ptr() + 16, k + slack, tau=tau)
    wire[:16].view(torch.int32).copy_(torch.tensor([count, 0, 0, 0], dtype=torch.int32))


def threshold_decode(wire: torch.Tensor, out: torch.Tensor, k: int, slack: int, add: bool, scale: float) -> None:
    count = int(wire[:4].view(torch.int32))
    if not 0 <= count <= k + slack:
        raise ValueError(f"the wire holds {count} numbers where there is room for {k + slack}")
    _scattered(wire.data_ptr() + 16, k + slack, count, out, add, scale)
