"""The parameter server: against the same training simulated in one process, with backups, asynchronous, and with losses."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire as hvd
from gradwire.collectives import CollectiveError, CollectiveTimeout, PeerLost
from tests.harness import ABOVE_TRANSPORTS, World, meet
from tests.ranks.training import (
    assert_close,
    assert_equal,
    assert_same_on_all_ranks,
    assert_survived,
    batch_of,
    copies,
    loss_of,
    network,
    on_ranks,
)
from tests.soak.ranks import leave

STEPS = 6


def adam_of(model: nn.Sequential) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 0.02}, {"params": model[2].parameters()}], lr=0.01
    )


def sgd_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def served(**options: Any) -> tuple[nn.Sequential, hvd.servers.ParameterServer]:
    model = network().double()
    return model, hvd.servers.ParameterServer(sgd_of(model), **options)


def weight_of(rank: int) -> float:
    return 1.0 + rank


def train(
    model: nn.Module, optimizer: hvd.servers.ParameterServer, steps: Iterable[int], scheduler: Any = None
) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, batch_of(step, hvd.rank(), torch.float64)).backward()
        optimizer.step(weight=weight_of(hvd.rank()))
        if scheduler is not None:
            scheduler.step()


@on_ranks(3)
def test_a_rank_without_samples() -> None:
    """Its gradients are NaN; where no rank has samples, the parameters stay as they are."""
    model, optimizer = served()
    expected = network().double()
    loss_of(expected, batch_of(0, 1, torch.float64)).backward()
    for weights in ((0, 3, 0), (0, 0, 0)):
        optimizer.zero_grad()
        weight = weights[hvd.rank()]
        (loss_of(model, batch_of(0, hvd.rank(), torch.float64)) * (1 if weight else float("nan"))).backward()
        optimizer.step(weight=weight)
        if any(weights):
            sgd_of(expected).step()
        assert_close(model.parameters(), expected.parameters(), rtol=1e-12, atol=1e-12)
    optimizer.close()


def simulated(ranks: Iterable[int], decay: float = 1.0) -> list[Tensor]:
    """Return the parameters after the same steps, by the weighted average of these ranks' gradients. decay: of the learning
    rate, by step."""
    ranks = list(ranks)
    model = network().double()
    optimizer = adam_of(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
    total = sum(map(weight_of, ranks))
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in ranks:
            (loss_of(model, batch_of(step, rank, torch.float64)) * (weight_of(rank) / total)).backward()
        optimizer.step()
        scheduler.step()
    return copies(model.parameters())


@ABOVE_TRANSPORTS
@on_ranks()
@pytest.mark.parametrize(
    ("size", "servers"),
    [(2, None), (3, [2]), pytest.param(1, None, marks=pytest.mark.wide)],
)
def test_with_all_ranks_as_quorum_it_is_the_average(servers: list[int] | None) -> None:
    model = network().double()
    optimizer = hvd.servers.ParameterServer(adam_of(model), model.named_parameters(), servers=servers)
    train(model, optimizer, range(STEPS), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    assert_close(model.parameters(), simulated(range(hvd.size()), decay=0.5), rtol=1e-9, atol=1e-12)
    assert_same_on_all_ranks(model.parameters())
    report = optimizer.report()
    count = min(4, hvd.size()) if servers is None else len(servers)  # as many as there are parameters, at most
    assert set(optimizer.versions) == {STEPS}
    assert (report.servers, report.updates, report.late) == (count, STEPS * count, 0)
    assert report.staleness == {0: STEPS * count * hvd.size()}
    assert report.contributions == dict.fromkeys(range(hvd.size()), STEPS * count)
    assert "0 late" in str(report)
    hvd.barrier()
    optimizer.close()
    optimizer.close()
    with pytest.raises(RuntimeError, match="closed"):
        optimizer.step()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("gradwire-server")]


@on_ranks(3)
def test_with_all_ranks_as_quorum_the_bits_are_the_same_whoever_serves() -> None:
    found: list[list[Tensor]] = []
    for servers in (None, [1], [0, 2]):
        model = network().double()
        optimizer = hvd.servers.ParameterServer(adam_of(model), servers=servers)
        train(model, optimizer, range(STEPS))
        found.append(copies(model.parameters()))
        optimizer.close()
    for other in found[1:]:
        assert_equal(found[0], other)


@on_ranks(2)
def test_a_checkpoint_goes_on_bit_for_bit() -> None:
    def made() -> tuple[nn.Module, hvd.servers.ParameterServer]:
        model = network().double()
        return model, hvd.servers.ParameterServer(adam_of(model))

    model, optimizer = made()
    train(model, optimizer, range(2))
    saved, parameters = optimizer.state_dict(), copies(model.parameters())
    train(model, optimizer, range(2, STEPS))
    again, resumed = made()
    with pytest.raises(ValueError, match=r"ranks \[1\] were given a state_dict without"):
        resumed.load_state_dict(saved if hvd.rank() == 0 else {})
    with pytest.raises(ValueError, match="rank 1 was given"):
        resumed.load_state_dict(hvd.broadcast_object(saved, 0))
    mine = saved["gradwire_server"]
    ahead = {**saved, "gradwire_server": {**mine, "updater": {**mine["updater"], "version": 3}}}
    with pytest.raises(ValueError, match="rank 0 was given"):
        resumed.load_state_dict(ahead if hvd.rank() == 0 else saved)
    with torch.no_grad():
        for parameter, value in zip(again.parameters(), parameters, strict=True):
            parameter.copy_(value)
    resumed.load_state_dict(saved)
    if hvd.rank() == 0:  # of one rank, what the collective look at the layout does not see
        broken = {**saved, "gradwire_server": {**mine, "updater": {"version": 2}}}
    with pytest.raises(ValueError, match="rank 0 was given"):
        resumed.load_state_dict(broken if hvd.rank() == 0 else saved)
    assert set(resumed.versions) == {2}
    train(again, resumed, range(2, STEPS))
    assert_equal(model.parameters(), again.parameters())
    optimizer.close()
    resumed.close()


@on_ranks(2)
def test_parameters_that_change_before_the_first_step_are_refused() -> None:
    model = network().double()
    optimizer = hvd.servers.ParameterServer(sgd_of(model), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # which changes nothing
    train(model, optimizer, range(1))
    saved = optimizer.state_dict()
    optimizer.close()
    if hvd.rank() == 1:
        nn.init.zeros_(model[0].weight)
    optimizer = hvd.servers.ParameterServer(sgd_of(model), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    with pytest.raises(RuntimeError, match="rank 1: this rank's parameters have changed"):
        optimizer.step()
    optimizer.close()
    optimizer = hvd.servers.ParameterServer(sgd_of(model), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer.load_state_dict(saved)  # servers take the parameters over now
    train(model, optimizer, range(1))
    assert_same_on_all_ranks(model.parameters())
    optimizer.close()


@on_ranks(2)
def test_a_parameter_that_is_thawed_later_is_refused() -> None:
    model = network().double()
    model[0].requires_grad_(False)
    optimizer = hvd.servers.ParameterServer(sgd_of(model), model.named_parameters())
    train(model, optimizer, range(1))
    model[0].requires_grad_(True)
    with pytest.raises(ValueError, match=r"'0\.weight' requires a gradient, and did not when"):
        optimizer.step()
    model[0].requires_grad_(False)
    train(model, optimizer, range(1, 2))
    optimizer.close()


@on_ranks(3)
def test_two_of_three_go_on_and_what_is_late_is_counted() -> None:
    """Begin the last rank's second step only when the others have made three more, so that it is three versions late."""
    model, optimizer = served(quorum=2, late="drop", servers=[0])
    slow = hvd.rank() == 2
    if slow:
        loss_of(model, batch_of(0, 2, torch.float64)).backward()
    else:
        train(model, optimizer, range(3))
        assert optimizer.versions == (3,)
    hvd.barrier()
    if slow:
        optimizer.step()
        assert optimizer.versions == (3,)
    hvd.barrier()
    train(model, optimizer, range(3, 4))
    assert optimizer.versions[0] >= 4
    hvd.barrier()
    report = optimizer.report()
    assert report.staleness[3] == 1
    assert report.dropped == report.late >= 1
    assert report.contributions == {0: 4, 1: 4, 2: 2}
    assert report.lead == 3
    hvd.barrier()
    optimizer.close()


