"""The random numbers of the codecs: a function of a position and a seed, the same on every kind of processor."""

from __future__ import annotations

import numpy as np
from numba import float32, int32, njit, uint32

from gradwire.collectives.kernels.cpu.intrinsics import FLOAT, call, instruction

_STEP = np.float32(2.0**-24)


@instruction(float32, float32)
def _floor(builder, number):
    """Return the largest integer that is not above, as a float (math.floor makes 64-bit integers)."""
    return call(builder, "llvm.floor.f32", FLOAT, number)


@njit
def random_bits(index, seed):
    """Return 32 random bits for a position: Wellons' lowbias32 (2018) of index * 0x9E3779B9 + seed."""
    x = uint32(uint32(uint32(index) * uint32(0x9E3779B9)) + seed)
    x = uint32(uint32(x ^ (x >> uint32(16))) * uint32(0x7FEB352D))
    x = uint32(uint32(x ^ (x >> uint32(15))) * uint32(0x846CA68B))
    return uint32(x ^ (x >> uint32(16)))


@njit
def uniform(index, seed):
    """Return a float32 in [0, 1) for a position, in steps of 2^-24."""
    return float32(int32(random_bits(index, seed) >> uint32(8))) * _STEP


@njit
def rounded_stochastically(number, index, seed):
    """Return one of the two integers beside a number, as a float, of which the number is the mean."""
    below = _floor(number)
    return below + (np.float32(1) if uniform(index, seed) < number - below else np.float32(0))
