"""LARS, LAMB and DelayedNesterov against their papers' formulas, written out tensor by tensor in float64."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwire.optimizers import LAMB, LARS, DelayedNesterov

STEPS = 11


def lars_by_hand(w: Tensor, gradients: list[Tensor], **o: Any) -> Tensor:
    velocity = torch.zeros_like(w)
    for g in gradients:
        w_norm, g_norm = float(w.square().sum().sqrt()), float(g.square().sum().sqrt())
        local = 1.0
        if o["adapt"] and w_norm > 0 and g_norm > 0:
            local = o["trust_coefficient"] * w_norm / (g_norm + o["weight_decay"] * w_norm)
        velocity = o["momentum"] * velocity + o["lr"] * local * (g + o["weight_decay"] * w)
        w = w - velocity
    return w


def lamb_by_hand(w: Tensor, gradients: list[Tensor], **o: Any) -> Tensor:
    first, second = torch.zeros_like(w), torch.zeros_like(w)
    beta1, beta2 = o["betas"]
    for t, g in enumerate(gradients, 1):
        first = beta1 * first + (1 - beta1) * g
        second = beta2 * second + (1 - beta2) * g * g
        r = first / (1 - beta1**t) / ((second / (1 - beta2**t)).sqrt() + o["eps"]) + o["weight_decay"] * w
        w_norm, r_norm = float(w.square().sum().sqrt()), float(r.square().sum().sqrt())
        ratio = w_norm / r_norm if o["adapt"] and w_norm > 0 and r_norm > 0 else 1.0
        w = w - o["lr"] * ratio * r
    return w


def nesterov_by_hand(w: Tensor, gradients: list[Tensor], **o: Any) -> Tensor:
    """Do algorithm 3 of Liu et al. 2024, with the paper's letters."""
    lr, beta, n, c = o["lr"], o["momentum"], o["delay"], o["c"]
    m, total = torch.zeros_like(w), torch.zeros_like(w)
    for t, g in enumerate(gradients):
        total = total + g
        if (t + 1) % n == 0:
            m = beta * m + total / n
            w = w - lr * ((1 - c * n + c) * beta * m + g / n)
            total = torch.zeros_like(w)
        else:
            w = w - lr * (c * beta * m + g / n)
    return w


LARS_OPTIONS = {"lr": 2.0, "momentum": 0.9, "weight_decay": 0.01, "trust_coefficient": 0.02, "adapt": True}
LAMB_OPTIONS = {"lr": 0.02, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.01, "adapt": True}
NESTEROV_OPTIONS = {"lr": 0.1, "momentum": 0.9}
CASES: dict[str, tuple[Callable[..., torch.optim.Optimizer], Callable[..., Tensor], dict[str, Any]]] = {
    "LARS": (LARS, lars_by_hand, LARS_OPTIONS),
    "LARS without decay": (LARS, lars_by_hand, {**LARS_OPTIONS, "weight_decay": 0.0}),
    "LARS, not adapted": (LARS, lars_by_hand, {**LARS_OPTIONS, "adapt": False, "lr": 0.1}),
    "LAMB": (LAMB, lamb_by_hand, LAMB_OPTIONS),
    "LAMB without decay": (LAMB, lamb_by_hand, {**LAMB_OPTIONS, "weight_decay": 0.0}),
    "LAMB, not adapted": (LAMB, lamb_by_hand, {**LAMB_OPTIONS, "adapt": False, "lr": 0.1}),
    **{
        f"DelayedNesterov, {delay}, {c}": (
            DelayedNesterov,
            nesterov_by_hand,
            {**NESTEROV_OPTIONS, "delay": delay, "c": c},
        )
        for delay, c in ((1, 0.0), (2, 0.5), (4, 0.0), (4, 0.1), (4, 0.25), (20, 0.0))
    },
}


def problem(dtype: torch.dtype = torch.float64) -> tuple[list[nn.Parameter], list[list[Tensor]]]:
    """Return weights, one of them zero, and gradients of some steps, one of them zero, as float32 can hold them."""
    generator = torch.Generator().manual_seed(4)
    shapes = [(7, 5), (5,), (2, 3, 4), (1,), (3,)]
    weights = [torch.randn(shape, generator=generator) for shape in shapes]
    weights[1].zero_()
    gradients = [[3 * torch.randn(shape, generator=generator).to(dtype) for shape in shapes] for _ in range(STEPS)]
    for step in gradients:
        step[4].zero_()
    return [nn.Parameter(weight.to(dtype)) for weight in weights], gradients


def stepped(optimizer: torch.optim.Optimizer, gradients: list[list[Tensor]]) -> None:
    for step in gradients:
        for parameter, gradient in zip(optimizer.param_groups[0]["params"], step, strict=True):
            parameter.grad = gradient
        optimizer.step()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_are_those_of_the_paper(case: str, dtype: torch.dtype) -> None:
    optimizer_class, by_hand, options = CASES[case]
    parameters, gradients = problem(dtype)
    stepped(optimizer_class(parameters, **options), gradients)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    for number, (parameter, weight) in enumerate(zip(parameters, problem(dtype)[0], strict=True)):
        expected = by_hand(weight.detach().double(), [step[number].double() for step in gradients], **options)
        torch.testing.assert_close(parameter.detach().double(), expected, **tolerance)