@pytest.mark.parametrize("staleness", [None, 2])
@on_ranks(3)
def test_asynchronous_training_keeps_to_the_bound(staleness: int | None) -> None:
    """Train where every version is a contribution, so that the version says how far all ranks together are."""
    steps = 12
    model, optimizer = served(quorum=1, late="next", staleness=staleness, servers=[1])
    before = loss_of(model, batch_of(0, hvd.rank(), torch.float64)).item()
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss_of(model, batch_of(0, hvd.rank(), torch.float64)).backward()
        optimizer.step()
        (version,) = optimizer.versions
        if staleness is not None:  # the others have taken at least as many steps as this one, but for so many
            assert version >= step + (hvd.size() - 1) * (step - staleness)
    if staleness is not None:  # without a bound, the updates for the others' batches may all come last
        assert loss_of(model, batch_of(0, hvd.rank(), torch.float64)).item() < before
    hvd.barrier()
    report = optimizer.report()
    assert report.updates == steps * hvd.size()
    assert report.contributions == dict.fromkeys(range(hvd.size()), steps)
    assert sum(report.staleness.values()) == steps * hvd.size()
    assert report.late == sum(count for age, count in report.staleness.items() if age > 0)
    assert staleness is None or report.lead <= staleness
    hvd.barrier()
    optimizer.close()


