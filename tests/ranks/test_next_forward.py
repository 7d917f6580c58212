"""rules.NextForward: the same bits as without it, whatever reads what in between, and errors in the forward."""

from __future__ import annotations

import copy
import os
import signal
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import gradwire as hvd
from gradwire.collectives import PeerLost
from gradwire.trainer.reducer.deferred import order_by_need
from tests.harness import World, meet, wide_rows
from tests.ranks.test_trainer_equivalence import by_closures, clipped, groups_of, in_parts, nesterov, plainly, scaled
from tests.ranks.training import (
    STEPS,
    Data,
    assert_equal,
    assert_same_on_all_ranks,
    assert_survived,
    buckets_of,
    copies,
    loss_of,
    on_ranks,
    share,
    spy,
    take_steps,
)

Train = Callable[[nn.Module, Any, Data], Any]


class Net(nn.Module):
    """Has a tied matrix, a parameter of a module that is never called, one of its own, and one that is never used."""

    def __init__(self, *, with_unused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 80)
        self.scale = nn.Parameter(torch.ones(80))
        self.position = nn.Embedding(4, 80)
        self.blocks = nn.Sequential(nn.Linear(80, 80), nn.Tanh(), nn.Linear(80, 80), nn.Tanh())
        self.last = nn.Linear(80, 3)
        self.back = nn.Linear(3, 80)
        self.back.weight = nn.Parameter(self.back.weight.detach().contiguous())
        self.unused = nn.Linear(2, 2) if with_unused else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.first(x) * self.scale + self.position.weight.mean(0))
        y: Tensor = self.last(x)
        return y + F.linear(torch.tanh(self.back(y)), self.last.weight)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups_of(model), lr=0.01)


def wrapped(
    kind: str,
    make: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    model_of: Callable[[], nn.Module] = Net,
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


def state_of(model: nn.Module, optimizer: hvd.DistributedOptimizer) -> list[Tensor]:
    """Return parameters and optimizer state."""
    parameters = list(model.state_dict().values())
    states = optimizer.state_dict()["state"]
    return parameters + [states[number][name] for number in sorted(states) for name in sorted(states[number])]


def clipped_by_ours(model: nn.Module, optimizer: Any, data: Data) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, data(step)).backward()
        optimizer.clip_grad_norm_(0.01)
        optimizer.step()


def onto_the_average(model: nn.Module, optimizer: Any, data: Data) -> None:
    """Call backward() twice for one step, the second onto what was exchanged; read gradients after the step."""
    for step in range(STEPS):
        for part in range(2):
            loss_of(model, data(step, part, 2)).backward()
        optimizer.step()
        norm = sum(float(parameter.grad.norm()) for parameter in model.parameters())  # type: ignore[union-attr]
        assert norm > 0
        optimizer.zero_grad(set_to_none=False)


def with_gradients_that_stay(model: nn.Module, optimizer: Any, data: Data) -> None:
    """Step twice with the same gradients now and then."""
    for step in range(STEPS):
        loss_of(model, data(step)).backward()
        optimizer.step()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()


def with_a_gradient_replaced(model: Any, optimizer: Any, data: Data) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, data(step)).backward()
        model.first.weight.grad = torch.ones_like(model.first.weight)
        optimizer.step()


def with_other_rates(model: nn.Module, optimizer: Any, data: Data) -> None:
    """A scheduler, and a hand that changes a rate in place, come between step() and the update."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer.optimizer, 0.7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(STEPS):
            take_steps(model, optimizer, data, [step])
            optimizer.param_groups[0]["lr"].mul_(0.5)
            scheduler.step()


def with_a_rate_in_a_tensor(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(groups_of(model), lr=torch.tensor(0.01))
    optimizer.param_groups[1]["lr"] = 0.02
    return optimizer


def with_a_frozen_parameter() -> nn.Module:
    model = Net()
    model.position.requires_grad_(False)
    return model


MOST = STEPS - 1
"""The steps that are put off, if all are but the first, in which the order of arrival is learned."""

#: How each trains, how many steps must have been put off, and what else differs from AdamW without a codec.
CASES: dict[str, tuple[Train, int, dict[str, Any]]] = {
    "SGD": (plainly, MOST, {"make": nesterov}),
    "fused": (plainly, MOST, {"make": lambda model: torch.optim.Adam(groups_of(model), lr=0.01, fused=True)}),
    "LAMB": (plainly, MOST, {"make": lambda model: hvd.LAMB(groups_of(model), lr=0.01)}),
    "rates": (with_other_rates, MOST, {"make": with_a_rate_in_a_tensor}),
    "fp16": (plainly, MOST, {"compression": "fp16"}),
    "int8 with error feedback": (plainly, MOST, {"compression": hvd.ErrorFeedback("int8")}),
    "a sum": (plainly, MOST, {"op": hvd.Sum, "groups": 2}),
    "sums that depend on others": (plainly, 0, {"compression": "powersgd"}),
    "a frozen parameter": (plainly, MOST, {"model_of": with_a_frozen_parameter}),
    "an unused parameter": (plainly, 0, {"model_of": lambda: Net(with_unused=True)}),
    "accumulation": (partial(in_parts, set_to_none=True, parts=2), MOST, {"backward_passes_per_step": 2}),
    "clipping": (clipped, 0, {}),
    "clipping by ours": (clipped_by_ours, 0, {}),
    "GradScaler": (scaled, 0, {"backward_passes_per_step": 2}),
    "closures": (by_closures, 0, {}),
    "onto the average": (onto_the_average, MOST, {}),
    "gradients that stay": (with_gradients_that_stay, MOST, {}),
    "a gradient replaced": (with_a_gradient_replaced, 0, {}),
}


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


@on_ranks()
@pytest.mark.parametrize(
    ("size", "case"),
    [*((2, case) for case in CASES), *wide_rows((3, "SGD"), (3, "a sum"), (3, "sums that depend on others"))],
)
def test_same_bits_as_without_overlap(case: str) -> None:
    """Parameters, optimizer state, and what training returns."""
    train, puts_off, options = CASES[case]
    expected_model, expected = wrapped("backward", **options)
    model, optimizer = wrapped("next_forward", **options)
    memory, step, put_off = [each.detach() for each in model.parameters()], optimizer.step, []

    def looked_at(*args: Any) -> Any:
        before = copies(memory)
        loss = step(*args)
        put_off.append(all(map(torch.equal, before, memory)))
        return loss

    object.__setattr__(optimizer, "step", looked_at)
    assert train(model, optimizer, share) == train(expected_model, expected, share)
    assert sum(put_off) == puts_off
    assert_equal(state_of(model, optimizer), state_of(expected_model, expected))
    assert_same_on_all_ranks(model.parameters())
    for each in (optimizer, expected):
        each.close()


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
    model = Net()
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
    model.load_state_dict(Net().state_dict())
    optimizer.close()
    hvd.shutdown()
    return caught.value.ranks


def test_a_lost_rank_is_named_in_the_next_forward(failing_world: Callable[[int], World]) -> None:
    world = failing_world(3)
    world.start(lose_one_in_an_exchange)
    assert assert_survived(world, [VICTIM], 100.0) == [(VICTIM,)] * 2
