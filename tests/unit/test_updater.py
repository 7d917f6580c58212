"""The updater of a parameter server: who waits there is told whom it has lost, whoever that was to contribute."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from gradwire.collectives import CollectiveError, CollectiveTimeout, PeerLost
from gradwire.trainer.servers.aggregator import Scheme
from gradwire.trainer.servers.connection import QuorumLost
from gradwire.trainer.servers.updater import Updater

FAR_S = 60.0


def updater_of(scheme: Scheme, timeout_s: float = FAR_S) -> Updater:
    """Return the updater of rank 0, which serves three workers, as rank 2 does."""
    parameter = nn.Parameter(torch.zeros(3))
    return Updater(0, range(3), (0, 2), [parameter], torch.optim.SGD([parameter], lr=1.0), scheme, timeout_s)


def error_of_one_that_waits(updater: Updater, *lost: int) -> CollectiveError:
    """Have rank 1 take a step that needs another's, while these are lost in turn; return what it raises."""
    begin = threading.Barrier(2)

    def lose() -> None:
        begin.wait(FAR_S)
        for rank in lost:
            updater.lose(rank, PeerLost([rank], rank=0, operation="serving parameters", has_left=False))

    thread = threading.Thread(target=lose)
    thread.start()
    begin.wait(FAR_S)
    with pytest.raises(CollectiveError) as caught:
        updater.exchange(1, 0, 1.0, updater.flat.empty())
    thread.join()
    return caught.value


def test_nobody_waits_for_a_worker_when_a_serving_rank_is_lost() -> None:
    asynchronous = Scheme(quorum=1, grace_s=0.0, staleness=0, late="next")
    error = error_of_one_that_waits(updater_of(asynchronous), 2)  # rank 1 would wait for rank 0 by the bound
    assert isinstance(error, PeerLost)
    assert error.ranks == (2,)


def test_the_serving_rank_is_named_that_was_lost_first() -> None:
    synchronous = Scheme(quorum=3, grace_s=0.0, staleness=None, late="next")
    error = error_of_one_that_waits(updater_of(synchronous), 2, 0)
    assert isinstance(error, PeerLost)
    assert error.ranks == (2,)


def test_a_quorum_that_is_lost_is_told() -> None:
    updater = updater_of(Scheme(quorum=3, grace_s=0.0, staleness=None, late="next"))
    updater.lose(1, PeerLost([1], rank=0, operation="serving parameters", has_left=False))
    with pytest.raises(QuorumLost) as caught:
        updater.exchange(0, 0, 1.0, updater.flat.empty())
    assert caught.value.ranks == (1,)


def test_the_quorum_that_is_lost_is_smaller_by_those_that_have_left() -> None:
    updater = updater_of(Scheme(quorum=3, grace_s=0.0, staleness=None, late="next"))
    updater.leave(2)
    updater.lose(1, PeerLost([1], rank=0, operation="serving parameters", has_left=False))
    with pytest.raises(QuorumLost, match="fewer than the quorum of 2") as caught:
        updater.exchange(0, 0, 1.0, updater.flat.empty())
    assert caught.value.quorum == 2


def test_who_holds_an_update_up_is_named() -> None:
    updater = updater_of(Scheme(quorum=3, grace_s=0.0, staleness=None, late="next"), timeout_s=0.0)
    with pytest.raises(CollectiveTimeout) as caught:
        updater.exchange(1, 0, 1.0, updater.flat.empty())
    assert caught.value.waiting_for == (0, 2)
