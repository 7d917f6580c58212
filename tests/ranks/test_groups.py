"""Communicators over sub-groups, overlapping ones too."""

import torch
import torch.distributed as dist

from gradwire.collectives import Communicator
from tests.harness import ABOVE_TRANSPORTS, EXCHANGE_TIMEOUT_S
from tests.ranks.exact import SEGMENT_BYTES, SEVERAL_SEGMENTS, Checks, communicator, contribution, reduced
from tests.ranks.training import on_ranks

pytestmark = ABOVE_TRANSPORTS

OVERLAPPING = ((0, 1, 2), (1, 2, 3), (0, 3), (2,), (0, 1, 2, 3))


@on_ranks(4, initialized=False)
def test_overlapping_groups() -> None:
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
    assert not checks.failures


@on_ranks(3, initialized=False)
def test_beside_the_users_own_traffic() -> None:
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
