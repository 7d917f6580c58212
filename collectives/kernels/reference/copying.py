"""Copies of memory that also compute a checksum, so that the memory is read only once.

The checksum is Fletcher's (1982), modulo 2^64, over lines of 64 bytes. For each of the eight words of a line, it has the sum of
this word over all lines, and the sum of the running sums after each line, which depends on the order of the lines.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.collectives.kernels.layout import LINE_BYTES as LINE_BYTES

SUMS = 2 * LINE_BYTES // 8
"""The number of sums."""


def add_pieces(sums: Tensor, pieces: Sequence[Tensor], target: Tensor | None = None) -> None:
    """Add the lines of pieces of memory to the sums, and copy the pieces to target, one after the other.

    sums: int64 of shape (SUMS,), zeros before the first call. pieces: contiguous tensors of any dtypes and shapes. target:
    uint8 of shape (n,) with room for all lines, at a multiple of LINE_BYTES; None: copy nothing. All tensors are on the CPU.
    """
    first, second = sums.view(2, -1)
    at = 0
    for piece in pieces:
        lines = torch.zeros(-(-piece.nbytes // LINE_BYTES) * LINE_BYTES, dtype=torch.uint8, device="cpu")
        lines[: piece.nbytes] = piece.reshape(-1).view(torch.uint8)
        if target is not None:
            target[at : at + lines.numel()] = lines
        at += lines.numel()
        running = first + lines.view(torch.int64).view(-1, LINE_BYTES // 8).cumsum(0)
        second += running.sum(0)
        first.copy_(running[-1] if len(running) else first)
