"""When gradients are exchanged: passes, early steps, no_sync, resets, several calls of backward(), and calls that fail."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire as hvd
from tests.ranks.training import distributed, on_ranks


class Scale(nn.Module):
    """One weight, whose gradient is the number passed to push()."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.optimizer = distributed([self.weight], named_parameters=self.named_parameters(), **options)

    def push(self, gradient: float) -> float | None:
        """Run backward(); the weight's gradient afterwards."""
        (self.weight * gradient).sum().backward()
        return self.gradient

    @property
    def gradient(self) -> float | None:
        return None if self.weight.grad is None else float(self.weight.grad)


@contextmanager
def failing_hook(parameter: Tensor) -> Iterator[None]:
    def fail(gradient: Tensor) -> None:
        raise KeyError("from a hook of the user")

    hook = parameter.register_hook(fail)
    with pytest.raises(KeyError, match="from a hook of the user"):
        yield
    hook.remove()


@on_ranks(2)
def test_an_early_step_flushes_and_counting_starts_again() -> None:
    model, rank = Scale(backward_passes_per_step=3), hvd.rank()
    model.push(rank)
    model.push(rank)
    model.optimizer.step()
    assert (float(model.weight), model.gradient) == (-1.0, 1.0)
    model.optimizer.zero_grad()
    assert [model.push(rank), model.push(rank), model.push(rank)] == [rank, 2.0 * rank, 1.5]


@on_ranks(2)
def test_a_step_flushes_passes_after_an_exchange() -> None:
    model, rank = Scale(backward_passes_per_step=2), hvd.rank()
    assert [model.push(rank), model.push(rank), model.push(rank)] == [rank, 1.0, 1.0 + rank]
    model.optimizer.step()
    assert model.gradient == 1.5


@on_ranks(2)
def test_a_step_may_be_left_out() -> None:
    """As when GradScaler finds infinity; then rank 1 has nothing to contribute."""
    model = Scale()
    assert model.push(hvd.rank()) == 0.5
    model.optimizer.zero_grad()
    if hvd.rank() == 0:
        model.push(4)
    model.optimizer.step()
    assert model.gradient == 2.0


@on_ranks(2)
def test_synchronize_flushes_once() -> None:
    model = Scale(backward_passes_per_step=3)
    model.push(hvd.rank())
    for _ in range(2):
        model.optimizer.synchronize()
        assert model.gradient == 0.5
    with model.optimizer.skip_synchronize():
        model.optimizer.step()
    assert (model.gradient, float(model.weight)) == (0.5, -0.5)


@on_ranks(2)
def test_set_backward_passes_per_step() -> None:
    model, rank = Scale(backward_passes_per_step=2), hvd.rank()
    model.push(rank)
    model.optimizer.set_backward_passes_per_step(3)
    assert [model.push(rank), model.push(rank)] == [2.0 * rank, 1.5]
    model.optimizer.zero_grad()
    model.optimizer.set_backward_passes_per_step(1)
    with pytest.raises(ValueError, match="backward_passes_per_step must be a whole number >= 1, not 0"):
        model.optimizer.set_backward_passes_per_step(0)
    assert [model.push(rank), model.optimizer.backward_passes_per_step] == [0.5, 1]


@on_ranks(2)
def test_zero_grad_midway_starts_over() -> None:
    for set_to_none in (True, False):
        model = Scale(backward_passes_per_step=2)
        model.push(7 + hvd.rank())
        model.optimizer.zero_grad(set_to_none=set_to_none)
        assert model.gradient == (None if set_to_none else 0)
        assert [model.push(hvd.rank()), model.push(hvd.rank())] == [hvd.rank(), 1.0]


@on_ranks(2)
def test_no_sync() -> None:
    model, rank = Scale(), hvd.rank()
    with pytest.raises(KeyError), model.optimizer.no_sync():
        raise KeyError
    with model.optimizer.no_sync():
        assert model.push(rank) == rank
        with model.optimizer.no_sync():
            assert model.push(rank) == 2 * rank
        assert model.push(rank) == 3 * rank
    assert model.push(rank) == 2.0
    model.optimizer.zero_grad()
    with model.optimizer.no_sync():
        assert model.push(rank) == rank
    model.optimizer.step()
    assert float(model.weight) == -0.5


@on_ranks(2)
def test_more_calls_of_backward_accumulate_onto_the_average() -> None:
    model = Scale()
    assert [model.push(hvd.rank()), model.push(1 + hvd.rank())] == [0.5, 2.0]
    loss = (model.weight * hvd.rank()).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert model.gradient == 3.0


@on_ranks(2)
def test_sums() -> None:
    """They stay right over resets in every way, and where another parameter alone gets more; more onto a sum is refused."""
    for step in (False, True):
        model = Scale(op=hvd.Sum)
        assert model.push(hvd.rank()) == 1.0
        model.optimizer.zero_grad(set_to_none=False)
        assert model.push(hvd.rank()) == 1.0
        model.zero_grad()
        assert model.push(hvd.rank()) == 1.0
        other = nn.Parameter(torch.zeros(1))
        model.optimizer.add_param_group({"params": [other]})
        (other * hvd.rank()).sum().backward()
        assert (model.gradient, other.grad) == (1.0, 1.0)
        if step:
            model.optimizer.step()
            assert float(model.weight) == -1.0
        with pytest.raises(RuntimeError, match=r"a gradient of 'weight' .*zero_grad"):
            model.push(1)


@on_ranks(2)
def test_a_backward_that_fails_before_its_first_bucket_is_full_leaves_nothing_behind() -> None:
    model = Scale(backward_passes_per_step=2)
    with failing_hook(model.weight):
        model.push(1)
    model.optimizer.zero_grad()
    assert [model.push(hvd.rank()), model.push(hvd.rank())] == [hvd.rank(), 1.0]


@on_ranks(2)
@pytest.mark.parametrize(("failing", "tries_again"), [(1, False), (2, True)])
def test_catching_up_after_a_backward_that_failed(failing: int, tries_again: bool) -> None:
    """So many ranks fail when their first bucket has started; others wait for the second, until those catch up."""
    first, last = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = distributed([first, last], bucket_bytes=1)
    if hvd.rank() < failing:
        with failing_hook(first):
            (first.tanh() * 5 + last).sum().backward()
        if tries_again:
            with pytest.raises(RuntimeError, match=r"failed midway \(call synchronize\(\), then zero_grad\(\)\)"):
                (first.tanh() * 5 + last).sum().backward()
        optimizer.synchronize()
    else:
        (first.tanh() * 5 + last).sum().backward()
    assert tries_again or last.grad == 1.0
    optimizer.zero_grad()
    (first * hvd.rank() + last).sum().backward()
    assert (first.grad, last.grad) == (0.5, 1.0)


@on_ranks(2)
def test_graphs_of_gradients() -> None:
    """torch.autograd.grad neither changes nor exchanges gradients, and may be differentiated into a loss; a gradient that
    requires one is refused."""
    model = Scale()
    (derivative,) = torch.autograd.grad((model.weight**2 * hvd.rank()).sum(), model.weight, create_graph=True)
    assert model.gradient is None
    derivative.sum().backward()
    assert model.gradient == 1.0
    with pytest.raises(RuntimeError, match=r"the gradient of 'weight' requires a gradient itself.*autograd\.grad"):
        (model.weight**2).sum().backward(create_graph=True)
