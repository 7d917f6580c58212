"""rules.NextForward, beside test_rules_table.py: what reads what before an update, and errors in the forward."""

from __future__ import annotations

import copy
import os
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import gradwire as hvd
from gradwire.collectives import PeerLost
from gradwire.trainer.reducer.deferred import order_by_need
from tests.harness import World, meet
from tests.ranks.test_rules_table import groups_of, used_wholly
from tests.ranks.training import (
    STEPS,
    Data,
    assert_equal,
    assert_survived,
    buckets_of,
    copies,
    loss_of,
    on_ranks,
    share,
    spy,
    state_of,
    take_steps,
)

Train = Callable[[nn.Module, Any, Data], Any]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups_of(model), lr=0.01)


def wrapped(
    kind: str,
    make: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    model_of: Callable[[], nn.Module] = used_wholly,
    **options: Any,
) -> tuple[nn.Module, hvd.DistributedOptimizer]:
    model = model_of()
    if kind == "next_forward":
        options = {"rule": hvd.rules.NextForward(model), **options}
    options = {"bucket_bytes": 12_000, **options}
    return model, hvd.DistributedOptimizer(make(model), model.named_parameters(), **options)


def trained(kind: str, steps: int = STEPS, **options: Any) -> tuple[nn.Module, hvd.DistributedOptimizer]:
    model, optimizer = wrapped(kind, **options)
    take_steps(model, optimizer, share, range(steps))
    return model, optimizer


@on_ranks(2)
def test_hooks_of_all_optimizers_run_once_a_step() -> None:
    """Also one that is registered when an update is due, which runs from the next step on."""
    called: list[str] = []
    with_hooks, optimizer = wrapped("next_forward")
    train = partial(take_steps, with_hooks, optimizer, share)
    train(range(3))
    handles = [register_optimizer_step_post_hook(lambda *_: called.append("post"))]
    train(range(3, 4))
    assert called == ["post"]
    handles.append(register_optimizer_step_pre_hook(lambda *_: called.append("pre")))
    handles.append(optimizer.register_step_pre_hook(lambda *_: called.append("own")))
    train(range(4, STEPS))
    assert called == ["post", *["pre", "own", "post"] * (STEPS - 4)]
    for handle in handles:
        handle.remove()
    plain, other = trained("backward")
    assert_equal(state_of(with_hooks, optimizer), state_of(plain, other))
    optimizer.close()
    other.close()


@on_ranks(2)
def test_what_reads_first_completes_the_update() -> None:
    """After a step that was put off, each of these sees what it sees without the rule."""
    expected_model, expected = trained("backward", steps=3)
    wanted = copies(expected_model.parameters())
    moments = [state["exp_avg"].clone() for state in expected.optimizer.state_dict()["state"].values()]

    def without_gradients(model: nn.Module, _: Any) -> Any:
        with torch.inference_mode():
            model.blocks(torch.zeros(1, 80))

    readers: dict[str, Callable[[nn.Module, Any], Any]] = {
        "state_dict of the model": lambda model, optimizer: model.state_dict(),
        "state_dict of a part": lambda model, optimizer: model.last.state_dict(),
        "state_dict of the optimizer": lambda model, optimizer: optimizer.state_dict(),
        "state_dict of the wrapped optimizer": lambda model, optimizer: optimizer.optimizer.state_dict(),
        "state": lambda model, optimizer: optimizer.state,
        "load_state_dict": lambda model, optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
        "a gradient": lambda model, optimizer: model.last.weight.grad.sum(),
        "settle": lambda model, optimizer: optimizer.settle(),
        "synchronize": lambda model, optimizer: optimizer.synchronize(),
        "a forward without gradients": without_gradients,
        "add_param_group": lambda model, optimizer: optimizer.add_param_group(
            {"params": [nn.Parameter(torch.ones(2))]}
        ),
        "broadcast_parameters": lambda model, optimizer: hvd.broadcast_parameters(model.parameters(), 0),
        "a closed optimizer": lambda model, optimizer: optimizer.close(),
    }
    for name, read in readers.items():
        model, optimizer = trained("next_forward", steps=3)
        memory = [each.detach() for each in model.parameters()]
        assert not any(map(torch.equal, memory, wanted)), name
        read(model, optimizer)
        assert_equal(model.parameters(), wanted)
        in_order = [parameter for group in optimizer.param_groups[:2] for parameter in group["params"]]
        assert_equal([optimizer.optimizer.state[parameter]["exp_avg"] for parameter in in_order], moments)
        optimizer.close()
    expected.close()


@on_ranks(2)
@pytest.mark.parametrize("last", ["backward", "step", "settle"])
def test_an_optimizer_that_is_deleted(last: str) -> None:
    """It warns if an update is due. Gradients that were not exchanged are an error; the others remain."""
    model, optimizer = trained("next_forward", steps=2)
    optimizer.zero_grad()
    loss_of(model, share(2)).backward()
    gradients = [model.last.weight.grad]
    if last != "backward":
        optimizer.step()
    if last == "settle":
        optimizer.settle()
    gradients.append(model.last.weight.grad)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del optimizer
    assert [warning.filename for warning in caught] == [__file__] * (last == "step")
    for gradient in gradients:
        with nullcontext() if last == "settle" else pytest.raises(RuntimeError, match=r"^rank \d: .* settle\(\)"):
            gradient.sum()
    hvd.barrier()


