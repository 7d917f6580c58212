"""When gradients are exchanged: passes, early steps, no_sync, resets, and several calls of backward()."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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


class Scale(nn.Module):
    """One weight, whose gradient is the number passed to push()."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([self.weight], lr=1.0), named_parameters=self.named_parameters(), **options
        )

    def push(self, gradient: float) -> float | None:
        """Run backward(); the weight's gradient afterwards."""
        (self.weight * gradient).sum().backward()
        return self.gradient

    @property
    def gradient(self) -> float | None:
        return None if self.weight.grad is None else float(self.weight.grad)


@in_world
def run(scenario: Callable[..., Any], *arguments: Any) -> Any:
    return scenario(*arguments)


def check(ranks: Worlds, scenario: Callable[..., Any], expected: Callable[[int], Any], *arguments: Any) -> None:
    """On two ranks; expected(rank)."""
    assert ranks(2).run(run, scenario, *arguments) == [expected(0), expected(1)]


def wrapper_counts_passes() -> list[float | None]:
    model = Scale(backward_passes_per_step=3)
    seen = []
    for _ in range(2):
        seen += [model.push(1 + hvd.rank()), model.push(10), model.push(100 + hvd.rank())]
        model.optimizer.step()
        model.optimizer.zero_grad()
    model.optimizer.close()
    return seen


def test_the_wrapper_counts_passes(ranks: Worlds) -> None:
    """Local sums until the third pass, which averages over ranks."""
    check(ranks, wrapper_counts_passes, lambda rank: [1.0 + rank, 11.0 + rank, 112.0] * 2)


def early_step() -> list[float | None]:
    model = Scale(backward_passes_per_step=3)
    model.push(hvd.rank())
    model.push(hvd.rank())
    model.optimizer.step()
    after = [float(model.weight), model.gradient]
    model.optimizer.zero_grad()
    return [*after, model.push(hvd.rank()), model.push(hvd.rank()), model.push(hvd.rank())]


def test_an_early_step_flushes_and_counting_starts_again(ranks: Worlds) -> None:
    check(ranks, early_step, lambda rank: [-1.0, 1.0, rank, 2.0 * rank, 1.5])


def step_after_one_pass_more() -> list[float | None]:
    model = Scale(backward_passes_per_step=2)
    seen = [model.push(hvd.rank()), model.push(hvd.rank()), model.push(hvd.rank())]
    model.optimizer.step()
    return [*seen, model.gradient]


def test_a_step_flushes_passes_after_an_exchange(ranks: Worlds) -> None:
    check(ranks, step_after_one_pass_more, lambda rank: [rank, 1.0, 1.0 + rank, 1.5])


def skipped_step() -> list[float | None]:
    """No step() after the first backward(), as when GradScaler finds infinity; then rank 1 has nothing to contribute."""
    model = Scale()
    seen = [model.push(hvd.rank())]
    model.optimizer.zero_grad()
    if hvd.rank() == 0:
        model.push(4)
    model.optimizer.step()
    return [*seen, model.gradient]


def test_a_skipped_step(ranks: Worlds) -> None:
    check(ranks, skipped_step, lambda rank: [0.5, 2.0])


def synchronize_early() -> list[float | None]:
    model = Scale(backward_passes_per_step=3)
    model.push(hvd.rank())
    model.optimizer.synchronize()
    flushed = model.gradient
    model.optimizer.synchronize()
    with model.optimizer.skip_synchronize():
        model.optimizer.step()
    return [flushed, model.gradient, float(model.weight)]


def test_synchronize_flushes_once(ranks: Worlds) -> None:
    check(ranks, synchronize_early, lambda rank: [0.5, 0.5, -0.5])


def change_passes() -> list[float | None]:
    model = Scale(backward_passes_per_step=2)
    model.push(hvd.rank())
    model.optimizer.set_backward_passes_per_step(3)
    seen = [model.push(hvd.rank()), model.push(hvd.rank())]
    model.optimizer.zero_grad()
    model.optimizer.set_backward_passes_per_step(1)
    with pytest.raises(ValueError, match="backward_passes_per_step must be a whole number >= 1, not 0"):
        model.optimizer.set_backward_passes_per_step(0)
    return [*seen, model.push(hvd.rank()), model.optimizer.backward_passes_per_step]


