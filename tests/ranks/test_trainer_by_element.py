"""Sharded states need optimizers that update every element independently: which are refused, and which train as without."""

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import gradwire as hvd
from tests.ranks.training import assert_close, assert_equal, assert_same_on_all_ranks, on_ranks

Make = Callable[[Any], torch.optim.Optimizer]


class Simple(torch.optim.Optimizer):
    """Steps by what update() returns for a parameter."""

    def __init__(self, parameters: Any, lr: float = 0.1, **options: Any) -> None:
        super().__init__(parameters, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["step"] = state.get("step", 0) + 1
                    parameter.sub_(self.update(parameter, parameter.grad, state, group), alpha=group["lr"])

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return gradient


class Clipped(Simple):
    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return gradient / gradient.norm().clamp(min=1.0)


class ClippedTogether(Simple):
    def step(self, closure: Any = None) -> None:
        torch.nn.utils.clip_grad_norm_([each for group in self.param_groups for each in group["params"]], 1.0)
        super().step()


class Lamb(Simple):
    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        square = state.setdefault("square", torch.zeros_like(parameter)).lerp_(gradient * gradient, 0.1)
        adam = gradient / (square.sqrt() + 1e-6)
        weights, length = parameter.norm(), adam.norm()
        return torch.where((weights > 0) & (length > 0), weights / length, 1.0) * adam


class NovoGrad(Simple):
    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        state["norm"] = state.get("norm", 0.0) * 0.9 + 0.1 * float(gradient.square().sum())
        return gradient / (state["norm"] ** 0.5 + 1e-8)


class Factored(Simple):
    """Keeps the squares of matrices by rows and columns, and those of other parameters by elements."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        square = gradient.square()
        if parameter.dim() != 2:
            return gradient / (state.setdefault("square", torch.zeros_like(parameter)).lerp_(square, 0.1).sqrt() + 1e-8)
        rows = state.setdefault("rows", torch.zeros_like(parameter[:, :1])).lerp_(square.mean(1, keepdim=True), 0.1)
        columns = state.setdefault("columns", torch.zeros_like(parameter[:1])).lerp_(square.mean(0, keepdim=True), 0.1)
        return gradient / ((rows * columns / rows.mean()).sqrt() + 1e-8)


class Centralized(Simple):
    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return gradient - gradient.mean(1, keepdim=True) if parameter.dim() > 1 else gradient


class Muon(Simple):
    """Takes the matrices of a group with an option to orthogonal ones, and Adam's way for other parameters."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        if group["orthogonal"] and parameter.dim() == 2:
            left, _, right = torch.linalg.svd(gradient, full_matrices=False)
            return left @ right
        return gradient.sign()


class Late(Simple):
    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return gradient / gradient.norm() if state["step"] > 20 else gradient


class LargeOnly(Simple):
    """Rounds a state of 4096 numbers or more in blocks, as optimizers with states of 8 bits do."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        mean = state.setdefault("mean", torch.zeros_like(parameter)).lerp_(gradient, 0.1)
        if mean.numel() >= 4096:
            blocks = mean.view(-1, 256)
            unit = blocks.abs().amax(1, keepdim=True) / 127 + 1e-12
            blocks.copy_((blocks / unit).round() * unit)
        return mean


class Projecting(Simple):
    """Removes what changes the length of a matrix, where its gradient is nearly orthogonal to it, as AdamP does."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        mean = state.setdefault("mean", torch.zeros_like(parameter)).lerp_(gradient, 0.1)
        cosine = torch.nn.functional.cosine_similarity(gradient.flatten(), parameter.flatten(), dim=0, eps=1e-8)
        if parameter.dim() < 2 or cosine.abs() > 0.1 / parameter.numel() ** 0.5:
            return mean
        unit = parameter / parameter.norm()
        return mean - unit * (unit * mean).sum()


class Adapting(Simple):
    """Estimates one rate for all parameters from all of them, as Prodigy does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        together = sum(float(each.grad.abs().sum()) for group in self.param_groups for each in group["params"])
        for group in self.param_groups:
            group["lr"] = max(group["lr"], 1e-3 / together)
            group["total"] = group.get("total", 0.0) + together
            for each in group["params"]:
                each.sub_(each.grad, alpha=group["lr"] * group["total"])


class NeedsElements(Simple):
    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return gradient * (float(gradient.max()) >= float(gradient.min()))


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        closure()
        return super().step()


class HoldsParameters(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.mine = [each for group in self.param_groups for each in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for each in self.mine:
            each.sub_(each.grad, alpha=0.1)


class Lion(Simple):
    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        mean = state.setdefault("mean", torch.zeros_like(parameter))
        update = torch.lerp(mean, gradient, 0.1).sign_()
        mean.lerp_(gradient, 0.01)
        return update


REFUSED: dict[str, Make] = {
    "clipped": Clipped,
    "clipped, in a warm-up": partial(Clipped, lr=0.0),
    "clipped together": ClippedTogether,
    "lamb": Lamb,
    "novograd": NovoGrad,
    "factored": Factored,
    "centralized": Centralized,
    "muon": partial(Muon, orthogonal=True),
    "late": Late,
    "large only": LargeOnly,
    "projecting": Projecting,
    "adapting": Adapting,
    "needs elements": NeedsElements,
    "needs a closure": partial(NeedsClosure, lr=0.1),
    "holds parameters": HoldsParameters,
    "torch's Adafactor": torch.optim.Adafactor,
    "torch's LBFGS": torch.optim.LBFGS,
    "torch's SparseAdam": lambda parameters: torch.optim.SparseAdam(list(parameters)),
    "torch's Muon": lambda parameters: torch.optim.Muon([each for each in parameters if each.dim() == 2]),
    "LARS": partial(hvd.optimizers.LARS, lr=0.1),
    "LAMB": hvd.optimizers.LAMB,
}


def by_dimensions(parameters: Any) -> list[dict[str, Any]]:
    """Return two param groups, of which only that of other parameters than matrices has `orthogonal`."""
    each = list(parameters)
    matrices = [parameter for parameter in each if parameter.dim() == 2]
    others = [parameter for parameter in each if parameter.dim() != 2]
    return [{"params": matrices, "orthogonal": False}, {"params": others, "orthogonal": True}]


TAKEN: dict[str, Make] = {
    "lion": Lion,
    "as if it were not muon": lambda parameters: Muon(by_dimensions(parameters)),
    "not large": lambda parameters: LargeOnly([each for each in parameters if each.numel() < 4096]),
    "LAMB without adaptation": partial(hvd.optimizers.LAMB, adapt=False),
    "sgd, fused": partial(torch.optim.SGD, lr=0.1, weight_decay=0.01, fused=True),
    "sgd, in a warm-up": partial(torch.optim.SGD, lr=0.0, nesterov=True, momentum=0.9),
    "adamw, fused": partial(torch.optim.AdamW, fused=True),
    "adamw, foreach": partial(torch.optim.AdamW, foreach=True),
    "adamw, of a tensor as rate": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.01)),
    "rmsprop": partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rprop": torch.optim.Rprop,
}


def network() -> nn.Sequential:
    """Return a model with parameters of 0 to 4 dimensions; one has 4096 elements or more."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.Flatten(), nn.Linear(24, 200), nn.Linear(200, 3, bias=False), nn.PReLU()
    )
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    return model


