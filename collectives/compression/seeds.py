"""32-bit seeds of random draws, made of the numbers that identify a draw."""

from __future__ import annotations

from gradwire.collectives.kernels.reference.randomness import lowbias32


def mixed(seed: int, value: int) -> int:
    """Return 32 bits that mix both numbers, so that close numbers give distant seeds."""
    return lowbias32(seed, value + 1)


def rounding_seed(step: int, rank: int, chunk: int, shard: int, shot: int, seed: int = 0) -> int:
    """Return the seed of the stochastic rounding of one encoding. seed: the caller's, which differs between buffers."""
    for value in (step, rank, chunk, shard, shot):
        seed = mixed(seed, value)
    return seed
