"""Who does what at a parameter server: ranks that serve only, and groups that average before they push."""

import os
import threading
from collections.abc import Callable
from itertools import count

import pytest
import torch

import gradwire as hvd
from gradwire.collectives import CollectiveError, Communicator, PeerLost
from tests.harness import World, meet
from tests.ranks.test_parameter_server import STEPS, Interrupted, adam_of, served, simulated, train
from tests.ranks.training import assert_close, assert_same_on_all_ranks, assert_survived, network, on_ranks

GROUPS = ([0, 1], [2, 3])


@on_ranks(4)
def test_a_rank_may_serve_only() -> None:
    model = network().double()
    optimizer = hvd.servers.ParameterServer(adam_of(model), model.named_parameters(), workers=[1, 3, 2], servers=[0, 2])
    if hvd.rank() == 0:
        with pytest.raises(RuntimeError, match="rank 0: this rank serves only: call serve"):
            optimizer.step()
        optimizer.serve()
        report = optimizer.report()
        assert (report.servers, report.updates) == (1, STEPS)
        assert report.contributions == dict.fromkeys([1, 2, 3], STEPS)
    else:
        with pytest.raises(ValueError, match=r"serve\(\) is for ranks that serve only"):
            optimizer.serve()
        with pytest.raises(ValueError, match="no ranks that serve only"):
            optimizer.state_dict()
        train(model, optimizer, range(STEPS), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    optimizer.close()
    if hvd.rank() != 0:
        assert_close(model.parameters(), simulated([1, 2, 3], decay=0.5), rtol=1e-9, atol=1e-12)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("gradwire-server")]


@on_ranks(3)
def test_a_server_that_gets_no_parameters() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = hvd.servers.ParameterServer(torch.optim.SGD([parameter], lr=1.0), workers=[2])
    if hvd.rank() == 2:
        parameter.grad = torch.ones(3)
        optimizer.step()
        assert (parameter == 0).all()
        report = optimizer.report()
        optimizer.param_groups[0]["note"] = "what a server cannot be sent", object()
        with pytest.raises(TypeError, match=r"^rank 2: "):
            optimizer.step()
    else:
        optimizer.serve()
        report = optimizer.report()
    assert (report.servers, report.updates, report.lead) == ((0, 0, 0) if hvd.rank() == 1 else (1, 1, 0))
    assert "updates at" in str(report)
    optimizer.close()


@on_ranks(2)
def test_parameters_that_change_before_they_are_served_are_refused() -> None:
    model, optimizer = served(workers=[1])
    if hvd.rank() == 0:
        torch.nn.init.zeros_(model[0].weight)
        with pytest.raises(RuntimeError, match="have changed since"):
            optimizer.serve()
    else:
        with pytest.raises(CollectiveError):
            train(model, optimizer, count())  # the steps before serve() are served
    optimizer.close()


@on_ranks(4)
def test_what_does_not_fit_together_is_refused() -> None:
    for options in (
        {"workers": [1, 2], "quorum": 3},
        {"workers": [1, 4]},
        {"workers": [1, 2], "servers": [0]},  # rank 3 does nothing
        {"inner": hvd.global_process_set, "workers": [0, 1]},
        {"servers": [hvd.rank()]},
    ):
        with pytest.raises(ValueError, match=f"^rank {hvd.rank()}: "):
            served(**options)
    with (
        Communicator() as everyone,
        pytest.raises(ValueError, match=r"is ranks 0, 1, 2, 3 on rank 0, and not given on rank 3"),
    ):
        served(inner=None if hvd.rank() == 3 else everyone)


@on_ranks(4)
def test_groups_average_and_meet_at_the_server() -> None:
    mine = [hvd.add_process_set(group) for group in GROUPS][hvd.rank() // 2]
    model = network().double()
    optimizer = hvd.servers.ParameterServer(adam_of(model), model.named_parameters(), inner=mine)
    train(model, optimizer, range(STEPS))
    assert_same_on_all_ranks(model.parameters())
    assert_close(model.parameters(), simulated(range(4)), rtol=1e-9, atol=1e-12)
    assert set(optimizer.versions) == {STEPS}
    if hvd.rank() in (0, 2):
        report = optimizer.report()
        assert report.servers == 2
        assert report.contributions == {0: 2 * STEPS, 2: 2 * STEPS}
    else:
        with pytest.raises(RuntimeError, match="only the first rank of a group"):
            optimizer.report()
    hvd.barrier()
    optimizer.close()


@on_ranks(2)
def test_a_group_is_told_that_its_first_rank_was_interrupted() -> None:
    model = network()
    optimizer = hvd.servers.ParameterServer(Interrupted(model.parameters(), lr=0.1), inner=hvd.global_process_set)
    if hvd.rank() == 0:
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    else:
        with pytest.raises(CollectiveError, match="by rank 0 of the group: KeyboardInterrupt"):
            optimizer.step()
    hvd.barrier()
    optimizer.close()


def lose_one_of_a_group(dies: int, quorum: int) -> None:
    """Train on without one rank, or see on all ranks of a group the error that says why that cannot be."""
    hvd.init(timeout_s=60)
    mine = [hvd.add_process_set(group) for group in GROUPS][hvd.rank() // 2]
    model, optimizer = served(quorum=quorum, servers=[0], inner=mine, late="next")
    while optimizer.versions[0] < 2:
        train(model, optimizer, range(1))
    meet("trained")
    if hvd.rank() == dies:
        os._exit(0)
    if hvd.rank() // 2 == dies // 2:  # of its own group
        with pytest.raises(PeerLost):
            train(model, optimizer, range(100))
    elif dies == 0:
        with pytest.raises(PeerLost, match="lost rank 0") as caught:
            train(model, optimizer, range(100))
        assert caught.value.ranks == (0,)
    elif quorum == 2:
        with pytest.raises(hvd.servers.QuorumLost, match="fewer than the quorum of 2") as lost:
            train(model, optimizer, range(100))
        assert lost.value.ranks == (2,)
    else:
        train(model, optimizer, range(5))
        optimizer.close(timeout_s=20)
        return
    with pytest.raises(CollectiveError, match="broken by an earlier failure"):
        optimizer.step()
    optimizer.close(timeout_s=20)


@pytest.mark.parametrize(("dies", "quorum"), [(0, 2), (2, 2), (3, 1)])
def test_a_rank_of_a_group_that_is_killed(failing_world: Callable[[int], World], dies: int, quorum: int) -> None:
    world = failing_world(4)
    world.start(lose_one_of_a_group, dies, quorum)
    assert_survived(world, [dies])
