"""LARS and LAMB against their papers' formulas, written out tensor by tensor in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwire import LAMB, LARS

STEPS = 5


def lars_by_hand(weights: list[Tensor], gradients: list[list[Tensor]], **o: Any) -> list[Tensor]:
    weights, velocities = [w.double() for w in weights], [torch.zeros_like(w).double() for w in weights]
    for step in gradients:
        for i, g in enumerate(gradient.double() for gradient in step):
            w = weights[i]
            w_norm, g_norm = float(w.square().sum().sqrt()), float(g.square().sum().sqrt())
            local = 1.0
            if o["adapt"] and w_norm > 0 and g_norm > 0:
                local = o["trust_coefficient"] * w_norm / (g_norm + o["weight_decay"] * w_norm)
            velocities[i] = o["momentum"] * velocities[i] + o["lr"] * local * (g + o["weight_decay"] * w)
            weights[i] = w - velocities[i]
    return weights


def lamb_by_hand(weights: list[Tensor], gradients: list[list[Tensor]], **o: Any) -> list[Tensor]:
    weights = [w.double() for w in weights]
    first, second = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    beta1, beta2 = o["betas"]
    for t, step in enumerate(gradients, 1):
        for i, g in enumerate(gradient.double() for gradient in step):
            w = weights[i]
            first[i] = beta1 * first[i] + (1 - beta1) * g
            second[i] = beta2 * second[i] + (1 - beta2) * g * g
            r = first[i] / (1 - beta1**t) / ((second[i] / (1 - beta2**t)).sqrt() + o["eps"]) + o["weight_decay"] * w
            w_norm, r_norm = float(w.square().sum().sqrt()), float(r.square().sum().sqrt())
            ratio = w_norm / r_norm if o["adapt"] and w_norm > 0 and r_norm > 0 else 1.0
            weights[i] = w - o["lr"] * ratio * r
    return weights


CASES: dict[str, tuple[type[torch.optim.Optimizer], Callable[..., list[Tensor]], dict[str, Any]]] = {
    f"{optimizer.__name__}, {name}": (optimizer, by_hand, {**usual, **options})
    for optimizer, by_hand, usual in (
        (
            LARS,
            lars_by_hand,
            {"lr": 2.0, "momentum": 0.9, "weight_decay": 0.01, "trust_coefficient": 0.02, "adapt": True},
        ),
        (LAMB, lamb_by_hand, {"lr": 0.02, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.01, "adapt": True}),
    )
    for name, options in (
        ("usual", {}),
        ("no decay", {"weight_decay": 0.0}),
        ("not adapted", {"adapt": False, "lr": 0.1}),
    )
}


def problem() -> tuple[list[Tensor], list[list[Tensor]]]:
    """Return weights, one of them zero, and gradients of some steps, one of them zero."""
    generator = torch.Generator().manual_seed(4)
    shapes = [(7, 5), (5,), (2, 3, 4), (1,), (3,)]
    weights = [torch.randn(shape, generator=generator) for shape in shapes]
    weights[1].zero_()
    gradients = [[torch.randn(shape, generator=generator) * 3 for shape in shapes] for _ in range(STEPS)]
    for step in gradients:
        step[4].zero_()
    return weights, gradients


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_are_those_of_the_paper(case: str, dtype: torch.dtype) -> None:
    optimizer_class, by_hand, options = CASES[case]
    weights, gradients = problem()
    parameters = [nn.Parameter(weight.to(dtype, copy=True)) for weight in weights]
    optimizer = optimizer_class(parameters, **options)  # type: ignore[call-arg]
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.to(dtype)
        optimizer.step()
    for parameter, expected in zip(parameters, by_hand(weights, gradients, **options), strict=True):
        tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
        torch.testing.assert_close(parameter.detach().double(), expected, **tolerance)


@pytest.mark.parametrize("optimizer_class", [LARS, LAMB])
def test_groups_states_and_closures_are_as_torch_has_them(optimizer_class: type[LARS] | type[LAMB]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    twin = copy.deepcopy(model)
    inputs = torch.randn(16, 4)

    def made(of: nn.Sequential) -> torch.optim.Optimizer:
        biases = {"params": [p for p in of.parameters() if p.dim() == 1], "adapt": False, "weight_decay": 0.0}
        matrices = {"params": [p for p in of.parameters() if p.dim() > 1]}
        return optimizer_class([matrices, biases], lr=0.05, weight_decay=0.01)

    def closure_of(of: nn.Sequential, optimizer: torch.optim.Optimizer) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = of(inputs).square().mean()
            loss.backward()
            return loss

        return closure

    first = made(model)
    losses = [float(first.step(closure_of(model, first)).detach()) for _ in range(STEPS)]
    assert losses[-1] < losses[0]

    twin.load_state_dict(model.state_dict())
    second = made(twin)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for of, optimizer in ((model, first), (twin, second)):
        optimizer.step(closure_of(of, optimizer))
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_parameter_without_a_gradient_stays() -> None:
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    used.grad = torch.ones(3)
    for optimizer in (LARS([used, unused], lr=0.1), LAMB([used, unused], lr=0.1)):
        optimizer.step()
    assert torch.equal(unused, torch.ones(3))
    assert not torch.equal(used, torch.ones(3))


@pytest.mark.parametrize(
    ("optimizer_class", "options", "message"),
    [
        (LARS, {"lr": -1.0}, "lr must be at least 0, not -1"),
        (LARS, {"lr": 0.1, "momentum": 1.0}, "momentum must be at least 0 and below 1, not 1.0"),
        (LARS, {"lr": 0.1, "trust_coefficient": 0.0}, "trust_coefficient must be above 0, not 0.0"),
        (LARS, {"lr": 0.1, "trust_coefficient": float("nan")}, "trust_coefficient .* not nan"),
        (LAMB, {"betas": (0.9, 1.5)}, r"betas\[1\] must be at least 0 and below 1, not 1.5"),
        (LAMB, {"eps": -1e-3}, "eps must be at least 0"),
        (LAMB, {"weight_decay": -0.1}, "weight_decay must be at least 0"),
    ],
)
def test_options_out_of_range_are_refused(
    optimizer_class: type[LARS] | type[LAMB], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        optimizer_class([nn.Parameter(torch.ones(1))], **options)


def test_a_group_without_trust_is_refused() -> None:
    with pytest.raises(ValueError, match="trust_coefficient must be above 0, not 0"):
        LARS([{"params": [nn.Parameter(torch.ones(1))], "trust_coefficient": 0}], lr=0.1)


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="LAMB takes dense gradients only"):
        LAMB(table.parameters()).step()
