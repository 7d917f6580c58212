"""Copies of memory that add up what they copy, so that it need not be read once more for a checksum.

The sums are Fletcher's (1982), modulo 2^64, of lines of 64 bytes: for each of the eight words of a line, the sum of this word
over all lines, and the sum of that sum after each line, by which the order of lines counts too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LINE_BYTES = 64
"""What is added at once. The last line of a piece is filled up with zeros."""

SUMS = 2 * LINE_BYTES // 8
"""How many sums there are."""


def add_pieces(sums: Tensor, pieces: Sequence[Tensor], target: Tensor | None = None) -> None:
    """Add the lines of pieces of memory to the sums of those before, and copy them, end to end.

    sums: int64 of shape (SUMS,), at first zeros. pieces: of any dtypes and shapes, contiguous. target: uint8 of shape (n,) for at
    least all lines, at an address that LINE_BYTES divides; None: nothing is copied. All are on the CPU.
    """
    first, second = sums.view(2, -1)
    at = 0
    for piece in pieces:
        lines = torch.zeros(-(-piece.nbytes // LINE_BYTES) * LINE_BYTES, dtype=torch.uint8)
        lines[: piece.nbytes] = piece.reshape(-1).view(torch.uint8)
        if target is not None:
            target[at : at + lines.numel()] = lines
        at += lines.numel()
        running = first + lines.view(torch.int64).view(-1, LINE_BYTES // 8).cumsum(0)
        second += running.sum(0)
        first.copy_(running[-1] if len(running) else first)
