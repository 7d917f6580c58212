"""Ranks train as one process does on the concatenated batch, with all that torch builds around an optimizer: clipping,
GradScaler, schedulers, closures, hooks, state, compiled steps, checkpointed activations. Replicas are equal bit for bit."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

import gradwire as hvd
from tests.harness import wide, wide_rows
from tests.ranks.training import (
    STEPS,
    Data,
    assert_as_in_one_process,
    assert_equal,
    assert_same_on_all_ranks,
    batch,
    copies,
    distributed,
    loss_of,
    on_ranks,
    perceptron,
    sgd,
    share,
    take_steps,
    through_a_file,
)

Optimizer = torch.optim.Optimizer


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups with different options."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 0.05}]


def nesterov(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(groups_of(model), lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(groups_of(model), lr=0.01, weight_decay=0.01)


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(groups_of(model), lr=0.01, weight_decay=0.1, amsgrad=True)


def lbfgs(model: nn.Module) -> Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=6, line_search_fn="strong_wolfe")


def plainly(model: nn.Module, optimizer: Optimizer, data: Data) -> None:
    take_steps(model, optimizer, data, range(STEPS))


def in_parts(model: nn.Module, optimizer: Optimizer, data: Data, *, set_to_none: bool, parts: int) -> None:
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        for part in range(parts):
            (loss_of(model, data(step, part, parts)) / parts).backward()
        optimizer.step()


def without_zero_grad(model: nn.Module, optimizer: Optimizer, data: Data) -> None:
    """Let gradients pile up."""
    for step in range(3):
        loss_of(model, data(step)).backward()
        optimizer.step()


def clipped(model: nn.Module, optimizer: Optimizer, data: Data) -> list[float]:
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        (100 * loss_of(model, data(step))).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    return norms


def scaled(model: nn.Module, optimizer: Optimizer, data: Data) -> list[float]:
    """Unscale and clip between two passes and the step. In step 2 the last sample of the global batch, which one rank has,
    overflows, and all ranks skip the step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            inputs, targets = data(step, part, 2)
            if step == 2 and torch.equal(inputs[-1], batch(step)[0][-1]):
                inputs[-1] = math.inf
            scaler.scale(loss_of(model, (inputs, targets)) / 2).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales[2] < scales[1]
    return scales


def scheduled(model: nn.Module, optimizer: Optimizer, data: Data) -> list[float]:
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    schedulers = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], [2])
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
    rates = []
    for step in range(STEPS):
        take_steps(model, optimizer, data, [step])
        schedulers.step()
        plateau.step(1.0)  # type: ignore[call-arg]
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def by_closures(model: nn.Module, optimizer: Optimizer, data: Data) -> list[float]:
    """LBFGS decides by the loss how often to call a closure, so all ranks must see the same one."""
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


def by_a_closure_of_floats(model: nn.Module, optimizer: Optimizer, data: Data) -> float:
    def closure() -> float:
        model.zero_grad()
        loss = loss_of(model, data(0))
        loss.backward()
        return loss.item()

    return optimizer.step(closure)


def resumed(model: nn.Module, optimizer: Optimizer, data: Data) -> float:
    """Train and save; with several ranks, go astray, load and train on."""
    for step in range(4):
        if step == 2 and isinstance(optimizer, hvd.DistributedOptimizer):
            weights, state = copies(model.parameters()), through_a_file(optimizer.state_dict())
            take_steps(model, optimizer, data, [9])
            optimizer.param_groups[0]["lr"] = 7.0
            optimizer.load_state_dict(state)
            for parameter, saved in zip(model.parameters(), weights, strict=True):
                parameter.data.copy_(saved)
        take_steps(model, optimizer, data, [step])
    rate: float = optimizer.param_groups[0]["lr"]
    return rate


def checkpointed(model: nn.Sequential, optimizer: Optimizer, data: Data, *, reentrant: bool) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = data(step)
        hidden = inputs.requires_grad_(True)
        for layer in model:
            hidden = checkpoint(layer, hidden, use_reentrant=reentrant)
        nn.functional.mse_loss(hidden, targets).backward()
        optimizer.step()


