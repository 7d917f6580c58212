"""Hierarchical allreduce: inside hosts, across hosts, inside hosts; only one copy of the data crosses each host's link.

If the smallest of h hosts has g ranks, the buffer has g shards. (1) On every host, local rank i < g receives and reduces shard
i from its local peers; (2) the local ranks i of all hosts allreduce shard i among themselves, around a ring unless another
planner is given; (3) each of them sends shard i to its local peers. All g local ranks use the wire at once; hosts may differ in
size, and ranks may be numbered in any way. With the ring, per host and direction 2(h - 1)/h n bytes cross the link; a flat ring
sends 2(p - 1)/p n there when neighbours share hosts, and up to g times as much when they do not. 2 + 2(h - 1) rounds.
"""

from __future__ import annotations

from gradwire.collectives.schedules.algorithms import ring
from gradwire.collectives.schedules.schedule import Place, Planner, Round, Schedule, receive, reduce, send
from gradwire.collectives.schedules.spans import Span


def inside(place: Place, blocks: int = 1) -> tuple[Round, Round]:
    """Return the first and the last round. In them, each shard goes from the ranks of a host to its driver, the rank that
    allreduces it between hosts, and back. blocks: of a shard."""
    rank, hosts = place.rank, place.hosts
    local = next(host for host in hosts if rank in host)
    shards = min(len(host) for host in hosts)

    def shard(index: int) -> tuple[Span]:
        return (Span(index * blocks, (index + 1) * blocks),)

    mine = local.index(rank)
    driven = [(i, local[i]) for i in range(shards) if local[i] != rank]
    peers = [peer for peer in local if peer != rank]

    gather: Round = tuple(step for i, driver in driven for step in send(driver, shard(i)))
    spread: Round = tuple(step for i, driver in driven for step in receive(driver, shard(i)))
    if mine < shards:
        gather += tuple(step for peer in peers for step in reduce(peer, shard(mine)))
        spread = tuple(step for peer in peers for step in send(peer, shard(mine))) + spread
    return gather, spread


def allreduce(place: Place, inner: Planner = ring.allreduce) -> Schedule:
    """Return the schedule in which the drivers of a shard follow `inner` among themselves."""
    rank, hosts = place.rank, place.hosts
    local = next(host for host in hosts if rank in host)
    mine = local.index(rank)
    shards = min(len(host) for host in hosts)
    between = inner(Place(hosts.index(local), len(hosts)))
    blocks = between.blocks
    gather, spread = inside(place, blocks)
    if mine < shards:
        drivers = tuple(host[mine] for host in hosts)
        rounds = between.embedded(drivers, rank, place.size, mine * blocks, shards * blocks).rounds
    else:
        rounds = ((),) * len(between.rounds)
    if any(len(host) > 1 for host in hosts):
        rounds = (gather, *rounds, spread)
    return Schedule(rank, place.size, shards * blocks, rounds)