@on_ranks(2)
def test_checkpoints_midway_go_on_alike() -> None:
    """With codecs, whose residuals are of the last exchange."""
    options: dict[str, Any] = {"compression": hvd.ErrorFeedback("int8")}
    model, optimizer = trained("next_forward", **options)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again, resumed = trained("next_forward", steps=2, **options)
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for each, its in ((model, optimizer), (again, resumed)):
        take_steps(each, its, share, range(STEPS, STEPS + 3))
    assert_equal(state_of(again, resumed), state_of(model, optimizer))
    for each in (optimizer, resumed):
        each.close()


@on_ranks(3)
def test_ranks_agree_on_an_order_whoever_is_slow_where() -> None:
    """Two ranks are slow, each in computing another gradient: all send their buckets in one order, and have the bits of any."""
    sent: list[int] = []
    slow = {1: "blocks.2.weight", 2: "scale"}
    expected_model, expected = wrapped("backward", bucket_bytes=8000)
    model, optimizer = wrapped("next_forward", bucket_bytes=8000)
    spy(optimizer, lambda tensor, options: sent.append(tensor.untyped_storage().data_ptr()))
    if hvd.rank() in slow:
        model.get_parameter(slow[hvd.rank()]).register_hook(lambda gradient: time.sleep(0.02))
    for step in range(8):
        if step == 2:
            for net, each in ((model, optimizer), (expected_model, expected)):
                loss_of(net, share(step)).backward()
                each.synchronize()  # an exchange without a step
                each.zero_grad()
        sent.clear()
        take_steps(model, optimizer, share, [step])
        take_steps(expected_model, expected, share, [step])
    optimizer.settle()
    buckets = buckets_of(model)
    order = [buckets[place] for place in sent]
    assert len(order) == len(buckets) > 4
    assert hvd.allgather_object(order) == [order] * 3
    assert_equal(state_of(model, optimizer), state_of(expected_model, expected))
    for each in (optimizer, expected):
        each.close()


@pytest.mark.parametrize(
    ("ready_s", "exchange_s", "order"),
    [
        ([], [], []),
        ([0, 1, 2], [5, 1, 1], [0, 2, 1]),  # both wait for the network
        ([0, 1, 2], [1, 1, 1], [0, 1, 2]),  # the network waits for backward()
        ([0, 1, 2, 3], [2, 2, 2, 2], [0, 2, 3, 1]),  # the last is the one that the forward needs last
        ([0, 9, 2], [1, 1, 1], [0, 2, 1]),
        ([-3, -2, -1], [3, 1, 1], [0, 2, 1]),  # counted from the end of the first exchange
    ],
)
def test_the_network_has_work_and_the_first_layers_come_first(
    ready_s: list[float], exchange_s: list[float], order: list[int]
) -> None:
    assert order_by_need(ready_s, exchange_s) == order


@on_ranks(2)
def test_parameters_used_before_they_are_updated_are_an_error() -> None:
    model, optimizer = trained("next_forward")
    with pytest.raises(RuntimeError, match=r"^rank \d: a gradient of '.*' arrived, .* call settle\(\)"):
        sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.zero_grad()
    optimizer.settle()
    loss = loss_of(model, share(0))
    loss.backward(retain_graph=True)
    with pytest.raises(
        RuntimeError, match=r"while that of the backward\(\) before was being exchanged: .* between two calls"
    ):
        loss.backward()
    optimizer.settle()
    optimizer.close()


@on_ranks(2)
def test_what_does_not_go_with_it_is_refused() -> None:
    model = used_wholly()
    rule = hvd.rules.NextForward(model)
    for options, message in (
        ({"op": hvd.Adasum}, "does not support op='adasum'"),
        ({"gradient_as_bucket_view": False}, "does not support gradient_as_bucket_view=False"),
    ):
        with pytest.raises(ValueError, match=message):
            hvd.DistributedOptimizer(adamw(model), rule=rule, **options)
    with pytest.raises(TypeError, match=r"must be the torch\.nn\.Module"):
        hvd.rules.NextForward("model")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"rule must be an object of gradwire\.rules"):
        hvd.DistributedOptimizer(adamw(model), rule=hvd.rules.NextForward)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="LBFGS does not"):
        hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters()), rule=rule)
    with pytest.raises(TypeError, match="Counting changes its param groups"):
        trained("next_forward", make=Counting, steps=1)


class Counting(torch.optim.SGD):
    """Counts its steps where a part of a step cannot."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["steps"] = self.param_groups[0].get("steps", 0) + 1
        return super().step(closure)


VICTIM = 1


def lose_one_in_an_exchange() -> tuple[int, ...]:
    """Train, until the victim ends in the exchange that others wait for in their next forward; return whom the error names."""
    hvd.init(timeout_s=300.0)
    model, optimizer = trained("next_forward")
    meet("all have an optimizer")
    optimizer.zero_grad()
    loss = loss_of(model, share(STEPS))
    if hvd.rank() == VICTIM:
        spy(optimizer, lambda tensor, options: os.kill(os.getpid(), signal.SIGKILL))
        model.first.weight.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
    loss.backward()
    optimizer.step()
    with pytest.raises(PeerLost) as caught:
        loss_of(model, share(STEPS + 1))
    with pytest.raises(PeerLost):
        model.state_dict()
    model.load_state_dict(used_wholly().state_dict())
    optimizer.close()
    hvd.shutdown()
    return caught.value.ranks


def test_a_lost_rank_is_named_in_the_next_forward(failing_world: Callable[[int], World]) -> None:
    world = failing_world(3)
    world.start(lose_one_in_an_exchange)
    assert assert_survived(world, [VICTIM], 100.0) == [(VICTIM,)] * 2
