"""Direct: every rank exchanges with every other rank in one round. Fewest rounds; p(p - 1) messages, and a risk of incast.

The two-shot allreduce (reduce-scatter, then allgather, each by one all-to-all) is the shape that quantized allreduce needs.
With p ranks and n bytes, per rank: reduce_scatter, allgather and alltoall 1 round, (p - 1)/p n bytes sent; allreduce 2 rounds,
2(p - 1)/p n, or 1 round, (p - 1) n, in which each rank adds all contributions by itself; scatter and broadcast 1 round in which
the root sends (p - 1)/p n and (p - 1) n; gather and reduce 1 round in which every other rank sends n/p and n. A rank adds the
contributions of the other ranks to its own in rank order.
"""

from __future__ import annotations

from gradwire.collectives.schedules.schedule import Place, Round, Schedule, receive, reduce, send
from gradwire.collectives.schedules.spans import WHOLE, Span


def _block(rank: int) -> tuple[Span]:
    return (Span(rank, rank + 1),)


def _others(place: Place) -> list[int]:
    """Return the other ranks, starting after this one, so that not all ranks send to rank 0 first."""
    return [(place.rank + k) % place.size for k in range(1, place.size)]


def _schedule(place: Place, blocks: int, steps: list[Round]) -> Schedule:
    """Return a schedule of one round made of all steps; none in a world of one."""
    merged = tuple(step for group in steps for step in group)
    return Schedule(place.rank, place.size, blocks, (merged,) if place.size > 1 else ())


def reduce_scatter(place: Place) -> Schedule:
    sends = [send(peer, _block(peer)) for peer in _others(place)]
    reduces = [reduce(peer, _block(place.rank)) for peer in sorted(_others(place))]
    return _schedule(place, place.size, sends + reduces)


def allgather(place: Place) -> Schedule:
    sends = [send(peer, _block(place.rank)) for peer in _others(place)]
    receives = [receive(peer, _block(peer)) for peer in sorted(_others(place))]
    return _schedule(place, place.size, sends + receives)


def allreduce(place: Place) -> Schedule:
    return reduce_scatter(place).then(allgather(place))


def one_shot(place: Place) -> Schedule:
    """Send the whole buffer to all other ranks, and add their buffers, in one round: an allreduce that sends no sums."""
    sends = [send(peer, WHOLE) for peer in _others(place)]
    return _schedule(place, 1, sends + [reduce(peer, WHOLE) for peer in sorted(_others(place))])


def broadcast(place: Place) -> Schedule:
    if place.rank == place.root:
        return _schedule(place, 1, [send(peer, WHOLE) for peer in _others(place)])
    return _schedule(place, 1, [receive(place.root, WHOLE)])


def reduce_to_root(place: Place) -> Schedule:
    if place.rank == place.root:
        return _schedule(place, 1, [reduce(peer, WHOLE) for peer in sorted(_others(place))])
    return _schedule(place, 1, [send(place.root, WHOLE)])


def scatter(place: Place) -> Schedule:
    if place.rank == place.root:
        return _schedule(place, place.size, [send(peer, _block(peer)) for peer in _others(place)])
    return _schedule(place, place.size, [receive(place.root, _block(place.rank))])


def gather(place: Place) -> Schedule:
    if place.rank == place.root:
        return _schedule(place, place.size, [receive(peer, _block(peer)) for peer in _others(place)])
    return _schedule(place, place.size, [send(place.root, _block(place.rank))])


def alltoall(place: Place) -> Schedule:
    """Send block i of the source to rank i; the block from rank i lands in block i of the destination.

    In this collective alone, the two ends of a message name different blocks, so source and destination must be different
    buffers.
    """
    sends = [send(peer, _block(peer)) for peer in _others(place)]
    receives = [receive(peer, _block(peer)) for peer in sorted(_others(place))]
    return _schedule(place, place.size, sends + receives)