@on_ranks(3)
def test_who_is_done_is_waited_for_no_more() -> None:
    model, optimizer = served(servers=[0])
    train(model, optimizer, range(2 + hvd.rank()))
    assert optimizer.versions == (2 + hvd.rank(),)
    optimizer.close()


class Broken(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise ArithmeticError("no step today")


@on_ranks(3)
def test_an_optimizer_that_raises_at_the_server_is_told_to_all() -> None:
    model = network().double()
    optimizer = hvd.servers.ParameterServer(Broken(model.parameters(), lr=0.1), servers=[0])
    before = copies(model.parameters())
    with pytest.raises(
        CollectiveError,
        match=rf"pull of the parameters by rank {hvd.rank()}: .*the optimizer has failed.*no step today",
    ):
        train(model, optimizer, range(1))
    assert_equal(before, model.parameters())
    hvd.barrier()
    optimizer.close()


class Interrupted(torch.optim.SGD):
    """Stands for Ctrl-C during a step of the rank that serves."""

    def step(self, closure: Any = None) -> None:
        raise KeyboardInterrupt


@on_ranks(1)
def test_after_an_interrupted_step_nothing_goes_on() -> None:
    model = network().double()
    optimizer = hvd.servers.ParameterServer(Interrupted(model.parameters(), lr=0.1))
    saved = optimizer.state_dict()
    with pytest.raises(KeyboardInterrupt):
        train(model, optimizer, range(1))
    for call in (optimizer.step, optimizer.state_dict, lambda: optimizer.load_state_dict(saved)):
        with pytest.raises(CollectiveError, match=r"broken by an earlier failure: KeyboardInterrupt$"):
            call()
    optimizer.close()


@on_ranks(2)
def test_what_cannot_be_meant_is_refused() -> None:
    model = network().double()

    def made(**options: Any) -> hvd.servers.ParameterServer:
        return hvd.servers.ParameterServer(sgd_of(model), **options)

    for name, *values in (
        ("quorum", 0, 3, 1 + hvd.rank()),
        ("grace_s", -1),
        ("staleness", -1),
        ("late", "never"),
        ("servers", [], [0, 0], [2], [True]),
        ("workers", 1),
        ("named_parameters", []),
    ):
        for value in values:
            with pytest.raises(ValueError, match=rf"^rank {hvd.rank()}: .*\b{name}"):
                made(**{name: value})
    uncopied = torch.optim.SGD(model.parameters())
    uncopied.lock = threading.Lock()  # type: ignore[attr-defined]
    for optimizer in (model, uncopied):
        with pytest.raises(TypeError, match=f"^rank {hvd.rank()}: "):
            hvd.servers.ParameterServer(optimizer)  # type: ignore[arg-type]
    made(servers=(0, 1) if hvd.rank() else [1, 0], quorum=2 if hvd.rank() else None).close()  # the same in other words
    server = made(quorum=1)
    for weight in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="weight"):
            server.step(weight=weight)
    with pytest.raises(ValueError, match="quorum"):
        server.state_dict()
    with pytest.raises(ValueError, match="cannot be added"):
        server.add_param_group({"params": []})
    server.close()


def end_while_serving() -> None:
    """Rank 2 serves, and ends as a script does, while rank 0 waits for an answer and rank 1 says nothing: both are told."""
    hvd.init(timeout_s=60)
    model, optimizer = served(servers=[2])
    if hvd.rank() == 2:
        while optimizer.report().contributions[0] == 0:
            time.sleep(0.01)
        leave()
    if hvd.rank() == 1:
        meet("told", [0, 1])
    with pytest.raises(PeerLost) as caught:
        train(model, optimizer, range(1))
    assert caught.value.ranks == (2,)
    if hvd.rank() == 0:
        meet("told", [0, 1])
    optimizer.close(timeout_s=20)


def stop_while_serving(timeout_s: float) -> tuple[float, tuple[int, ...]]:
    """Stop rank 0, which serves; return for how long the others waited, and for whom."""
    hvd.init(timeout_s=timeout_s)
    model, optimizer = served(servers=[0])
    train(model, optimizer, range(1))
    meet("trained")
    if hvd.rank() == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises(CollectiveTimeout) as caught:
        train(model, optimizer, range(1, 2))
    optimizer.close(timeout_s=1)
    return caught.value.seconds, caught.value.waiting_for


def test_a_server_that_is_stopped_is_named_after_one_deadline(failing_world: Callable[[int], World]) -> None:
    timeout_s = 4.0
    world = failing_world(2)
    world.start(stop_while_serving, timeout_s)
    for seconds, awaited in assert_survived(world, [0]):
        assert awaited == (0,)
        assert seconds <= timeout_s


def test_a_server_that_ends_blames_nobody(failing_world: Callable[[int], World]) -> None:
    world = failing_world(3)
    world.start(end_while_serving)
    assert_survived(world, [2])
