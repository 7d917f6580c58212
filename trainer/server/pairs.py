"""What joins a server with its workers: a Communicator with each, in which the worker has rank 0, and the server rank 1."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from collectives import Communicator
from collectives.communicator import close_all
from trainer.world import current_world


def open_pairs(
    name: str,
    server: int,
    workers: Iterable[int],
    *,
    rank: int,
    world_ranks: Sequence[int],
    timeout_s: float | None = None,
) -> dict[int, Communicator]:
    """Return what joins a server with workers on other ranks, by worker; only those of which this rank is one.

    name: the same on all ranks, and of nothing else. rank: this one. world_ranks: by rank, its rank in the world. timeout_s: of
    each wait; None for that of init(). Collective: call it for one server after the other, in the same order on all ranks, so
    that nobody waits in a circle.
    """
    pairs: dict[int, Communicator] = {}
    try:
        for worker in workers:
            if worker != server and rank in (worker, server):
                of_two = f"{name}/{worker}/{server}"
                pairs[worker] = current_world().open_pair(world_ranks[worker], world_ranks[server], of_two, timeout_s)
    except BaseException:
        close_all(pairs.values())
        raise
    return pairs
