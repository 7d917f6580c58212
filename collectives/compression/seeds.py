"""32-bit seeds of random draws, made of the numbers that identify a draw."""

from __future__ import annotations


def mixed(seed: int, value: int) -> int:
    """Return 32 bits that mix both numbers, so that close numbers give distant seeds (lowbias32: Wellons 2018)."""
    low = 0xFFFFFFFF
    x = (seed * 0x9E3779B9 + value + 1) & low
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & low
    x = ((x ^ (x >> 15)) * 0x846CA68B) & low
    return x ^ (x >> 16)


def rounding_seed(step: int, rank: int, chunk: int, shard: int, shot: int, seed: int = 0) -> int:
    """Return the seed of the stochastic rounding of one encoding. seed: the caller's, which differs between buffers."""
    for value in (step, rank, chunk, shard, shot):
        seed = mixed(seed, value)
    return seed
