"""Direct: every rank exchanges with every other rank in one round. Fewest rounds; p(p - 1) messages, and a risk of incast.

The two-shot allreduce (reduce-scatter, then allgather, each by one all-to-all) is the shape that quantized allreduce needs.
With p ranks and n bytes, per rank: reduce_scatter, allgather and alltoall 1 round, (p - 1)/p n bytes sent; allreduce 2 rounds,
2(p - 1)/p n, or 1 round, (p - 1) n, in which each rank adds all contributions by itself; scatter and broadcast 1 round in which
the root sends (p - 1)/p n and (p - 1) n; gather and reduce 1 round in which every other rank sends n/p and n. A rank adds the
contributions of the other ranks to its own in rank order.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.collectives.schedules.schedule import Action, Place, Schedule, Step, receive, send
from gradwire.collectives.schedules.spans import WHOLE, Layout, Span, split


def _each(place: Place) -> Layout:
    """Return the blocks of a buffer in which each rank has one."""
    return split(Span(0, place.size), place.size)


def _exchange(
    place: Place, blocks: int, sent: Sequence[Span], received: Sequence[Span], action: Action = Action.RECEIVE
) -> Schedule:
    """Return a schedule of one round; of none in a world of one. sent: the block that each rank is sent, or nothing. received:
    the block that comes from each rank, with `action`, or nothing."""
    steps: list[Step] = []
    if sent:
        for k in range(1, place.size):  # starting after this rank, so that not all ranks send to rank 0 first
            peer = (place.rank + k) % place.size
            steps.append(Step(Action.SEND, peer, sent[peer]))
    if received:
        for peer in range(place.size):
            if peer != place.rank:
                steps.append(Step(action, peer, received[peer]))
    return Schedule(place.rank, place.size, blocks, (tuple(steps),) if place.size > 1 else ())


def reduce_scatter(place: Place) -> Schedule:
    each = _each(place)
    return _exchange(place, place.size, each, [each[place.rank]] * place.size, Action.REDUCE)


def allgather(place: Place) -> Schedule:
    each = _each(place)
    return _exchange(place, place.size, [each[place.rank]] * place.size, each)


def allreduce(place: Place) -> Schedule:
    return reduce_scatter(place).then(allgather(place))


def one_shot(place: Place) -> Schedule:
    """Send the whole buffer to all other ranks, and add their buffers, in one round: an allreduce that sends no sums."""
    return _exchange(place, 1, WHOLE * place.size, WHOLE * place.size, Action.REDUCE)


def broadcast(place: Place) -> Schedule:
    if place.rank == place.root:
        return _exchange(place, 1, WHOLE * place.size, ())
    return Schedule(place.rank, place.size, 1, (receive(place.root, WHOLE),))


def reduce_to_root(place: Place) -> Schedule:
    if place.rank == place.root:
        return _exchange(place, 1, (), WHOLE * place.size, Action.REDUCE)
    return Schedule(place.rank, place.size, 1, (send(place.root, WHOLE),))


def scatter(place: Place) -> Schedule:
    each = _each(place)
    if place.rank == place.root:
        return _exchange(place, place.size, each, ())
    return Schedule(place.rank, place.size, place.size, (receive(place.root, each[place.rank : place.rank + 1]),))


def gather(place: Place) -> Schedule:
    each = _each(place)
    if place.rank == place.root:
        return _exchange(place, place.size, (), each)
    return Schedule(place.rank, place.size, place.size, (send(place.root, each[place.rank : place.rank + 1]),))


def alltoall(place: Place) -> Schedule:
    """Send block i of the source to rank i; the block from rank i lands in block i of the destination.

    In this collective alone, the two ends of a message name different blocks, so source and destination must be different
    buffers.
    """
    return _exchange(place, place.size, _each(place), _each(place))
