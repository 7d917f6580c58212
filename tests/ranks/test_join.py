"""join(): ranks that have no more data take part with zeros until all have joined."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trainer as hvd
from tests.harness import ON_EVERY_TRANSPORT, Worlds
from tests.ranks.training import assert_close, assert_same_on_all_ranks, copies, in_world

pytestmark = ON_EVERY_TRANSPORT


def data(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)


def model_of(seed: int = 0, width: int = 16) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs, targets = data(rank, step)
    return nn.functional.mse_loss(model(inputs), targets)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def reference(counts: list[int], epochs: int = 1) -> list[torch.Tensor]:
    """The same training in one process: what a rank has no data for counts as zero."""
    model = model_of()
    optimizer = momentum(model)
    for epoch in range(epochs):
        for step in range(max(counts)):
            optimizer.zero_grad()
            for rank, count in enumerate(counts):
                if step < count:
                    (loss_of(model, rank, 50 * epoch + step) / len(counts)).backward()
            optimizer.step()
    return copies(model.parameters())


def everything(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters, and all tensors of the optimizer's state."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [t for p in parameters for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)]
    return copies([*parameters, *states])


@in_world
def train(counts: list[int], epochs: int) -> None:
    model = model_of()
    optimizer = hvd.DistributedOptimizer(momentum(model), bucket_bytes=256)
    for epoch in range(epochs):
        for step in range(counts[hvd.rank()]):
            optimizer.zero_grad()
            loss_of(model, hvd.rank(), 50 * epoch + step).backward()
            optimizer.step()
        last = hvd.join()
        assert counts[last] == max(counts)
        assert hvd.allgather_object(last) == [last] * hvd.size()
        assert_same_on_all_ranks(everything(optimizer))
    assert_close(model.parameters(), reference(counts, epochs))


@pytest.mark.parametrize("counts", [[2, 5], [4, 0], [3, 3], [2, 4, 3], [5, 1, 0, 5]], ids=str)
def test_uneven_steps_equal_one_process_with_zeros(ranks: Worlds, counts: list[int]) -> None:
    ranks(len(counts)).run(train, counts, 2)
