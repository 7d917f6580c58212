"""overlap="next_forward": the same bits as overlap="backward", whatever reads what in between, and errors in the forward."""

from __future__ import annotations

import copy
import os
import signal
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import gradwire as hvd
from gradwire.collectives import PeerLost
from gradwire.trainer.rules.next_forward import NextForward
from tests.harness import World, meet
from tests.ranks.training import assert_equal, assert_same_on_all_ranks, assert_survived, batch_of, on_ranks, spy

STEPS = 6
Step = Callable[[nn.Module, Any, int], None]


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
        x = self.blocks(self.first(x) * self.scale + self.position.weight)
        y: Tensor = self.last(x)
        return y + F.linear(torch.tanh(self.back(y)), self.last.weight)


def loss_of(model: nn.Module, step: int) -> Tensor:
    inputs, targets = batch_of(step, hvd.rank())
    return F.mse_loss(model(inputs), targets)


def plain_step(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, step).backward()
    optimizer.step()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.003}]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups(model), lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model), lr=0.01)


def trained(
    overlap: str,
    make: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    step: Step = plain_step,
    steps: int = STEPS,
    with_unused: bool = False,
    **options: Any,
) -> tuple[nn.Module, hvd.DistributedOptimizer, int]:
    """Train; return the model, its optimizer, and how many steps were put off."""
    model = Net(with_unused=with_unused)
    if overlap == "next_forward":
        options = {"model": model, **options}
    options = {"bucket_bytes": 12_000, **options}
    optimizer = hvd.DistributedOptimizer(make(model), model.named_parameters(), overlap=overlap, **options)
    put_off = 0
    for number in range(steps):
        step(model, optimizer, number)
        put_off += isinstance(optimizer._rule, NextForward) and optimizer._rule.exchange.is_pending
    return model, optimizer, put_off


def state_of(model: nn.Module, optimizer: hvd.DistributedOptimizer) -> list[Tensor]:
    """Return parameters and optimizer state."""
    parameters = list(model.state_dict().values())
    states = optimizer.state_dict()["state"]
    return parameters + [states[number][name] for number in sorted(states) for name in sorted(states[number])]


def assert_same_bits(*, puts_off: int = STEPS - 1, **options: Any) -> None:
    """Train with both, and compare parameters and optimizer state. puts_off: how many steps must have been put off, which the
    first, whose order of arrival is learned, never is."""
    expected_model, expected, _ = trained("backward", **options)
    model, optimizer, put_off = trained("next_forward", **options)
    assert put_off == puts_off
    assert_equal(state_of(model, optimizer), state_of(expected_model, expected))
    assert_same_on_all_ranks(model.parameters())
    for each in (optimizer, expected):
        each.close()


MAKERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": sgd,
    "Adam": lambda model: torch.optim.Adam(groups(model), lr=0.01, foreach=True),
    "AdamW, tensor lr": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01)),
    "fused": lambda model: torch.optim.Adam(groups(model), lr=0.01, fused=True),
    "LAMB": lambda model: hvd.LAMB(groups(model), lr=0.01),
}


@on_ranks(3)
@pytest.mark.parametrize("maker", MAKERS)
def test_same_bits_with_an_optimizer(maker: str) -> None:
    assert_same_bits(make=MAKERS[maker])


CODECS = {
    "fp16": {"compression": "fp16"},
    "int8 with error feedback": {"compression": hvd.ErrorFeedback("int8")},
    "a sum": {"op": hvd.Sum, "groups": 2},
}


@on_ranks(2)
@pytest.mark.parametrize("codec", CODECS)
def test_same_bits_with_a_codec(codec: str) -> None:
    assert_same_bits(**CODECS[codec])


@on_ranks(2)
def test_where_operations_depend_on_others_backward_waits() -> None:
    assert_same_bits(compression="powersgd", puts_off=0)
    assert_same_bits(with_unused=True, puts_off=0)


