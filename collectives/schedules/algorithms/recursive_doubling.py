"""Recursive doubling: fewest rounds for small messages; every round exchanges the whole buffer.

Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005), section 4.1. With q the
largest power of two <= p: log2 q rounds and log2(q) n bytes sent per rank. When p > q, p - q ranks first send their
contribution to a neighbour and get the result back at the end: two more rounds, at most one more n bytes sent per rank. Pairs
add the same two operands, and addition commutes, so all ranks hold the same bits.
"""

from __future__ import annotations

from gradwire.collectives.schedules.schedule import Place, Round, Schedule, receive, reduce, send
from gradwire.collectives.schedules.spans import WHOLE


def allreduce(place: Place) -> Schedule:
    rank, size = place.rank, place.size
    power = 1 << (size.bit_length() - 1)
    folded = size - power
    outside = rank < 2 * folded and rank % 2 == 0

    fold: list[Round] = []
    unfold: list[Round] = []
    if folded:
        paired = rank < 2 * folded
        fold = [send(rank + 1, WHOLE) if outside else reduce(rank - 1, WHOLE) if paired else ()]
        unfold = [receive(rank + 1, WHOLE) if outside else send(rank - 1, WHOLE) if paired else ()]

    def original(virtual: int) -> int:
        return 2 * virtual + 1 if virtual < folded else virtual + folded

    virtual = rank // 2 if rank < 2 * folded else rank - folded
    doubling: list[Round] = []
    distance = 1
    while distance < power:
        peer = original(virtual ^ distance)
        doubling.append(() if outside else send(peer, WHOLE) + reduce(peer, WHOLE))
        distance *= 2
    return Schedule(rank, size, 1, tuple(fold + doubling + unfold))