#: How each trains, by which optimizer, and the options of a DistributedOptimizer and tolerances.
CASES: dict[str, tuple[Callable[..., Any], Callable[[nn.Module], Optimizer], dict[str, Any]]] = {
    "a bucket for each": (plainly, nesterov, {"bucket_bytes": 1}),
    "one bucket": (plainly, adam, {"bucket_bytes": 1 << 20}),
    "predivided": (plainly, nesterov, {"gradient_predivide_factor": 3.0}),
    "fp16": (plainly, nesterov, {"compression": hvd.Compression.fp16, "rtol": 1e-2, "atol": 1e-3}),
    "bf16": (plainly, nesterov, {"compression": hvd.Compression.bf16, "rtol": 5e-2, "atol": 1e-2}),
    "zeroed in place": (partial(in_parts, set_to_none=False, parts=1), nesterov, {}),
    "accumulated, zeroed": (partial(in_parts, set_to_none=False, parts=2), adamw, {"backward_passes_per_step": 2}),
    "without zero_grad()": (without_zero_grad, nesterov, {}),
    "clipped": (clipped, nesterov, {}),
    "scaled, in two passes": (scaled, nesterov, {"backward_passes_per_step": 2}),
    "scheduled": (scheduled, nesterov, {}),
    "closures": (by_closures, nesterov, {}),
    "closures, LBFGS": (by_closures, lbfgs, {}),
    "a closure of floats": (by_a_closure_of_floats, nesterov, {}),
    "resumed": (resumed, adamw, {}),
    "checkpointed": (partial(checkpointed, reentrant=False), nesterov, {}),
    "checkpointed, reentrant": (partial(checkpointed, reentrant=True), nesterov, {}),
}


@on_ranks(3, *wide(1))
@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_one_process(case: str) -> None:
    train, make, options = CASES[case]
    assert_as_in_one_process(train, make, **options)


@on_ranks(2)
def test_a_weight_inside_and_outside_of_a_reentrant_checkpoint() -> None:
    """The weight's gradient arrives twice, and that of `first` last. They are the derivatives of
    32 * rank * first * shared**2 + sum(bias), averaged."""
    first, shared = (nn.Parameter(torch.tensor([float(value)])) for value in (2, 3))
    bias = nn.Parameter(torch.zeros(32))
    optimizer = distributed([first, shared, bias], bucket_bytes=128)
    inputs = torch.full((1,), float(hvd.rank()), requires_grad=True)
    (checkpoint(shared.mul, inputs * first, use_reentrant=True) * shared + bias).sum().backward()
    optimizer.close()
    found = [float(p.grad[0]) for p in (first, shared, bias) if p.grad is not None]
    assert found == [32 * 9 / 2, 32 * 2 * 2 * 3 / 2, 1.0]


def called_hooks(model: nn.Module, optimizer: Optimizer, data: Data) -> list[str]:
    calls = []

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        calls.append(f"before {math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters())):.4f}")  # type: ignore[union-attr]

    everywhere = register_optimizer_step_pre_hook(before)
    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(lambda optimizer, args, kwargs: calls.append("after"))
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


@on_ranks(2)
def test_hooks_run_once_each_and_see_the_gradients_that_a_step_uses() -> None:
    model, alone = perceptron(), perceptron()
    expected = called_hooks(alone, sgd(alone.parameters()), batch)
    assert len(expected) == 7
    assert called_hooks(model, hvd.DistributedOptimizer(sgd(model.parameters())), share) == expected


@on_ranks(2)
@pytest.mark.parametrize(
    ("backend", "passes", "policy"),
    [("eager", 1, {"*": "onebit"}), *wide_rows(("eager", 2, None), ("aot_eager", 1, None))],
)
def test_a_compiled_step(backend: str, passes: int, policy: dict[str, Any] | None) -> None:
    """The whole of each step, from zero_grad() to step(), is the same compiled and as written, to the bit.

    With two passes a step it is step() that exchanges. (aot_eager hands out gradients in another order, so buckets are others;
    where a codec rounds them together, that shows.)
    """
    weights = []
    for compiled in (False, True):
        model = perceptron()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.AdamW(model.parameters(), lr=0.01),
            model.named_parameters(),
            backward_passes_per_step=passes,
            policy=policy,
            bucket_bytes=400,
        )

        def train(inputs: Tensor, targets: Tensor, model: Any = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            loss_of(model, (inputs, targets)).backward()
            optimizer.step()

        run = torch.compile(train, backend=backend) if compiled else train
        for step in range(3):
            run(*share(step))
        assert_same_on_all_ranks(model.parameters())
        weights.append(copies(model.parameters()))
        optimizer.close()
    assert_equal(*weights)
