"""Binomial tree: fewest messages in all (p - 1 a phase); segments of a large buffer flow through it as a pipeline.

Thakur, Rabenseifner and Gropp (2005), sections 4.1 and 4.4. With p ranks and n bytes: broadcast and reduce take
ceil(log2 p) rounds, broadcast's root sends ceil(log2 p) n bytes, in reduce every rank but the root sends n. allreduce is a
reduce to the first rank that is not on a slow link, and a broadcast from it: 2 ceil(log2 p) rounds, 2(p - 1) messages of n
bytes over all ranks. Ranks on slow links (Place.slow) are leaves, as far as there are leaves: a leaf sends and receives n bytes;
in a ring it would send and receive 2(p - 1)/p n.
"""

from __future__ import annotations

from dataclasses import replace

from gradwire.collectives.schedules.schedule import Place, Round, Schedule, receive, reduce, send
from gradwire.collectives.schedules.spans import WHOLE


def _order(place: Place) -> list[int]:
    """Return the ranks by their position in the tree: the root has 0, and odd positions have no children."""
    ranks = [(place.root + position) % place.size for position in range(place.size)]
    if place.slow:
        ranks.sort(key=lambda rank: (rank != place.root, rank in place.slow))
        positions = sorted(range(place.size), key=lambda position: position % 2)
        ranks = [rank for _, rank in sorted(zip(positions, ranks, strict=True))]
    return ranks


def _levels(place: Place) -> list[tuple[int | None, int | None]]:
    """Return for each level, from the leaves up: (parent to send to, child to receive from), each None if there is none."""
    size, order = place.size, _order(place)
    position = order.index(place.rank)
    levels: list[tuple[int | None, int | None]] = []
    distance = 1
    while distance < size:
        parent = child = None
        if position % distance == 0:
            if position & distance:
                parent = order[position - distance]
            elif position + distance < size:
                child = order[position + distance]
        levels.append((parent, child))
        distance *= 2
    return levels


def reduce_to_root(place: Place) -> Schedule:
    rounds: list[Round] = [
        (send(parent, WHOLE) if parent is not None else ()) + (reduce(child, WHOLE) if child is not None else ())
        for parent, child in _levels(place)
    ]
    return Schedule(place.rank, place.size, 1, tuple(rounds))


def broadcast(place: Place) -> Schedule:
    rounds: list[Round] = [
        (receive(parent, WHOLE) if parent is not None else ()) + (send(child, WHOLE) if child is not None else ())
        for parent, child in reversed(_levels(place))
    ]
    return Schedule(place.rank, place.size, 1, tuple(rounds))


def allreduce(place: Place) -> Schedule:
    place = replace(place, root=next(rank for rank in range(place.size) if rank not in place.slow))
    return reduce_to_root(place).then(broadcast(place))
