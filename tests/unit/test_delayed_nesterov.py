"""DelayedNesterov against its paper's algorithm, written out number by number in float64, and against torch's SGD."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwire import DelayedNesterov

STEPS = 11
SHAPES = [(7, 5), (5,), (1,)]


def problem() -> tuple[list[Tensor], list[list[Tensor]]]:
    generator = torch.Generator().manual_seed(4)
    weights = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    gradients = [
        [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES] for _ in range(STEPS)
    ]
    return weights, gradients


def by_hand(w: Tensor, gradients: list[Tensor], lr: float, beta: float, n: int, c: float) -> Tensor:
    """Do algorithm 3 of Liu et al. 2024, with the paper's letters."""
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


def stepped(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], gradients: list[list[Tensor]]) -> None:
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()


@pytest.mark.parametrize(("delay", "c"), [(1, 0.0), (2, 0.5), (4, 0.0), (4, 0.1), (4, 0.25), (20, 0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_are_those_of_the_paper(delay: int, c: float, dtype: torch.dtype) -> None:
    weights, gradients = problem()
    parameters = [nn.Parameter(weight.to(dtype, copy=True)) for weight in weights]
    stepped(DelayedNesterov(parameters, lr=0.1, momentum=0.9, delay=delay, c=c), parameters, gradients)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    for number, parameter in enumerate(parameters):
        expected = by_hand(weights[number], [step[number] for step in gradients], 0.1, 0.9, delay, c)
        torch.testing.assert_close(parameter.detach().double(), expected, **tolerance)


def test_without_a_delay_it_is_nesterov_sgd() -> None:
    weights, gradients = problem()
    mine, theirs = ([nn.Parameter(weight.clone()) for weight in weights] for _ in range(2))
    stepped(DelayedNesterov(mine, lr=0.1, momentum=0.9), mine, gradients)
    stepped(torch.optim.SGD(theirs, lr=0.1, momentum=0.9, nesterov=True), theirs, gradients)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_checkpoint_between_two_updates_of_the_momentum_goes_on_bit_for_bit() -> None:
    weights, gradients = problem()
    first = [nn.Parameter(weight.clone()) for weight in weights]
    optimizer = DelayedNesterov(first, lr=0.1, delay=4, c=0.1)
    stepped(optimizer, first, gradients[:6])
    second = [nn.Parameter(parameter.detach().clone()) for parameter in first]
    resumed = DelayedNesterov(second, lr=0.1, delay=4, c=0.1)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    stepped(optimizer, first, gradients[6:])
    stepped(resumed, second, gradients[6:])
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def test_a_parameter_without_a_gradient_stays_and_counts_its_own_steps() -> None:
    weights, gradients = problem()
    always, sometimes = nn.Parameter(weights[0].clone()), nn.Parameter(weights[1].clone())
    optimizer = DelayedNesterov([always, sometimes], lr=0.1, delay=2)
    for number, step in enumerate(gradients):
        always.grad = step[0]
        sometimes.grad = step[1] if number % 3 == 0 else None
        optimizer.step()
    for parameter, weight, given in (
        (always, weights[0], [step[0] for step in gradients]),
        (sometimes, weights[1], [step[1] for step in gradients[::3]]),
    ):
        expected = by_hand(weight, given, 0.1, 0.9, 2, 0.0)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be at least 0, not -1"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1, not 1.0"),
        ({"delay": 0}, "delay must be a whole number >= 1, not 0"),
        ({"delay": 2.5}, "delay must be a whole number >= 1, not 2.5"),
        ({"delay": 4, "c": 0.3}, "c must be from 0 to 1 / delay = 0.25, not 0.3"),
        ({"c": -0.1}, "c must be from 0 to 1 / delay = 1, not -0.1"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DelayedNesterov([nn.Parameter(torch.ones(1))], **{"lr": 0.1, **options})
