"""Circulant reduce-scatter and allgather: logarithmic rounds and optimal bytes for any number of ranks.

Träff, "Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms" (2024). The skips are p, ceil(p/2), ..., 1; in the
round of skip s a rank exchanges with the ranks s before and s after it, so no power of two is needed and nothing is folded.
With p ranks and n bytes, per rank: reduce_scatter and allgather ceil(log2 p) rounds, (p - 1)/p n bytes sent; allreduce
twice that; broadcast 1 + ceil(log2 p) rounds, up to 2(p - 1)/p n bytes sent.
"""

from __future__ import annotations

from itertools import pairwise

from gradwire.collectives.schedules.algorithms import direct
from gradwire.collectives.schedules.schedule import Place, Schedule, receive, reduce, send
from gradwire.collectives.schedules.spans import circular


def _skips(size: int) -> list[tuple[int, int]]:
    """Return consecutive pairs (larger, smaller) of p, ceil(p/2), ..., 1."""
    skips = [size]
    while skips[-1] > 1:
        skips.append(-(-skips[-1] // 2))
    return list(pairwise(skips))


def reduce_scatter(place: Place) -> Schedule:
    """Leave block r reduced on rank r. Each round halves the number of blocks, from its own on, that a rank still reduces."""
    rank, size = place.rank, place.size
    rounds = tuple(
        send((rank + skip) % size, circular(rank + skip, larger - skip, size))
        + reduce((rank - skip) % size, circular(rank, larger - skip, size))
        for larger, skip in _skips(size)
    )
    return Schedule(rank, size, size, rounds)


def allgather(place: Place) -> Schedule:
    """Mirror reduce_scatter: skips in reverse, messages the other way."""
    rank, size = place.rank, place.size
    rounds = tuple(
        send((rank - skip) % size, circular(rank, larger - skip, size))
        + receive((rank + skip) % size, circular(rank + skip, larger - skip, size))
        for larger, skip in reversed(_skips(size))
    )
    return Schedule(rank, size, size, rounds)


def allreduce(place: Place) -> Schedule:
    """Follow reduce_scatter by allgather: 2 ceil(log2 p) rounds, 2(p - 1)/p n bytes sent by every rank."""
    return reduce_scatter(place).then(allgather(place))


def broadcast(place: Place) -> Schedule:
    """Scatter the blocks from the root, then allgather (van de Geijn): no rank sends more than 2(p - 1)/p n bytes."""
    return direct.scatter(place).then(allgather(place))
