"""A 64-bit hash of memory, with which ranks check whether they hold the same bits.

The hash is the sum, modulo 2^64, of mixed(word ^ (place * 0x9E3779B97F4A7C15)) over the 64-bit words. Places count from 1.
`mixed` is Stafford's mix13 (2011), as in splitmix64. It is a bijection: a change within one word always changes the hash;
any other change does not change the hash with a probability of 2^-64.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: How many words are mixed at once: few enough that intermediate tensors stay small.
_WORDS_AT_ONCE = 1 << 20


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
