"""The plan of an exchange: how large buckets are, and whether they are exchanged beside backward() or after it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire as hvd
from gradwire.collectives import CollectiveError, Communicator
from tests.ranks.training import on_ranks

HUNDRED = 100
PLANS = {
    "one bucket after": hvd.ExchangePlan(None, at_end=True),
    "one bucket beside": hvd.ExchangePlan(None),
    "small after": hvd.ExchangePlan(100_000, at_end=True),
    "small beside": hvd.ExchangePlan(100_000),
}


def network() -> nn.Sequential:
    """Return a network whose gradients do not fit the first bucket of the usual plan, so that other plans are tried."""
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(300, 300), nn.Tanh())])


def optimizer_of(parameters: Iterable[Tensor], **options: Any) -> hvd.DistributedOptimizer:
    return hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.01, momentum=0.9), **options)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range, ranks: Iterable[int]) -> None:
    """Take steps on the batches of these ranks, whose mean is the batch."""
    for step in steps:
        batches = [torch.randn(4, 300, generator=torch.Generator().manual_seed(100 * step + rank)) for rank in ranks]
        optimizer.zero_grad()
        net(torch.cat(batches)).square().mean().backward()
        optimizer.step()


def weights(net: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def assert_same_on_all_ranks(net: nn.Module) -> None:
    mine = weights(net)
    everyones = hvd.allgather(mine[None])
    assert all(torch.equal(theirs, mine) for theirs in everyones)


@pytest.mark.parametrize("plan", PLANS)
@on_ranks(3)
def test_every_plan_trains_as_one_process(plan: str) -> None:
    net, alone = network(), network()
    optimizer = optimizer_of(net.parameters(), exchange_plan=PLANS[plan])
    assert optimizer.exchange_plan == PLANS[plan]
    train(net, optimizer, range(6), [hvd.rank()])
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.01, momentum=0.9), range(6), range(3))
    torch.testing.assert_close(weights(net), weights(alone), rtol=1e-5, atol=1e-7)
    assert_same_on_all_ranks(net)
    again = network()
    train(again, optimizer_of(again.parameters(), exchange_plan=PLANS[plan]), range(6), [hvd.rank()])
    assert torch.equal(weights(again), weights(net))


@on_ranks(2)
def test_a_plan_is_chosen_within_a_hundred_steps_and_is_the_same_on_all_ranks() -> None:
    net, other = network(), network()
    optimizer = optimizer_of(net.parameters())
    assert optimizer.exchange_plan is None
    train(net, optimizer, range(HUNDRED), [hvd.rank()])
    chosen = optimizer.exchange_plan
    assert chosen is not None
    assert hvd.allgather_object(chosen) == [chosen] * 2
    # The sum of two numbers does not depend on the buckets: what the trials did between changed no bit.
    train(other, optimizer_of(other.parameters(), bucket_bytes=70_000), range(HUNDRED), [hvd.rank()])
    assert torch.equal(weights(net), weights(other))


@on_ranks(2)
def test_a_small_model_has_its_plan_at_once() -> None:
    optimizer = optimizer_of(nn.Linear(3, 3).parameters(), check_replicas_every=None)
    assert optimizer.exchange_plan == hvd.ExchangePlan()


@pytest.mark.parametrize("compression", ["none", "fp16"])
@on_ranks(2)
def test_one_bucket_needs_no_thread(compression: str) -> None:
    """The thread that waits runs the exchange."""
    net = nn.Linear(300, 300)
    with Communicator() as communicator:
        optimizer = optimizer_of(net.parameters(), process_set=communicator, compression=compression)
        before = set(threading.enumerate())
        train(net, optimizer, range(3), [hvd.rank()])
        assert optimizer.stats.exchanges == 3
        assert set(threading.enumerate()) <= before
        optimizer.close()


@on_ranks(2)
def test_accumulation_and_a_pass_without_a_gradient_of_some_layers() -> None:
    net, alone = network(), network()
    optimizer = optimizer_of(net.parameters(), exchange_plan=PLANS["small after"], backward_passes_per_step=2)
    single = torch.optim.SGD(alone.parameters(), lr=0.01, momentum=0.9)
    for step in range(3):
        x = torch.randn(2, 2, 4, 300, generator=torch.Generator().manual_seed(step))
        for each in (optimizer, single):
            each.zero_grad()
        net(x[hvd.rank(), 0]).square().mean().backward()
        net[2:](x[hvd.rank(), 1]).square().mean().backward()  # the first layer has no part in it
        for rank in range(2):
            (alone(x[rank, 0]).square().mean() / 2 + alone[2:](x[rank, 1]).square().mean() / 2).backward()
        for each in (optimizer, single):
            each.step()
    torch.testing.assert_close(weights(net), weights(alone), rtol=1e-5, atol=1e-7)
    assert_same_on_all_ranks(net)


@pytest.mark.parametrize("when", ["small after", "small beside"])
@on_ranks(2)
def test_one_backward_that_reaches_two_optimizers_in_other_orders_on_each_rank(when: str) -> None:
    """Each rank waits first for the optimizer that its backward() reaches first. The other one must go on meanwhile."""
    first, second = network(), network()
    optimizers = [
        optimizer_of(net.parameters(), exchange_plan=PLANS[when], process_set=Communicator(timeout_s=20.0))
        for net in (first, second)
    ]
    order = [first, second] if hvd.rank() == 0 else [second, first]
    for step in range(3):
        x = torch.randn(4, 300, generator=torch.Generator().manual_seed(step))
        for optimizer in optimizers:
            optimizer.zero_grad()
        order[1](order[0](x)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    for net in (first, second):
        assert_same_on_all_ranks(net)


@pytest.mark.parametrize("plan", ["small after", "one bucket after"])
@on_ranks(2)
def test_a_backward_that_fails_on_all_ranks_can_be_repeated(plan: str) -> None:
    net, other = network(), network()
    optimizer = optimizer_of(net.parameters(), exchange_plan=PLANS[plan])

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        net[2:](Fails.apply(net[:2](torch.ones(4, 300)))).sum().backward()
    optimizer.synchronize()
    train(net, optimizer, range(3), [hvd.rank()])
    train(other, optimizer_of(other.parameters()), range(3), [hvd.rank()])
    assert torch.equal(weights(net), weights(other))


@on_ranks(2)
def test_a_rank_that_does_something_else_is_an_error_of_backward() -> None:
    net = network()
    communicator = Communicator(timeout_s=5.0)
    optimizer = optimizer_of(net.parameters(), exchange_plan=PLANS["small after"], process_set=communicator)
    train(net, optimizer, range(1), [hvd.rank()])
    other = lambda: communicator.allreduce(torch.zeros(3))  # noqa: E731
    with pytest.raises(CollectiveError):
        (other if hvd.rank() == 1 else net(torch.ones(4, 300)).sum().backward)()


@on_ranks(2)
def test_a_rank_may_join_while_plans_are_tried() -> None:
    net = network()
    optimizer = optimizer_of(net.parameters())
    for step in range(HUNDRED):
        if hvd.rank() == 1 and step == 20:
            break
        train(net, optimizer, range(step, step + 1), [hvd.rank()])
    hvd.join()
    assert optimizer.exchange_plan is not None or hvd.rank() == 1


@on_ranks(2)
def test_trials_go_on_if_steps_are_left_out() -> None:
    """As GradScaler does after an Inf."""
    net = network()
    optimizer = optimizer_of(net.parameters())
    for step in range(3 * HUNDRED // 2):
        optimizer.zero_grad()
        net(torch.ones(2, 300)).square().mean().backward()
        if step % 3:
            optimizer.step()
    assert optimizer.exchange_plan is not None
    assert_same_on_all_ranks(net)


@on_ranks(2)
def test_trials_go_on_with_a_closure_that_is_called_several_times() -> None:
    net = network()
    optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS(net.parameters(), lr=0.01, max_iter=4, history_size=2))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = net(torch.full((2, 300), 1.0 + hvd.rank())).square().mean()
        loss.backward()
        return loss

    for _ in range(30):
        optimizer.step(closure)
    assert_same_on_all_ranks(net)


@on_ranks(2)
def test_a_file_stores_the_plan(tmp_path: Path) -> None:
    path = tmp_path / f"plan{hvd.rank()}.json"  # only that of rank 0 counts
    net = network()
    optimizer = optimizer_of(net.parameters(), exchange_plan=path)
    assert optimizer.exchange_plan is None
    train(net, optimizer, range(HUNDRED), [hvd.rank()])
    assert path.exists() == (hvd.rank() == 0)
    chosen = optimizer.exchange_plan
    assert chosen is not None
    assert optimizer_of(network().parameters(), exchange_plan=os.fspath(path)).exchange_plan == chosen
    with pytest.raises(ValueError, match="bytes of gradients"):
        optimizer_of(network()[:2].parameters(), exchange_plan=path)


@on_ranks(2)
def test_what_does_not_fit_together_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    net = network()
    wrong: list[dict[str, Any]] = [
        {"exchange_plan": PLANS["small after"], "rule": hvd.rules.NextForward(net)},
        {"exchange_plan": tmp_path / "plan.json", "rule": hvd.rules.NextForward(net)},
        {"exchange_plan": tmp_path / "plan.json", "rule": hvd.rules.Sharded()},
        {"exchange_plan": tmp_path / "plan.json", "compression": "int8"},
        {"exchange_plan": tmp_path / "plan.json", "compression": "auto"},
        {"exchange_plan": tmp_path / "plan.json", "num_groups": 2},
        {"exchange_plan": tmp_path / "plan.json", "rule": hvd.rules.LocalUpdates(every=2)},
        {"exchange_plan": tmp_path / "absent" / "plan.json"},
        {"exchange_plan": PLANS["small after"] if hvd.rank() else None},
        {"exchange_plan": PLANS["small after"] if hvd.rank() else PLANS["small beside"]},
    ]
    for options in wrong:
        with pytest.raises(ValueError, match="plan"):
            optimizer_of(net.parameters(), **options)
    train(net, optimizer_of(net.parameters()), range(2), [hvd.rank()])
    assert_same_on_all_ranks(net)
