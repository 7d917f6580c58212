"""Workers of a KVStore that are slow, are done early, wait in vain, or are killed."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire as hvd
from gradwire.collectives import PeerLost
from tests.harness import World, meet
from tests.ranks.training import assert_survived, on_ranks

KNOWN_S = 60.0  # in which the end of a rank is known at last


@on_ranks(3)
def test_asynchronous_workers_wait_for_nobody_and_no_update_is_lost() -> None:
    """Begin on the last rank when the others have pushed and pulled ten times, without which they cannot have waited for it; then
    push at once, where two updates of a value at the same time would lose one of them."""
    kv = hvd.servers.KVStore("dist_async", servers=[0])
    rank, size, out, ones = hvd.rank(), hvd.size(), torch.zeros(20000), torch.ones(20000)
    slow = rank == size - 1
    kv.init("w", torch.zeros(20000))
    kv.set_optimizer(functools.partial(torch.optim.SGD, lr=1.0))
    for step in range(1, 11 if not slow else 1):
        kv.pushpull("w", ones, out=out)
        assert out.max() <= -step  # its own are in it, others perhaps
    kv.barrier()
    if slow:
        kv.push("w", ones)
    kv.barrier()
    kv.pull("w", out)
    before, pushes = 10 * (size - 1), 20
    assert torch.equal(out, torch.full((20000,), -1.0 - before))
    report = kv.report()
    assert report.updates == before + 1
    assert report.contributions == {**dict.fromkeys(range(size - 1), 10), size - 1: 1}
    assert report.staleness[before] == 1  # as many updates late as all others have made
    hvd.barrier()
    for _ in range(pushes):
        kv.push("w", ones)
    kv.barrier()
    kv.pull("w", out)
    assert torch.equal(out, torch.full((20000,), -1.0 - before - pushes * size))
    assert kv.report().updates == before + 1 + pushes * size
    kv.close()


@on_ranks(3)
def test_who_is_done_is_waited_for_no_more() -> None:
    """End on one rank earlier: it is waited for no more, but what it has pushed before the others counts in its round."""
    kv = hvd.servers.KVStore("dist_sync", servers=[0])
    rank, out = hvd.rank(), torch.zeros(2)
    kv.init("w", torch.zeros(2))
    rounds = 2 + rank
    for step in range(rounds):
        kv.push("w", torch.full((2,), 10.0**rank))
        if rank == 0 or step == rounds - 1:
            kv.pull("w", out)
            taking_part = [other for other in range(hvd.size()) if step < 2 + other]
            assert torch.equal(out, torch.full((2,), sum(10.0**other for other in taking_part)))
    kv.close()
    with pytest.raises(RuntimeError, match="closed"):
        kv.push("w", torch.zeros(2))


def lose_one(type: Any, dies: int) -> None:
    """Go on without one rank, or see the error that says that this cannot be."""
    hvd.init(timeout_s=60)
    kv = hvd.servers.KVStore(type, servers=[0, 1])
    kv.init(["a", "b"], [torch.zeros(2), torch.zeros(2)])  # at rank 0, at rank 1
    kv.set_optimizer(functools.partial(torch.optim.SGD, lr=1.0))
    outs = [torch.zeros(2), torch.zeros(2)]
    kv.pushpull(["a", "b"], [torch.ones(2), torch.ones(2)], out=outs)
    kv.barrier()
    meet("trained")
    if hvd.rank() == dies:
        os._exit(0)
    if type == "dist_sync":
        key, server = ("a", 0) if dies != 0 else ("b", 1)
        kv.push(key, torch.ones(2))
        at = "" if hvd.rank() == server else f" at the key-value store on rank {server}| by rank {server}"
        with pytest.raises(
            hvd.servers.QuorumLost, match=f"rank {hvd.rank()}: pull of key '{key}'({at}).*lost rank {dies}"
        ):
            kv.pull(key, outs[0])
    elif dies == 1:
        with pytest.raises(
            PeerLost, match=f"rank {hvd.rank()}: .* key 'b' at the key-value store on rank 1: lost rank 1"
        ):
            push_until_it_fails(kv, "b", outs[1])
        kv.pushpull("a", torch.ones(2), out=outs[0])
        assert outs[0].max() <= -1 - hvd.size()  # one of each rank, and its own
    else:
        for step in range(1, 6):
            kv.pushpull(["a", "b"], [torch.ones(2), torch.ones(2)], out=outs)
            assert max(out.max() for out in outs) <= -hvd.size() - step
        until = time.monotonic() + KNOWN_S
        while kv.report().lost != (dies,):
            assert time.monotonic() < until
            time.sleep(0.05)
    meet("survived", [rank for rank in range(hvd.size()) if rank != dies])
    kv.close(timeout_s=20)


def push_until_it_fails(kv: hvd.servers.KVStore, key: str, out: Tensor) -> None:
    """Push until the end of the server is known here, for some time at most."""
    until = time.monotonic() + KNOWN_S
    while time.monotonic() < until:
        kv.pushpull(key, torch.ones(2), out=out)


@pytest.mark.parametrize(("type", "dies"), [("dist_async", 2), ("dist_async", 1), ("dist_sync", 1)])
def test_a_rank_that_is_killed(failing_world: Callable[[int], World], type: str, dies: int) -> None:
    world = failing_world(3)
    world.start(lose_one, type, dies)
    assert_survived(world, [dies])
