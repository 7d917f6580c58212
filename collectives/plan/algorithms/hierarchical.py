"""Hierarchical allreduce: inside hosts, across hosts, inside hosts; only one copy of the data crosses each host's link.

With h hosts, the smallest of g ranks: the buffer has g shards of h blocks. (1) On every host rank i < g gathers and reduces
shard i from its local peers; (2) the ranks i of all hosts allreduce shard i among themselves around a ring;
(3) each hands shard i to its local peers. All g local ranks drive the wire at once; hosts may differ in size, and ranks may
be numbered in any way. Per host and direction 2(h - 1)/h n bytes cross the link; a flat ring sends 2(p - 1)/p n there when
neighbours share hosts, and up to g times as much when they do not. 2 + 2(h - 1) rounds.
"""

from __future__ import annotations

from collectives.plan.algorithms import ring
from collectives.plan.schedule import Place, Round, Schedule, receive, reduce, send
from collectives.plan.spans import Span


def inside(place: Place, across: int = 1) -> tuple[Round, Round]:
    """The first round and the last, of shards of `across` blocks: each from the other ranks of a host to its driver, and back."""
    rank, hosts = place.rank, place.hosts
    local = next(host for host in hosts if rank in host)
    shards = min(len(host) for host in hosts)

    def shard(index: int) -> tuple[Span]:
        return (Span(index * across, (index + 1) * across),)

    mine = local.index(rank)
    driven = [(i, local[i]) for i in range(shards) if local[i] != rank]
    peers = [peer for peer in local if peer != rank]

    gather: Round = tuple(step for i, driver in driven for step in send(driver, shard(i)))
    spread: Round = tuple(step for i, driver in driven for step in receive(driver, shard(i)))
    if mine < shards:
        gather += tuple(step for peer in peers for step in reduce(peer, shard(mine)))
        spread = tuple(step for peer in peers for step in send(peer, shard(mine))) + spread
    return gather, spread


def allreduce(place: Place) -> Schedule:
    rank, hosts = place.rank, place.hosts
    local = next(host for host in hosts if rank in host)
    mine = local.index(rank)
    across, shards = len(hosts), min(len(host) for host in hosts)
    gather, spread = inside(place, across)
    between: tuple[Round, ...] = ((),) * len(ring.allreduce(Place(0, across)).rounds)
    if mine < shards:
        drivers = tuple(host[mine] for host in hosts)
        inner = ring.allreduce(Place(hosts.index(local), across))
        between = inner.embedded(drivers, rank, place.size, mine * across, shards * across).rounds
    rounds = (gather, *between, spread) if any(len(host) > 1 for host in hosts) else between
    return Schedule(rank, place.size, shards * across, rounds)
