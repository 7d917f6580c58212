"""Optimizers with methods of their own, and optimizers around others: each trains on ranks as it does in one process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire as hvd
from tests.ranks.training import (
    STEPS,
    Data,
    assert_as_in_one_process,
    assert_close,
    batch,
    loss_of,
    on_ranks,
    perceptron,
    share,
    take_steps,
)


class SharpnessAware(torch.optim.Optimizer):
    """Steps by two methods, with the gradients of the batch before each (SAM, Foret et al. 2021)."""

    def __init__(self, params: Any, base: Callable[..., torch.optim.Optimizer], rho: float) -> None:
        super().__init__(params, {"rho": rho})
        self.base_optimizer = base(self.param_groups)
        self.param_groups = self.base_optimizer.param_groups

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in self._parameters()])  # type: ignore[misc]
        for parameter in self._parameters():
            assert parameter.grad is not None
            self.state[parameter]["old"] = parameter.detach().clone()
            parameter.add_(parameter.grad * (self.param_groups[0]["rho"] / norm))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for parameter in self._parameters():
            parameter.copy_(self.state[parameter]["old"])
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def step(self, closure: Any = None) -> None:
        assert closure is not None
        self.first_step(zero_grad=True)
        with torch.enable_grad():
            closure()
        self.second_step()


class ScheduleFree(torch.optim.Optimizer):
    """Computes gradients at other parameters than it evaluates at (Defazio et al. 2024)."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr})
        self.beta, self.count, self.is_training = beta, 0, False
        for parameter in self._parameters():
            self.state[parameter] = {"x": parameter.detach().clone(), "z": parameter.detach().clone()}

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def train(self) -> None:
        self.is_training = True
        for parameter in self._parameters():
            parameter.copy_(self.state[parameter]["z"].lerp(self.state[parameter]["x"], self.beta))

    @torch.no_grad()
    def eval(self) -> None:
        self.is_training = False
        for parameter in self._parameters():
            parameter.copy_(self.state[parameter]["x"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert self.is_training
        self.count += 1
        for parameter in self._parameters():
            if parameter.grad is not None:
                state = self.state[parameter]
                state["z"].sub_(parameter.grad, alpha=self.param_groups[0]["lr"])
                state["x"].lerp_(state["z"], 1 / self.count)
        self.train()


class Lookahead(torch.optim.Optimizer):
    """Moves every k steps back towards slow weights (Zhang et al. 2019). Does not call torch's __init__."""

    def __init__(self, base: torch.optim.Optimizer, k: int = 2) -> None:
        self.base, self.k, self.count = base, k, 0
        self.param_groups, self.defaults = base.param_groups, base.defaults
        self.state: defaultdict[Tensor, Any] = defaultdict(dict)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["slow"] = parameter.detach().clone()

    @torch.no_grad()
    def sync(self) -> None:
        for parameter, state in self.state.items():
            state["slow"].lerp_(parameter, 0.5)
            parameter.copy_(state["slow"])

    def step(self, closure: Any = None) -> Any:
        loss = self.base.step(closure)
        self.count += 1
        if self.count % self.k == 0:
            self.sync()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict)


class Around:
    """Has the methods of an optimizer, and is none: as ScheduleFreeWrapper of Schedule-Free."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.is_training = base, False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.base.param_groups

    @property
    def state(self) -> Any:
        return self.base.state

    def train(self) -> None:
        self.is_training = True

    def step(self, closure: Any = None) -> Any:
        assert self.is_training
        return self.base.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict)

    def add_param_group(self, group: dict[str, Any]) -> None:
        self.base.add_param_group(group)


Train = Callable[[nn.Module, Any, Data], Any]


def by_two_methods(model: nn.Module, optimizer: Any, data: Data) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, data(step)).backward()
        optimizer.first_step(zero_grad=True)
        loss_of(model, data(step)).backward()
        optimizer.second_step()


def by_closures(model: nn.Module, optimizer: Any, data: Data) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, data(step))
            loss.backward()
            return loss

        closure()
        optimizer.step(closure)


def evaluating_between(model: nn.Module, optimizer: Any, data: Data) -> list[float]:
    losses = []
    for step in range(STEPS):
        optimizer.train()
        take_steps(model, optimizer, data, [step])
        optimizer.eval()
        losses.append(loss_of(model, batch(9)).item())
    return losses


def changing_k(model: nn.Module, optimizer: Any, data: Data) -> list[int]:
    take_steps(model, optimizer, data, range(3))
    optimizer.k = 1
    take_steps(model, optimizer, data, range(3, STEPS))
    optimizer.sync()
    return [optimizer.k, optimizer.count]


def switched_on(model: nn.Module, optimizer: Any, data: Data) -> None:
    optimizer.train()
    take_steps(model, optimizer, data, range(STEPS))


def plain(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


CASES: list[tuple[Train, Callable[[nn.Module], Any]]] = [
    (by_two_methods, lambda model: SharpnessAware(model.parameters(), plain, rho=0.05)),
    (by_closures, lambda model: SharpnessAware(model.parameters(), plain, rho=0.05)),
    (evaluating_between, lambda model: ScheduleFree(model.parameters())),
    (changing_k, lambda model: Lookahead(plain(model.parameters()))),
    (switched_on, lambda model: Around(plain(model.parameters()))),
]


@on_ranks(2)
def test_methods_of_the_wrapped_optimizer() -> None:
    for train, make in CASES:
        assert_as_in_one_process(train, make)


def without_methods(model: nn.Module, optimizer: Any, data: Data) -> None:
    take_steps(model, optimizer, data, range(STEPS))


@on_ranks(2)
def test_local_updates() -> None:
    """The average after each step is what one process has: without momentum, these optimizers are linear in the parameters and
    gradients."""
    cases: list[tuple[Train, Callable[[nn.Module], Any]]] = [
        (without_methods, lambda model: Lookahead(torch.optim.SGD(model.parameters(), lr=0.1))),
        (switched_on, lambda model: Around(torch.optim.SGD(model.parameters(), lr=0.1))),
    ]
    for train, make in cases:
        alone, together = perceptron(), perceptron()
        train(alone, make(alone), batch)
        rule = hvd.rules.LocalUpdates(every=1)
        optimizer = hvd.DistributedOptimizer(make(together), together.named_parameters(), rule=rule)
        train(together, optimizer, share)
        optimizer.close()
        assert_close(together.parameters(), alone.parameters(), rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_methods_that_would_step_past_the_exchange() -> None:
    def sam(model: nn.Module) -> Any:
        return SharpnessAware(model.parameters(), plain, rho=0.05)

    def wrapped(net: nn.Module, **options: Any) -> Any:
        return hvd.DistributedOptimizer(sam(net), net.named_parameters(), **options)

    for make in (
        lambda model: wrapped(model, op=hvd.Adasum),
        lambda model: wrapped(model, rule=hvd.rules.NextForward(model)),
        lambda model: wrapped(model, backward_passes_per_step=2),
        lambda model: wrapped(model, rule=hvd.rules.LocalUpdates(every=2)),
    ):
        model = perceptron()
        optimizer = make(model)
        loss_of(model, share(0)).backward()
        with pytest.raises(RuntimeError, match=r"first_step\(\) of the wrapped SharpnessAware"):
            optimizer.first_step()
        assert optimizer.param_groups[0]["rho"] == 0.05
        assert isinstance(optimizer.base_optimizer, torch.optim.SGD)
        optimizer.zero_grad()
        optimizer.close()
    model = perceptron()
    server = hvd.servers.ParameterServer(ScheduleFree(model.parameters()))  # type: ignore[arg-type]
    assert server.beta == 0.9
    with pytest.raises(RuntimeError, match=r"train\(\) of the wrapped ScheduleFree"):
        server.train()
    server.close()


@on_ranks(1)
def test_what_only_the_wrapped_optimizer_has() -> None:
    model = perceptron()
    inner: Any = plain(model.parameters())
    inner.tempo = 3
    optimizer: Any = hvd.DistributedOptimizer(inner)
    optimizer.tempo = 4
    assert (optimizer.tempo, inner.tempo) == (4, 4)
    optimizer.of_the_wrapper = 5
    assert optimizer.of_the_wrapper == 5
    for lacking in (inner, optimizer):
        assert not any(hasattr(lacking, name) for name in ("train", "first_step", "of_the_inner"))
    assert not hasattr(inner, "of_the_wrapper")
    optimizer.close()
    wrapped = Lookahead(plain(model.parameters()))
    with pytest.raises(ValueError, match="does not call the __init__"):
        hvd.DistributedOptimizer(wrapped, rule=hvd.rules.NextForward(model))
    with pytest.raises(AttributeError):
        hvd.DistributedOptimizer(wrapped).register_step_post_hook(print)  # as of the Lookahead itself
    for wrong in (torch.optim.SGD, model, {}):
        with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer, not (type|Sequential|dict)"):
            hvd.DistributedOptimizer(wrong)


class Counting(torch.optim.SGD):
    """Adapts to the number of its steps, which it keeps as an attribute."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return super().step(closure)


@on_ranks(1)
def test_next_forward_would_count_buckets_as_steps() -> None:
    model = perceptron()
    optimizer = hvd.DistributedOptimizer(Counting(model.parameters(), lr=0.1), rule=hvd.rules.NextForward(model))
    with pytest.raises(TypeError, match="changes its param groups or attributes"):
        take_steps(model, optimizer, share, range(2))
    optimizer.close()
