"""The gradients that broadcast_optimizer_state() leaves, as Horovod does, to programs that read them before the first
backward(): zeros, which change no training."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire as hvd
from tests.ranks.training import Data, assert_as_in_one_process, assert_same_on_all_ranks, loss_of, on_ranks, perceptron


class Partly(nn.Module):
    """Uses `late` when told so, and never `idle` and `frozen`."""

    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron()
        self.late, self.idle = nn.Linear(6, 6), nn.Linear(2, 2)
        self.frozen = nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False)
        self.uses_late = False

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.body(self.late(inputs) if self.uses_late else inputs)
        return output


def is_wrapped(optimizer: Any) -> bool:
    return isinstance(optimizer, hvd.DistributedOptimizer)


def fill(model: nn.Module, optimizer: Any) -> None:
    """Reset gradients, and let a distributed optimizer give zeros to the parameters, which can be sent like any gradient."""
    model.zero_grad()
    if is_wrapped(optimizer):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        for parameter in model.parameters():
            assert (parameter.grad is not None) is parameter.requires_grad
            if parameter.grad is not None:
                assert not hvd.broadcast(parameter.grad, root_rank=0).any()


def backward_first(model: Partly, optimizer: Any, data: Data, factor: float = 1.0) -> None:
    """Fill before each step, also after steps, of which the last ones reach another parameter."""
    for step in range(4):
        fill(model, optimizer)
        model.uses_late = step > 1
        (loss_of(model, data(step)) * (factor if is_wrapped(optimizer) else 1.0)).backward()
        optimizer.step()


def zero_grad_first(set_to_none: bool, model: Partly, optimizer: Any, data: Data) -> None:
    fill(model, optimizer)
    for step in range(2):
        if step or is_wrapped(optimizer):  # in one process, no parameter has a gradient to set to zero yet
            optimizer.zero_grad(set_to_none)
        loss_of(model, data(step)).backward()
        optimizer.step()


def two_passes(model: Partly, optimizer: Any, data: Data) -> None:
    """Reach a parameter in the second of two passes only."""
    fill(model, optimizer)
    with optimizer.no_sync() if is_wrapped(optimizer) else nullcontext():
        loss_of(model, data(0)).backward()
    model.uses_late = True
    loss_of(model, data(1)).backward()
    optimizer.step()


def step_first(model: Partly, optimizer: Any, data: Data) -> None:
    fill(model, optimizer)
    optimizer.step()
    loss_of(model, data(0)).backward()
    optimizer.step()


def by_hand(model: Partly, optimizer: Any, data: Data) -> None:
    """Write gradients into the zeros, as if they were the program's."""
    fill(model, optimizer)
    for parameter in model.body.parameters():
        if not is_wrapped(optimizer):
            parameter.grad = torch.zeros_like(parameter)
        assert parameter.grad is not None
        parameter.grad.add_(0.5)
    optimizer.step()


TRAINED = {
    "backward() first": backward_first,
    "zero_grad() first": partial(zero_grad_first, True),
    "zero_grad(set_to_none=False) first": partial(zero_grad_first, False),
    "two passes": two_passes,
    "step() first": step_first,
    "gradients by hand": by_hand,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "by default": {},
    "gradients outside of buckets": {"gradient_as_bucket_view": False},
    "next_forward": {"rule": hvd.rules.NextForward},
}


@on_ranks(2)
@pytest.mark.parametrize("how", TRAINED)
def test_zeros_of_parameters_without_a_gradient_move_nothing(how: str) -> None:
    """The optimizer moves a parameter whose gradient is zero, and leaves one that has none."""
    for options in OPTIONS.values():
        assert_as_in_one_process(TRAINED[how], model_of=Partly, **options)


@on_ranks(2)
def test_zeros_are_no_sums_and_survive_new_buckets() -> None:
    part = partial(backward_first, factor=1 / hvd.size())
    assert_as_in_one_process(part, model_of=Partly, op=hvd.Sum)

    def loads(model: Partly, optimizer: Any, data: Data) -> None:
        fill(model, optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
        loss_of(model, data(0)).backward()
        optimizer.step()
        assert model.idle.weight.grad is None

    assert_as_in_one_process(loads, model_of=Partly, compression="fp16", policy={"body.0.weight": "int8"}, atol=1e-2)


@on_ranks(2)
def test_only_some_ranks_have_the_zeros() -> None:
    """Rank 1 reaches `late`, whose zeros on rank 0 do not count; `idle`, which no rank reaches, stays."""
    model = Partly()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5))
    idle = model.idle.weight.detach().clone()
    fill(model, optimizer)
    if hvd.rank() == 0:
        model.zero_grad()
    model.uses_late = hvd.rank() == 1
    model(torch.ones(1, 6)).sum().backward()
    assert model.late.weight.grad is not None
    assert_same_on_all_ranks([model.late.weight.grad])
    optimizer.step()
    assert torch.equal(model.idle.weight, idle)
    assert model.idle.weight.grad is None
    assert_same_on_all_ranks(model.parameters())


@on_ranks(2)
def test_parameters_have_the_same_names_on_all_ranks() -> None:
    """Under the name by which Horovod's programs ask for them."""
    model = Partly()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([{"params": [each]} for each in model.parameters()], lr=0.1))
    names = optimizer._parameter_names
    assert list(names) == list(model.parameters())
    assert len(set(names.values())) == len(names)
    assert hvd.allgather_object(list(names.values())) == [optimizer.names] * hvd.size()