def train(model: nn.Sequential, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + hvd.rank())
        optimizer.zero_grad()
        (model(torch.randn(4, 2, 4, 4, generator=generator)) * model.scale).square().sum().backward()
        optimizer.step()


@on_ranks(2)
def test_optimizers_that_combine_elements_are_refused_on_all_ranks() -> None:
    for make in REFUSED.values():
        optimizer = make(network().parameters())
        with pytest.raises(ValueError, match=type(optimizer).__name__):
            hvd.DistributedOptimizer(optimizer, rule=hvd.rules.Sharded())
    model = network()
    with pytest.raises(ValueError, match="Clipped"):  # also if only one rank has such an optimizer
        hvd.DistributedOptimizer((Lion, Clipped)[hvd.rank()](model.parameters()), rule=hvd.rules.Sharded())
    sharded = hvd.DistributedOptimizer(Muon(by_dimensions(model.parameters())), rule=hvd.rules.Sharded())
    with pytest.raises(ValueError, match="Muon"):
        sharded.add_param_group({"params": [nn.Parameter(torch.ones(3, 3))], "orthogonal": True})
    train(model, sharded, 1)
    assert_same_on_all_ranks(model.parameters())
    sharded.close()


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizers_by_element_train_as_without_shards(dtype: torch.dtype) -> None:
    for name, make in TAKEN.items():
        models = [network(), network()]
        for model, shard in zip(models, (False, True), strict=True):
            if dtype != torch.float32:
                hvd.DistributedOptimizer(
                    make(model.to(dtype).parameters()), rule=hvd.rules.Sharded() if shard else None
                ).close()
                continue
            optimizer = hvd.DistributedOptimizer(
                make(model.parameters()), rule=hvd.rules.Sharded() if shard else None, bucket_bytes=2000
            )
            train(model, optimizer, 3)
            optimizer.close()
        if "fused" in name:
            assert_close(*(model.parameters() for model in models), rtol=1e-5, atol=1e-7)
        else:
            assert_equal(*(model.parameters() for model in models))


@on_ranks(2)
def test_the_trial_leaves_no_trace() -> None:
    """Wrap optimizers that have trained before, under hooks: one that is refused, and one that is not."""
    called: list[object] = []

    def note(*_: object) -> None:
        called.append(note)

    for make, is_refused in ((Lamb, True), (torch.optim.AdamW, False)):
        model = network()
        optimizer = make(model.parameters())
        train(model, optimizer, 2)
        handles = [register(note) for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)]
        handles += [optimizer.register_step_pre_hook(note), optimizer.register_step_post_hook(note)]
        before = copy.deepcopy([*model.parameters(), optimizer.state_dict()])
        numbers = str([random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()])
        if is_refused:
            with pytest.raises(ValueError, match="Lamb"):
                hvd.DistributedOptimizer(optimizer, rule=hvd.rules.Sharded())
            assert str(before) == str([*model.parameters(), optimizer.state_dict()])
        else:
            hvd.DistributedOptimizer(optimizer, rule=hvd.rules.Sharded()).close()
            assert_equal(before[:-1], model.parameters())
        assert numbers == str([random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()])
        assert not called
        optimizer.zero_grad()
        optimizer.step()
        assert len(called) == 4
        called.clear()
        for handle in handles:
            handle.remove()
