"""A 64-bit hash of memory, and copies of memory that also compute a checksum, so that the memory is read only once.

By the hash, ranks check whether they hold the same bits. It is the sum, modulo 2^64, of mixed(word ^ (place *
0x9E3779B97F4A7C15)) over the 64-bit words. Places count from 1. `mixed` is Stafford's mix13 (2011), as in splitmix64. It is a
bijection: a change within one word always changes the hash; any other change does not change the hash with a probability of
2^-64.

The checksum is Fletcher's (1982), modulo 2^64, over lines of 64 bytes. For each of the eight words of a line, it has the sum of
this word over all lines, and the sum of the running sums after each line, which depends on the order of the lines.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.collectives.kernels.layout import LINE_BYTES as LINE_BYTES

#: How many words are mixed at once: few enough that intermediate tensors stay small.
_WORDS_AT_ONCE = 1 << 20

#: The number of sums of a checksum.
SUMS = 2 * LINE_BYTES // 8


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


def hash_words(words: Tensor, place: int = 1) -> int:
    """Return the hash of words, int64 of shape (n,) on any device. place: the place of the first word."""
    total = 0
    for start in range(0, words.numel(), _WORDS_AT_ONCE):
        piece = words[start : start + _WORDS_AT_ONCE]
        places = torch.arange(place + start, place + start + piece.numel(), device=words.device, dtype=torch.int64)
        x = piece ^ (places * _signed(0x9E3779B97F4A7C15))
        x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
        x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
        total += int((x ^ _shifted(x, 31)).sum())
    return total % 2**64


def _shifted(x: Tensor, places: int) -> Tensor:
    """Return x shifted to the right with zeros; torch's own shift copies the sign."""
    return (x >> places) & ((1 << (64 - places)) - 1)


def _signed(number: int) -> int:
    """Return the int64 with the bits of a number below 2^64."""
    return number - 2**64 if number >= 2**63 else number
