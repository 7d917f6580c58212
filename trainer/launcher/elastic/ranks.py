"""The assignment of ranks to the workers of an elastic job in its next epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradwire.trainer.world.epochs import Epoch


def next_epoch(before: Epoch | None, staying: Sequence[int], joining: Sequence[int], nodes: Mapping[int, int]) -> Epoch:
    """Return the epoch of the workers that stay and of those that join. nodes: the host of each worker.

    Workers that stay keep their order. A worker that joins takes the rank of a worker that its host has lost. If no worker of
    its host stays, it takes the rank of any lost worker. So if as many workers join as are lost, no rank changes. The ranks of
    a host are consecutive.
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
