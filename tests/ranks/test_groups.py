"""Communicators over sub-groups, overlapping ones too, and over hosts."""

import pytest
import torch
import torch.distributed as dist

from gradwire.collectives import Communicator
from gradwire.collectives.plan.algorithms import BETWEEN_HOSTS
from tests.harness import EXCHANGE_TIMEOUT_S, ON_EVERY_TRANSPORT, Worlds
from tests.ranks.exact import (
    SEGMENT_BYTES,
    SEVERAL_SEGMENTS,
    Checks,
    communicator,
    contribution,
    on_host,
    reduced,
    reductions,
)

pytestmark = ON_EVERY_TRANSPORT

OVERLAPPING = ((0, 1, 2), (1, 2, 3), (0, 3), (2,), (0, 1, 2, 3))


def overlapping_groups() -> list[str]:
    """The members of each group use theirs in orders that differ from rank to rank."""
    checks = Checks()
    here = dist.get_rank()
    groups = {members: dist.new_group(list(members)) for members in OVERLAPPING}
    comms = {
        members: Communicator(group, timeout_s=EXCHANGE_TIMEOUT_S, segment_bytes=SEGMENT_BYTES)
        for members, group in groups.items()
        if here in members
    }
    for members, comm in comms.items():
        assert (comm.rank, comm.size) == (members.index(here), len(members))
    order = list(comms)[here % 2 :: 2] + list(comms)[1 - here % 2 :: 2]
    tensors, works = {}, []
    for repeat in range(3):
        for members in order:
            comm = comms[members]
            tensor = contribution(comm.rank, comm.size, SEVERAL_SEGMENTS, torch.float32)
            tensors[repeat, members] = tensor
            works.append(comm.allreduce(tensor, async_op=True))
    for work in works:
        work.wait()
    for (repeat, members), tensor in tensors.items():
        with checks.case(repeat=repeat, members=members):
            checks.equal(tensor, reduced(len(members), SEVERAL_SEGMENTS, torch.float32))
    for members in sorted(comms):  # synchronous calls need one order that all follow
        comm = comms[members]
        with checks.case(members=members):
            assert comm.allgather_object(here) == list(members)
            tensor = torch.tensor([here])
            comm.broadcast(tensor, comm.size - 1)
            checks.equal(tensor, torch.tensor([members[-1]]))
        comm.close()
    return checks.failures


def beside_the_users_own_traffic() -> None:
    """A Communicator and the group it was made from, and two Communicators of one group, do not meet."""
    with communicator() as one, communicator() as other:
        tensors = [torch.full((SEVERAL_SEGMENTS,), float(one.rank + 1)) for _ in range(3)]
        if one.rank % 2:
            works = [one.allreduce(tensors[0], async_op=True), other.allreduce(tensors[1], "max", async_op=True)]
        else:
            works = [other.allreduce(tensors[1], "max", async_op=True), one.allreduce(tensors[0], async_op=True)]
        dist.all_reduce(tensors[2], dist.ReduceOp.MIN)
        for work in works:
            work.wait()
        expected = (one.size * (one.size + 1) / 2, float(one.size), 1.0)
        for tensor, value in zip(tensors, expected, strict=True):
            assert torch.equal(tensor, torch.full_like(tensor, value))


def on_hosts(host_of: list[str], algorithm: str) -> tuple[tuple[tuple[int, ...], ...], list[str]]:
    """Exact allreduces where rank r believes itself on the host named host_of[r]; the hosts, and the failures."""
    checks = Checks()
    with on_host(host_of[dist.get_rank()]):
        comm = communicator()
    with comm:
        for dtype, op, numel in reductions(comm.size):
            with checks.case(dtype=dtype, op=op, numel=numel):
                tensor = contribution(comm.rank, comm.size, numel, dtype, op)
                comm.allreduce(tensor, op, algorithm=algorithm)
                checks.equal(tensor, reduced(comm.size, numel, dtype, op))
        return comm.topology.hosts, checks.failures


def test_overlapping_groups(ranks: Worlds) -> None:
    assert ranks(4).run(overlapping_groups) == [[]] * 4


@pytest.mark.parametrize("world", [1, 2, 3])
def test_beside_the_users_own_traffic(ranks: Worlds, world: int) -> None:
    ranks(world).run(beside_the_users_own_traffic)


@pytest.mark.parametrize(
    ("layout", "hosts"),
    [
        ("aabb", ((0, 1), (2, 3))),
        ("abab", ((0, 2), (1, 3))),
        ("aabbc", ((0, 1), (2, 3), (4,))),
        ("aaaabbb", ((0, 1, 2, 3), (4, 5, 6))),
        ("abcabcab", ((0, 3, 6), (1, 4, 7), (2, 5))),
    ],
)
@pytest.mark.parametrize("algorithm", [*BETWEEN_HOSTS, "auto"])
def test_hosts(ranks: Worlds, layout: str, hosts: tuple[tuple[int, ...], ...], algorithm: str) -> None:
    assert ranks(len(layout)).run(on_hosts, list(layout), algorithm) == [(hosts, [])] * len(layout)
