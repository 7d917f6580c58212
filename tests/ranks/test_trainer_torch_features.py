"""What torch builds around an optimizer works as with one process: clipping, GradScaler, schedulers, closures, hooks, state."""

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import gradwire as hvd
from tests.harness import Worlds
from tests.ranks.training import (
    STEPS,
    assert_close,
    assert_same_on_all_ranks,
    batch,
    copies,
    in_world,
    loss_of,
    on_ranks,
    perceptron,
    share,
)

Data = Callable[[int], tuple[Tensor, Tensor]]
Training = Callable[[nn.Module, torch.optim.Optimizer, Data], Any]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=6, line_search_fn="strong_wolfe")


@in_world
def in_ranks(
    train: Training, make: Callable[[nn.Module], torch.optim.Optimizer], **options: Any
) -> tuple[list[Tensor], Any]:
    model = perceptron()
    optimizer = hvd.DistributedOptimizer(make(model), model.named_parameters(), bucket_bytes=400, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = train(model, optimizer, share)
    assert_same_on_all_ranks(model.parameters())
    optimizer.close()
    return copies(model.parameters()), result


def check(
    ranks: Worlds,
    train: Training,
    make: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    size: int = 2,
    **options: Any,
) -> None:
    """The weights, and what `train` returns, are on all ranks those of one process."""
    model = perceptron()
    expected = train(model, make(model), batch)
    for weights, result in ranks(size).run(in_ranks, train, make, **options):
        assert_close(weights, model.parameters(), rtol=1e-4, atol=1e-5)
        assert result == pytest.approx(expected, rel=1e-4)


def clip(model: nn.Module, optimizer: torch.optim.Optimizer, data: Data) -> list[float]:
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        (100 * loss_of(model, data(step))).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    return norms


def test_clipping(ranks: Worlds) -> None:
    check(ranks, clip, size=3)


def scale(model: nn.Module, optimizer: torch.optim.Optimizer, data: Data) -> list[float]:
    """In step 2 the last sample of the global batch, which one rank has, overflows."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales = []
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = data(step)
        if step == 2 and torch.equal(inputs[-1], batch(step)[0][-1]):
            inputs[-1] = math.inf
        scaler.scale(loss_of(model, (inputs, targets))).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def test_grad_scaler_skips_on_all_ranks(ranks: Worlds) -> None:
    check(ranks, scale, size=3)


def schedule(model: nn.Module, optimizer: torch.optim.Optimizer, data: Data) -> list[float]:
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    schedulers = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], [2])
    rates = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, data(step)).backward()
        optimizer.step()
        schedulers.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_schedulers_do_not_warn(ranks: Worlds) -> None:
    check(ranks, schedule)


def use_closure(model: nn.Module, optimizer: torch.optim.Optimizer, data: Data) -> list[float]:
    losses = []
    for step in range(STEPS):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, data(step))
            loss.backward()
            return loss

        loss: Any = optimizer.step(closure)  # type: ignore[arg-type]
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("make", [sgd, lbfgs])
def test_closures(ranks: Worlds, make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    """LBFGS decides by the loss how often to call the closure, so all ranks must see the same."""
    check(ranks, use_closure, make)


def use_closure_of_floats(model: nn.Module, optimizer: torch.optim.Optimizer, data: Data) -> float:
    def closure() -> float:
        model.zero_grad()
        loss = loss_of(model, data(0))
        loss.backward()
        return loss.item()

    return optimizer.step(closure)


def test_closure_that_returns_a_number(ranks: Worlds) -> None:
    check(ranks, use_closure_of_floats)


def use_hooks(model: nn.Module, optimizer: torch.optim.Optimizer, data: Data) -> list[str]:
    """Hooks run once each; those of step() see the gradients it uses."""
    calls = []

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        calls.append(f"before {math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters())):.4f}")  # type: ignore[union-attr]

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        calls.append("after")

    everywhere = register_optimizer_step_pre_hook(before)
    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    optimizer.register_state_dict_pre_hook(lambda optimizer: calls.append("state_dict"))
    optimizer.register_state_dict_post_hook(lambda optimizer, state: calls.append("state_dict done"))
    optimizer.register_load_state_dict_pre_hook(lambda optimizer, state: calls.append("load"))
    optimizer.register_load_state_dict_post_hook(lambda optimizer: calls.append("load done"))
    if isinstance(optimizer, hvd.DistributedOptimizer):
        optimizer.set_backward_passes_per_step(2)  # so that it is step() that exchanges
    loss_of(model, data(0)).backward()
    optimizer.step()
    everywhere.remove()
    optimizer.load_state_dict(optimizer.state_dict())
    return calls


@in_world
def hooks_of(size: int) -> list[str]:
    model = perceptron()
    if size == 1:
        return use_hooks(model, sgd(model), batch)
    return use_hooks(model, hvd.DistributedOptimizer(sgd(model)), share)


def test_hooks(ranks: Worlds) -> None:
    expected = ranks(1).run(hooks_of, 1)[0]
    assert len(expected) == 7
    assert ranks(2).run(hooks_of, 2) == [expected] * 2


def resume(model: nn.Module, optimizer: torch.optim.Optimizer, data: Data) -> float:
    """Train, save, go astray, load, train on."""
    for step in range(4):
        if step == 2:
            weights, state = copies(model.parameters()), copy.deepcopy(optimizer.state_dict())
            loss_of(model, data(9)).backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 7.0
            optimizer.load_state_dict(state)
            for parameter, saved in zip(model.parameters(), weights, strict=True):
                parameter.data.copy_(saved)
        optimizer.zero_grad()
        loss_of(model, data(step)).backward()
        optimizer.step()
    rate: float = optimizer.param_groups[0]["lr"]
    return rate


def resumable(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def test_saving_and_loading(ranks: Worlds) -> None:
    model, again = perceptron(), perceptron()
    resume(model, resumable(model), batch)
    optimizer = resumable(again)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(again, batch(step)).backward()
        optimizer.step()
    for weights, _ in ranks(2).run(in_ranks, resume, resumable):
        assert_close(weights, again.parameters(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("backend", "passes", "policy"),
    [("eager", 1, None), ("eager", 2, None), ("eager", 1, {"*": "onebit"}), ("aot_eager", 1, None)],
)
@on_ranks(2)
def test_a_compiled_step(backend: str, passes: int, policy: dict[str, Any] | None) -> None:
    """With two passes a step it is step() that exchanges. (aot_eager hands out gradients in another order, so buckets are others;
    where a codec rounds them together, that shows.) The whole of each step, zero_grad() to step(): compiled and as written, to the bit."""
    weights = []
    for compiled in (False, True):
        model = perceptron()
        optimizer = hvd.DistributedOptimizer(
            resumable(model), model.named_parameters(), backward_passes_per_step=passes, policy=policy, bucket_bytes=400
        )

        def train(
            inputs: Tensor, targets: Tensor, model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer
        ) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, (inputs, targets))
            loss.backward()
            optimizer.step()
            return loss

        run = torch.compile(train, backend=backend) if compiled else train
        for step in range(STEPS):
            run(*share(step))
        assert_same_on_all_ranks(model.parameters())
        weights.append(copies(model.parameters()))
        optimizer.close()
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