def test_without_a_delay_it_is_nesterov_sgd() -> None:
    mine, gradients = problem()
    theirs, _ = problem()
    stepped(DelayedNesterov(mine, lr=0.1, momentum=0.9), gradients)
    stepped(torch.optim.SGD(theirs, lr=0.1, momentum=0.9, nesterov=True), gradients)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_parameter_without_a_gradient_stays_and_counts_its_own_steps() -> None:
    (always, sometimes, *_), gradients = problem()
    (one, other, *_), _ = problem()
    optimizer = DelayedNesterov([always, sometimes], lr=0.1, delay=2)
    stepped(optimizer, [[step[0], step[1] if number % 3 == 0 else None] for number, step in enumerate(gradients)])  # type: ignore[list-item]
    for parameter, weight, given in (
        (always, one, [step[0] for step in gradients]),
        (sometimes, other, [step[1] for step in gradients[::3]]),
    ):
        expected = nesterov_by_hand(weight.detach(), given, lr=0.1, momentum=0.9, delay=2, c=0.0)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-12, atol=1e-12)
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    used.grad = torch.ones(3)
    for layerwise in (LARS([used, unused], lr=0.1), LAMB([used, unused], lr=0.1)):
        layerwise.step()
    assert torch.equal(unused, torch.ones(3))
    assert not torch.equal(used, torch.ones(3))


@pytest.mark.parametrize(
    "make",
    [
        lambda groups: LARS(groups, lr=0.05, weight_decay=0.01),
        lambda groups: LAMB(groups, lr=0.05, weight_decay=0.01),
        lambda groups: DelayedNesterov(groups, lr=0.05, delay=4, c=0.1),
    ],
    ids=["LARS", "LAMB", "DelayedNesterov"],
)
def test_groups_states_and_closures_are_as_torch_has_them(make: Callable[..., torch.optim.Optimizer]) -> None:
    """A checkpoint goes on bit for bit, also between two updates of a momentum."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    twin = copy.deepcopy(model)
    inputs = torch.randn(16, 4)

    def made(of: nn.Sequential) -> torch.optim.Optimizer:
        biases = {"params": [p for p in of.parameters() if p.dim() == 1], "adapt": False, "weight_decay": 0.0}
        return make([{"params": [p for p in of.parameters() if p.dim() > 1]}, biases])

    def closure_of(of: nn.Sequential, optimizer: torch.optim.Optimizer) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = of(inputs).square().mean()
            loss.backward()
            return loss

        return closure

    first, second = made(model), made(twin)
    losses = [float(first.step(closure_of(model, first)).detach()) for _ in range(6)]
    assert losses[-1] < losses[0]
    twin.load_state_dict(model.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for _ in range(5):
        for of, optimizer in ((model, first), (twin, second)):
            optimizer.step(closure_of(of, optimizer))
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("optimizer_class", "options", "message"),
    [
        (LARS, {"lr": -1.0}, "lr must be at least 0, not -1"),
        (LARS, {"momentum": 1.0}, "momentum must be at least 0 and below 1, not 1.0"),
        (LARS, {"trust_coefficient": 0.0}, "trust_coefficient must be above 0, not 0.0"),
        (LARS, {"trust_coefficient": float("nan")}, "trust_coefficient .* not nan"),
        (LARS, {"group": {"trust_coefficient": 0}}, "trust_coefficient must be above 0, not 0"),
        (LAMB, {"betas": (0.9, 1.5)}, r"betas\[1\] must be at least 0 and below 1, not 1.5"),
        (LAMB, {"eps": -1e-3}, "eps must be at least 0"),
        (LAMB, {"weight_decay": -0.1}, "weight_decay must be at least 0"),
        (DelayedNesterov, {"lr": -1.0}, "lr must be at least 0, not -1"),
        (DelayedNesterov, {"momentum": 1.0}, "momentum must be at least 0 and below 1, not 1.0"),
        (DelayedNesterov, {"delay": 0}, "delay must be a whole number >= 1, not 0"),
        (DelayedNesterov, {"delay": 2.5}, "delay must be a whole number >= 1, not 2.5"),
        (DelayedNesterov, {"delay": 4, "c": 0.3}, "c must be from 0 to 1 / delay = 0.25, not 0.3"),
        (DelayedNesterov, {"c": -0.1}, "c must be from 0 to 1 / delay = 1, not -0.1"),
    ],
)
def test_options_out_of_range_are_refused(optimizer_class: Any, options: dict[str, Any], message: str) -> None:
    group = {"params": [nn.Parameter(torch.ones(1))], **options.pop("group", {})}
    with pytest.raises(ValueError, match=message):
        optimizer_class([group], **{"lr": 0.1, **options})


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="LAMB takes dense gradients only"):
        LAMB(table.parameters()).step()
