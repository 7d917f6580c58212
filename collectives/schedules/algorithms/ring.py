"""Ring: every rank exchanges with its two neighbours only; p - 1 rounds a phase.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009). Bandwidth-optimal for
any p, but the number of rounds grows with p: for many ranks `rsag` sends the same bytes in far fewer rounds.
With p ranks and n bytes, per rank: reduce_scatter and allgather p - 1 rounds, (p - 1)/p n bytes sent; allreduce twice that.
"""

from __future__ import annotations

from gradwire.collectives.schedules.schedule import Place, Schedule, receive, reduce, send
from gradwire.collectives.schedules.spans import circular


def reduce_scatter(place: Place) -> Schedule:
    """Leave block r reduced on rank r; a partial sum travels once around the ring, gathering contributions."""
    rank, size = place.rank, place.size
    rounds = tuple(
        send((rank + 1) % size, circular(rank - 1 - k, 1, size))
        + reduce((rank - 1) % size, circular(rank - 2 - k, 1, size))
        for k in range(size - 1)
    )
    return Schedule(rank, size, size, rounds)


def allgather(place: Place) -> Schedule:
    """Send the rank's own block in the first round, and then the block that was received in the previous round."""
    rank, size = place.rank, place.size
    rounds = tuple(
        send((rank + 1) % size, circular(rank - k, 1, size))
        + receive((rank - 1) % size, circular(rank - 1 - k, 1, size))
        for k in range(size - 1)
    )
    return Schedule(rank, size, size, rounds)


def allreduce(place: Place) -> Schedule:
    """Follow reduce_scatter by allgather: 2(p - 1) rounds, 2(p - 1)/p n bytes sent by every rank."""
    return reduce_scatter(place).then(allgather(place))