def test_set_backward_passes_per_step(ranks: Worlds) -> None:
    check(ranks, change_passes, lambda rank: [2.0 * rank, 1.5, 0.5, 1])


def reset_midway(set_to_none: bool) -> list[float | None]:
    model = Scale(backward_passes_per_step=2)
    model.push(7 + hvd.rank())
    model.optimizer.zero_grad(set_to_none=set_to_none)
    return [model.push(hvd.rank()), model.push(hvd.rank())]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_midway_starts_over(ranks: Worlds, set_to_none: bool) -> None:
    check(ranks, reset_midway, lambda rank: [rank, 1.0], set_to_none)


def accumulate_without_sync() -> list[float | None]:
    model = Scale()
    with pytest.raises(KeyError), model.optimizer.no_sync():
        raise KeyError
    with model.optimizer.no_sync():
        seen = [model.push(hvd.rank())]
        with model.optimizer.no_sync():
            seen += [model.push(hvd.rank())]
        seen += [model.push(hvd.rank())]
    seen += [model.push(hvd.rank())]
    model.optimizer.zero_grad()
    with model.optimizer.no_sync():
        seen += [model.push(hvd.rank())]
    model.optimizer.step()
    return [*seen, float(model.weight)]


def test_no_sync(ranks: Worlds) -> None:
    """Nested, left by an exception, and followed by a step without another pass."""
    check(ranks, accumulate_without_sync, lambda rank: [rank, 2.0 * rank, 3.0 * rank, 2.0, rank, -0.5])


def backward_again() -> list[float | None]:
    model = Scale()
    seen = [model.push(hvd.rank()), model.push(1 + hvd.rank())]
    loss = (model.weight * hvd.rank()).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return [*seen, model.gradient]


def test_more_calls_of_backward_accumulate_onto_the_average(ranks: Worlds) -> None:
    check(ranks, backward_again, lambda rank: [0.5, 2.0, 3.0])


@pytest.mark.parametrize("step", [False, True])
@on_ranks(2)
def test_more_calls_of_backward_are_refused_when_summing(step: bool) -> None:
    model = Scale(op=hvd.Sum)
    model.push(1)
    if step:
        model.optimizer.step()
    with pytest.raises(
        RuntimeError, match=r"a gradient of 'weight' was accumulated onto one already summed.*zero_grad"
    ):
        model.push(1)


def sums() -> list[float | None]:
    """Sums stay right over resets in every way, and where only another parameter gets more."""
    model = Scale(op=hvd.Sum)
    seen = [model.push(hvd.rank())]
    model.optimizer.zero_grad(set_to_none=False)
    seen += [model.push(hvd.rank())]
    model.zero_grad()
    seen += [model.push(hvd.rank())]
    other = nn.Parameter(torch.zeros(1))
    model.optimizer.add_param_group({"params": [other]})
    (other * hvd.rank()).sum().backward()
    assert other.grad is not None
    return [*seen, model.gradient, float(other.grad)]


def test_sums_that_are_reset(ranks: Worlds) -> None:
    check(ranks, sums, lambda rank: [1.0] * 5)


def failed_backward() -> list[float | None]:
    """backward() fails on all ranks before the first bucket is full; nothing is left behind."""
    model = Scale(backward_passes_per_step=2)

    def fail(gradient: Tensor) -> None:
        raise KeyError("from a hook of the user")

    hook = model.weight.register_hook(fail)
    with pytest.raises(KeyError, match="from a hook of the user"):
        model.push(1)
    hook.remove()
    model.optimizer.zero_grad()
    return [model.push(hvd.rank()), model.push(hvd.rank())]


def test_a_failed_backward_leaves_nothing_behind(ranks: Worlds) -> None:
    check(ranks, failed_backward, lambda rank: [rank, 1.0])


def backward_that_fails_late(fails_on: int, tries_again: bool) -> list[float | None]:
    """The ranks below fails_on fail when their first bucket has started; others wait for the second, until those catch up."""
    first, last = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first, last], lr=1.0), bucket_bytes=1)

    def fail(gradient: Tensor) -> None:
        raise KeyError("from a hook of the user")

    if hvd.rank() < fails_on:
        hook = first.register_hook(fail)
        with pytest.raises(KeyError, match="from a hook of the user"):
            (first.tanh() * 5 + last).sum().backward()
        hook.remove()
        if tries_again:
            with pytest.raises(RuntimeError, match=r"failed midway \(go on with synchronize\(\), then zero_grad\(\)\)"):
                (first.tanh() * 5 + last).sum().backward()
        optimizer.synchronize()
    else:
        (first.tanh() * 5 + last).sum().backward()
    caught_up = None if tries_again or last.grad is None else float(last.grad)
    optimizer.zero_grad()
    (first * hvd.rank() + last).sum().backward()
    optimizer.close()
    return [caught_up, *(None if p.grad is None else float(p.grad) for p in (first, last))]


