"""Which ranks the workers of an elastic job get in its next epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradwire.trainer.world.epochs import Epoch


def next_epoch(before: Epoch | None, staying: Sequence[int], joining: Sequence[int], nodes: Mapping[int, int]) -> Epoch:
    """Return the epoch of workers that stay and that join. nodes: the host of each worker.

    Those that stay keep their order. One that joins takes the rank of one that is gone from its host, or, where it is of a host
    without any that stay, of any that is gone. So nobody's rank changes where as many join as are gone. The ranks of a host are
    in a row.
    """
    old = () if before is None else before.workers
    places: list[int | None] = [worker if worker in staying else None for worker in old]
    kept = {nodes[worker] for worker in staying}
    rest = list(joining)
    for is_own_host in (True, False):
        for worker in [*rest]:
            for rank, node in enumerate(() if before is None else before.nodes):
                if places[rank] is None and (node == nodes[worker] if is_own_host else nodes[worker] not in kept):
                    places[rank] = worker
                    rest.remove(worker)
                    break
    workers = [worker for worker in [*places, *rest] if worker is not None]
    hosts = list(dict.fromkeys(nodes[worker] for worker in workers))
    workers.sort(key=lambda worker: hosts.index(nodes[worker]))
    return Epoch(0 if before is None else before.number + 1, tuple(workers), tuple(nodes[worker] for worker in workers))