@on_ranks(2)
def test_settings_are_those_at_step() -> None:
    """Schedulers, and a hand that changes lr in place, come between step() and the update."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(groups(model), lr=torch.tensor(0.01))
        optimizer.param_groups[1]["lr"] = 0.02
        return optimizer

    def step(model: nn.Module, optimizer: Any, number: int) -> None:
        if optimizer not in schedulers:
            schedulers[optimizer] = torch.optim.lr_scheduler.ExponentialLR(optimizer.optimizer, 0.7)
        plain_step(model, optimizer, number)
        optimizer.param_groups[0]["lr"].mul_(0.5)
        schedulers[optimizer].step()

    schedulers: dict[Any, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_bits(make=make, step=step)


def accumulate(model: nn.Module, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    for part in range(2):
        loss_of(model, 2 * number + part).backward()
    optimizer.step()


def clip(model: nn.Module, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    loss_of(model, number).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


def clip_by_ours(model: nn.Module, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    loss_of(model, number).backward()
    optimizer.clip_grad_norm_(0.01)
    optimizer.step()


def scale(model: nn.Module, optimizer: Any, number: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer.zero_grad()
    scaler.scale(loss_of(model, number)).backward()
    if number == 3 and model.first.weight.grad is not None:
        model.first.weight.grad[0] = torch.inf  # so the step is left out
    scaler.step(optimizer)
    scaler.update()


def with_a_closure(model: nn.Module, optimizer: Any, number: int) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, number)
        loss.backward()
        return loss

    optimizer.step(closure)


def onto_the_average(model: nn.Module, optimizer: Any, number: int) -> None:
    """Two calls of backward() for one step, the second onto what was exchanged; gradients are read after the step."""
    for part in range(2):
        loss_of(model, 2 * number + part).backward()
    optimizer.step()
    norm = sum(float(parameter.grad.norm()) for parameter in model.parameters())
    assert norm > 0
    optimizer.zero_grad(set_to_none=False)


def keep_gradients(model: nn.Module, optimizer: Any, number: int) -> None:
    loss_of(model, number).backward()
    optimizer.step()
    if number % 2:
        optimizer.step()
        optimizer.zero_grad()


def replace_gradient(model: nn.Module, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    loss_of(model, number).backward()
    model.first.weight.grad = torch.ones_like(model.first.weight)
    optimizer.step()


BETWEEN: dict[str, tuple[Step, dict[str, Any]]] = {
    "accumulation": (accumulate, {"backward_passes_per_step": 2, "puts_off": STEPS - 1}),
    "clipping": (clip, {"puts_off": 0}),
    "clipping by ours": (clip_by_ours, {"puts_off": 0}),
    "GradScaler": (scale, {"puts_off": 0}),
    "a closure": (with_a_closure, {"puts_off": 0}),
    "onto the average": (onto_the_average, {"puts_off": 0}),
    "gradients that stay": (keep_gradients, {"puts_off": 2}),
    "a gradient replaced": (replace_gradient, {"puts_off": 0}),
}


@on_ranks(2)
@pytest.mark.parametrize("case", BETWEEN)
def test_same_bits_whatever_comes_between_backward_and_forward(case: str) -> None:
    step, options = BETWEEN[case]
    assert_same_bits(step=step, **options)


@on_ranks(2)
def test_what_reads_first_completes_the_update() -> None:
    """After a step that was put off, each of these sees what it sees with overlap="backward"."""
    expected_model, expected, _ = trained("backward")
    wanted = [parameter.detach().clone() for parameter in expected_model.parameters()]
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
        model, optimizer, put_off = trained("next_forward")
        assert put_off == STEPS - 1, name
        read(model, optimizer)
        assert_equal([parameter.detach() for parameter in model.parameters()], wanted)
        assert_equal([optimizer.optimizer.state[p]["exp_avg"] for p in tensors_in(optimizer)], moments)
        optimizer.close()
    expected.close()


def tensors_in(optimizer: hvd.DistributedOptimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups[:2] for parameter in group["params"]]


@on_ranks(2)
def test_checkpoints_midway_go_on_alike() -> None:
    """With codecs, whose residuals are of the last exchange."""
    options: dict[str, Any] = {"compression": hvd.ErrorFeedback("int8")}
    model, optimizer, _ = trained("next_forward", **options)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again, resumed, _ = trained("next_forward", steps=2, **options)
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for number in range(STEPS, STEPS + 3):
        plain_step(model, optimizer, number)
        plain_step(again, resumed, number)
    assert_equal(state_of(again, resumed), state_of(model, optimizer))
    for each in (optimizer, resumed):
        each.close()


@on_ranks(3)
def test_buckets_that_only_queue_let_those_of_the_first_layers_overtake() -> None:
    """Of the exchanges that are measured, ranks have begun one, two and three buckets when backward() ends."""
    started: list[int] = []
    model = Net()
    optimizer = hvd.DistributedOptimizer(
        adamw(model), model.named_parameters(), bucket_bytes=8000, overlap="next_forward", model=model
    )
    spy(optimizer, lambda tensor, options: started.append(tensor.data_ptr()))
    plain_step(model, optimizer, 0)
    exchange = optimizer._rule.exchange
    for number in range(1, 5):
        plain_step(model, optimizer, number)
        exchange._begun = [1 + hvd.rank()] * 9  # outweighs what is measured
    optimizer.settle()
    places = [bucket.buffer.values.data_ptr() for bucket in optimizer._rule.buckets]
    assert len(places) > 4
    natural, agreed = started[-2 * len(places) : -len(places)], started[-len(places) :]
    assert natural == places
    assert agreed == places[:3] + places[:2:-1]
    optimizer.close()


@on_ranks(2)
def test_parameters_used_before_they_are_updated_are_an_error() -> None:
    model, optimizer, _ = trained("next_forward")
    with pytest.raises(RuntimeError, match=r"^rank \d: a gradient of '.*' arrived, .* call settle\(\)"):
        sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.zero_grad()
    optimizer.settle()
    loss = loss_of(model, 0)
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
    wrap = lambda **options: hvd.DistributedOptimizer(adamw(model), **options)  # noqa: E731
    for options, error, message in (
        ({"overlap": "forward"}, ValueError, "overlap must be 'backward' or 'next_forward', not 'forward'"),
        ({"overlap": "next_forward"}, TypeError, "needs model=, the torch.nn.Module"),
        ({"model": model}, ValueError, "model is for overlap='next_forward'"),
        ({"overlap": "next_forward", "model": model, "shard_states": True}, ValueError, "only the default rule"),
        ({"overlap": "next_forward", "model": model, "op": hvd.Adasum}, ValueError, "only the default rule"),
    ):
        with pytest.raises(error, match=message):
            wrap(**options)
    with pytest.raises(ValueError, match="LBFGS does not"):
        hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters()), overlap="next_forward", model=model)
    with pytest.raises(TypeError, match="Counting changes its param groups"):
        trained("next_forward", Counting, steps=1)


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
    model, optimizer, _ = trained("next_forward")
    meet("all have an optimizer")
    optimizer.zero_grad()
    loss = loss_of(model, STEPS)
    if hvd.rank() == VICTIM:
        spy(optimizer, lambda tensor, options: os.kill(os.getpid(), signal.SIGKILL))
        model.first.weight.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
    loss.backward()
    optimizer.step()
    with pytest.raises(PeerLost) as caught:
        loss_of(model, STEPS + 1)
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
