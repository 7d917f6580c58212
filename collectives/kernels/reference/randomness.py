"""The random numbers of the codecs: a function of a position and a seed, the same on every kind of processor."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

#: Integers, or int64 tensors of them.
_Integers = TypeVar("_Integers", int, Tensor)


def lowbias32(index: _Integers, seed: int) -> _Integers:
    """Return 32 random bits for an index: Wellons' lowbias32 (2018) of index * 0x9E3779B9 + seed."""
    low = 0xFFFFFFFF
    x = (index * 0x9E3779B9 + seed) & low
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & low
    x = ((x ^ (x >> 15)) * 0x846CA68B) & low
    return x ^ (x >> 16)


def random_bits(numel: int, seed: int, device: torch.device) -> Tensor:
    """Return (numel,) int64, 32 random bits for each index."""
    return lowbias32(torch.arange(numel, device=device, dtype=torch.int64), seed)


def uniform(numel: int, seed: int, device: torch.device) -> Tensor:
    """Return (numel,) float32 in [0, 1), in steps of 2^-24."""
    return (random_bits(numel, seed, device) >> 8).to(torch.float32) * 2.0**-24


def stochastic(numbers: Tensor, random: Tensor) -> Tensor:
    """Round numbers to integers (float32), up if the uniform `random` is below the fraction, so that the mean is kept."""
    below = numbers.floor()
    return below + (random < numbers - below)
