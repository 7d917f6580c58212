"""Binomial tree: fewest messages in all (p - 1 a phase); segments of a large buffer flow through it as a pipeline.

Thakur, Rabenseifner and Gropp (2005), sections 4.1 and 4.4. With p ranks and n bytes: broadcast and reduce take
ceil(log2 p) rounds, broadcast's root sends ceil(log2 p) n bytes, in reduce every rank but the root sends n. allreduce is a
reduce to rank 0 and a broadcast from it: 2 ceil(log2 p) rounds, 2(p - 1) messages of n bytes over all ranks.
"""

from __future__ import annotations

from gradwire.collectives.plan.schedule import Place, Round, Schedule, receive, reduce, send
from gradwire.collectives.plan.spans import Span

_ALL = (Span(0, 1),)


def _levels(place: Place) -> list[tuple[int | None, int | None]]:
    """Return for each level, from the leaves up: (parent to send to, child to receive from), each None where there is none."""
    rank, size, root = place.rank, place.size, place.root
    virtual = (rank - root) % size
    levels: list[tuple[int | None, int | None]] = []
    distance = 1
    while distance < size:
        parent = child = None
        if virtual % distance == 0:
            if virtual & distance:
                parent = (virtual - distance + root) % size
            elif virtual + distance < size:
                child = (virtual + distance + root) % size
        levels.append((parent, child))
        distance *= 2
    return levels


def reduce_to_root(place: Place) -> Schedule:
    rounds: list[Round] = [
        (send(parent, _ALL) if parent is not None else ()) + (reduce(child, _ALL) if child is not None else ())
        for parent, child in _levels(place)
    ]
    return Schedule(place.rank, place.size, 1, tuple(rounds))


def broadcast(place: Place) -> Schedule:
    rounds: list[Round] = [
        (receive(parent, _ALL) if parent is not None else ()) + (send(child, _ALL) if child is not None else ())
        for parent, child in reversed(_levels(place))
    ]
    return Schedule(place.rank, place.size, 1, tuple(rounds))


def allreduce(place: Place) -> Schedule:
    return reduce_to_root(place).then(broadcast(place))
