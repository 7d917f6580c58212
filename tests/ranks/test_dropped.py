"""Optimizers and Communicators that go out of scope without close(): what they hold is freed, and join() does without them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import gradwire as hvd
from gradwire.collectives import Communicator
from tests.harness import ON_EVERY_TRANSPORT, assert_holds, held, wait_until
from tests.ranks.training import on_ranks

Make = Callable[[nn.Module], torch.optim.Optimizer]


def model_of_two() -> nn.Sequential:
    return nn.Sequential(nn.EmbeddingBag(5, 300, sparse=True), nn.Linear(300, 300))


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


MAKES: list[Make] = [
    lambda model: hvd.DistributedOptimizer(plain(model)),
    lambda model: hvd.DistributedOptimizer(plain(model), compression="topk"),
    lambda model: hvd.DistributedOptimizer(plain(model), overlap="next_forward", model=model, sparse_as_dense=True),
    lambda model: hvd.DistributedOptimizer(plain(model), shard_states=True, sparse_as_dense=True),
    lambda model: hvd.LocalUpdates(plain(model), every=2, delay=1),
]


def train_and_drop(make: Make, steps: int) -> nn.Module:
    """Return the model, whose gradients may outlive the optimizer."""
    model = model_of_two()
    optimizer = make(model)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.tensor([[1, 2]])).sum().backward()
        optimizer.step()
    return model


def reduce_and_drop() -> torch.Tensor:
    communicator = Communicator()
    tensor = communicator.empty(100_000).fill_(1)
    work: Any = communicator.allreduce(tensor, async_op=True)
    work.wait()
    communicator.prepare_allreduce(tensor)()
    return tensor


@ON_EVERY_TRANSPORT
@on_ranks(2)
def test_memory_threads_and_descriptors_are_freed() -> None:
    train_and_drop(MAKES[0], 1)  # what the first optimizer of a process makes stays
    hvd.barrier()
    before, threads = held(), threading.active_count()

    def assert_freed() -> None:
        gc.collect()
        wait_until(lambda: threading.active_count() <= threads)
        assert_holds(*before)

    for make in MAKES:
        for steps in (0, 3):
            train_and_drop(make, steps)
    for _ in range(2):
        reduce_and_drop()
    hvd.barrier()
    assert_freed()
    model, tensor = train_and_drop(MAKES[0], 2), reduce_and_drop()
    hvd.barrier()
    assert (
        held()[1] <= before[1] + 2
    )  # the gradients and the tensor: not the ranks' rings, nor the other rank's gradients
    assert torch.equal(tensor, torch.full_like(tensor, 4))
    assert model[1].weight.grad is not None
    del model, tensor
    assert_freed()
