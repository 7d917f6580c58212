"""Optimizers and Communicators that go out of scope without close(): what they hold is freed, and join() does without them."""

from __future__ import annotations

import gc
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import gradwire as hvd
from gradwire.collectives import Communicator, PeerLost
from gradwire.trainer.world.world import current_world
from tests.harness import ON_EVERY_TRANSPORT, Worlds, assert_holds, held, wait_until
from tests.ranks.training import in_world, on_ranks

Make = Callable[[nn.Module], torch.optim.Optimizer]


def model_of_two() -> nn.Sequential:
    return nn.Sequential(nn.EmbeddingBag(5, 300, sparse=True), nn.Linear(300, 300))


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


MAKES: list[Make] = [
    lambda model: hvd.DistributedOptimizer(plain(model)),
    lambda model: hvd.DistributedOptimizer(plain(model), compression="topk"),
    lambda model: hvd.DistributedOptimizer(plain(model), rule=hvd.rules.NextForward(model), sparse_as_dense=True),
    lambda model: hvd.DistributedOptimizer(plain(model), rule=hvd.rules.Sharded(), sparse_as_dense=True),
    lambda model: hvd.DistributedOptimizer(plain(model), rule=hvd.rules.LocalUpdates(every=2, delay=1)),
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


def take_equal_steps(count: int) -> None:
    model = nn.Linear(4, 3)
    optimizer = hvd.DistributedOptimizer(plain(model))
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


@ON_EVERY_TRANSPORT
@on_ranks(2)
def test_join_after_the_same_steps() -> None:
    """One rank has dropped its optimizer, of which no other rank needs anything more."""
    model = nn.Linear(4, 3)
    kept = hvd.DistributedOptimizer(plain(model))
    if hvd.rank() == 1:
        del kept
    hvd.barrier()
    take_equal_steps(2)
    if hvd.rank() == 1:
        wait_until(lambda: 0 in current_world().communicator().absence.firsts)  # rank 0 waits in join()
    assert hvd.allgather_object(hvd.join()) == [1, 1]


@ON_EVERY_TRANSPORT
def test_join_after_fewer_steps(ranks: Worlds) -> None:
    """A rank whose optimizer is gone cannot take part in the steps of the others: the errors of all ranks say so."""
    world = ranks.fresh(2)
    try:
        stepping, joined = world.run(errors_of_fewer_steps)
    finally:
        world.kill()
    assert "1 distributed optimizer of this rank, deleted without close()" in joined
    assert "rank 1 deleted its Communicator without close()" in stepping


@in_world
def errors_of_fewer_steps() -> str:
    try:
        take_equal_steps(3 - hvd.rank())
        hvd.join()
    except PeerLost as error:
        sys.excepthook(type(error), error, error.__traceback__)  # as at the end of a script
        return "".join(traceback.format_exception(error))
    return "no error"
