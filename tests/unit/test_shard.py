"""The shard of a parameter server: who waits there is told whom it has lost, whoever that was to contribute."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from collectives import CollectiveError, CollectiveTimeout, PeerLost
from trainer.rules.aggregator import Policy
from trainer.rules.server import QuorumLost, Shard

FAR_S = 60.0


def shard_of(policy: Policy, timeout_s: float = FAR_S) -> Shard:
    """Return the shard of rank 0, which serves three workers, as rank 2 does."""
    parameter = nn.Parameter(torch.zeros(3))
    return Shard(0, range(3), (0, 2), [parameter], torch.optim.SGD([parameter], lr=1.0), policy, timeout_s)


def error_of_one_that_waits(shard: Shard, *lost: int) -> CollectiveError:
    """Have rank 1 take a step that needs another's, while these are lost in turn; return what it raises."""
    begin = threading.Barrier(2)

    def lose() -> None:
        begin.wait(FAR_S)
        for rank in lost:
            shard.lose(rank, PeerLost([rank], rank=0, operation="serving parameters", has_left=False))

    thread = threading.Thread(target=lose)
    thread.start()
    begin.wait(FAR_S)
    with pytest.raises(CollectiveError) as caught:
        shard.exchange(1, 0, 1.0, shard.flat.empty())
    thread.join()
    return caught.value


def test_nobody_waits_for_a_worker_when_a_serving_rank_is_lost() -> None:
    asynchronous = Policy(quorum=1, grace_s=0.0, staleness=0, late="next")
    error = error_of_one_that_waits(shard_of(asynchronous), 2)  # rank 1 would wait for rank 0 by the bound
    assert isinstance(error, PeerLost)
    assert error.ranks == (2,)


def test_the_serving_rank_is_named_that_was_lost_first() -> None:
    synchronous = Policy(quorum=3, grace_s=0.0, staleness=None, late="next")
    error = error_of_one_that_waits(shard_of(synchronous), 2, 0)
    assert isinstance(error, PeerLost)
    assert error.ranks == (2,)


def test_a_quorum_that_is_lost_is_told() -> None:
    shard = shard_of(Policy(quorum=3, grace_s=0.0, staleness=None, late="next"))
    shard.lose(1, PeerLost([1], rank=0, operation="serving parameters", has_left=False))
    with pytest.raises(QuorumLost) as caught:
        shard.exchange(0, 0, 1.0, shard.flat.empty())
    assert caught.value.ranks == (1,)


def test_who_holds_an_update_up_is_named() -> None:
    shard = shard_of(Policy(quorum=3, grace_s=0.0, staleness=None, late="next"), timeout_s=0.0)
    with pytest.raises(CollectiveTimeout) as caught:
        shard.exchange(1, 0, 1.0, shard.flat.empty())
    assert caught.value.waiting_for == (0, 2)