def test_catching_up_after_a_backward_that_failed(ranks: Worlds) -> None:
    check(ranks, backward_that_fails_late, lambda rank: [1.0, 0.5, 1.0], 1, False)


def test_trying_again_after_a_backward_that_failed(ranks: Worlds) -> None:
    check(ranks, backward_that_fails_late, lambda rank: [None, 0.5, 1.0], 2, True)


def partial_derivatives() -> list[Any]:
    """torch.autograd.grad neither changes nor exchanges gradients, and may be differentiated into a loss."""
    model = Scale()
    (derivative,) = torch.autograd.grad((model.weight**2 * hvd.rank()).sum(), model.weight, create_graph=True)
    before = model.gradient
    derivative.sum().backward()
    return [before, model.gradient]


def test_autograd_grad_is_untouched(ranks: Worlds) -> None:
    check(ranks, partial_derivatives, lambda rank: [None, 1.0])


@on_ranks(2)
def test_create_graph_is_refused() -> None:
    model = Scale()
    with pytest.raises(RuntimeError, match=r"the gradient of 'weight' requires a gradient itself.*autograd\.grad"):
        (model.weight**2).sum().backward(create_graph=True)


def train_checkpointed(
    optimizer: torch.optim.Optimizer, model: nn.Sequential, reentrant: bool, whole: bool
) -> list[Tensor]:
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = batch(step) if whole else share(step)
        hidden = inputs.requires_grad_(True)
        for layer in model:
            hidden = checkpoint(layer, hidden, use_reentrant=reentrant)
        nn.functional.mse_loss(hidden, targets).backward()
        optimizer.step()
    return copies(model.parameters())


@in_world
def checkpointed(reentrant: bool) -> list[Tensor]:
    model = perceptron()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), bucket_bytes=200)
    weights = train_checkpointed(optimizer, model, reentrant, whole=False)
    assert_same_on_all_ranks(weights)
    optimizer.close()
    return weights


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpoints(ranks: Worlds, reentrant: bool) -> None:
    model = perceptron()
    expected = train_checkpointed(torch.optim.SGD(model.parameters(), lr=0.1), model, reentrant, whole=True)
    for weights in ranks(2).run(checkpointed, reentrant):
        assert_close(weights, expected, rtol=1e-4, atol=1e-5)


@in_world
def weight_inside_and_outside() -> list[float]:
    """One weight is used in a reentrant checkpoint and outside of it, so its gradient arrives twice; `first` comes last."""
    first, shared = (nn.Parameter(torch.tensor([float(value)])) for value in (2, 3))
    bias = nn.Parameter(torch.zeros(32))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first, shared, bias], lr=1.0), bucket_bytes=128)
    inputs = torch.full((1,), float(hvd.rank()), requires_grad=True)
    (checkpoint(shared.mul, inputs * first, use_reentrant=True) * shared + bias).sum().backward()
    optimizer.close()
    return [float(p.grad[0]) for p in (first, shared, bias) if p.grad is not None]


def test_weight_inside_and_outside_of_a_checkpoint(ranks: Worlds) -> None:
    """The derivatives of 32 * rank * first * shared**2 + sum(bias), averaged."""
    assert ranks(2).run(weight_inside_and_outside) == [[32 * 9 / 2, 32 * 2 * 2 * 3 / 2, 1.0]] * 2


@in_world
def skipping_the_reset() -> list[Tensor]:
    """Without zero_grad(), gradients pile up as they do in one process."""
    model = perceptron()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        loss_of(model, share(step)).backward()
        optimizer.step()
    optimizer.close()
    return copies(model.parameters())


def test_steps_without_zero_grad(ranks: Worlds) -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss_of(model, batch(step)).backward()
        optimizer.step()
    for weights in ranks(3).run(skipping_the_reset):
        assert_close(weights, model.parameters(), rtol=1e-4, atol=1e-5)
