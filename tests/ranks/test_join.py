"""join(): ranks that have no more data take part with zeros until all have joined."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import gradwire as hvd
from gradwire.collectives import CollectiveTimeout, PeerJoined, PeerLost
from gradwire.collectives.compression import Int8, OneBit, TopK
from gradwire.trainer.world.world import current_world
from tests.harness import ABOVE_TRANSPORTS, RUN_TIMEOUT_S, World, wait_until
from tests.ranks.training import (
    assert_close,
    assert_same_on_all_ranks,
    assert_survived,
    batch_of,
    copies,
    loss_of,
    network,
    on_ranks,
)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def everything(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [t for p in parameters for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)]
    return copies([*parameters, *states])


@ABOVE_TRANSPORTS
@on_ranks(3)
def test_uneven_steps_equal_one_process_with_zeros() -> None:
    """The rank that takes most steps is neither the first nor the last, and one takes none."""
    counts = [2, 4, 0]
    model, alone = network(), network()
    optimizer, plain = hvd.DistributedOptimizer(momentum(model), bucket_bytes=256), momentum(alone)
    for epoch in range(2):
        for step in range(counts[hvd.rank()]):
            optimizer.zero_grad()
            loss_of(model, batch_of(50 * epoch + step, hvd.rank())).backward()
            optimizer.step()
        last = hvd.join()
        assert hvd.allgather_object(last) == [1] * 3
        assert_same_on_all_ranks(everything(optimizer))
        for step in range(max(counts)):
            plain.zero_grad()
            for rank, count in enumerate(counts):
                if step < count:
                    (loss_of(alone, batch_of(50 * epoch + step, rank)) / 3).backward()
            plain.step()
    assert_close(model.parameters(), alone.parameters())


def plain_step(optimizer: hvd.DistributedOptimizer, model: nn.Module, rank: int, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, batch_of(step, rank)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()


def two_passes(optimizer: hvd.DistributedOptimizer, model: nn.Module, rank: int, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, batch_of(2 * step, rank)).backward()
    loss_of(model, batch_of(2 * step + 1, rank)).backward()
    optimizer.step()


def without_sync(optimizer: hvd.DistributedOptimizer, model: nn.Module, rank: int, step: int) -> None:
    optimizer.zero_grad()
    with optimizer.no_sync():
        loss_of(model, batch_of(2 * step, rank)).backward()
    loss_of(model, batch_of(2 * step + 1, rank)).backward()
    optimizer.step()


def scheduled(optimizer: hvd.DistributedOptimizer, model: nn.Module, rank: int, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.1 / (step + 1)
    plain_step(optimizer, model, rank, step)


#: How an optimizer is made, and what a step of it is. What codecs are for is small here, so each is asked for by name.
WAYS: dict[str, tuple[dict[str, Any], Callable[..., None]]] = {
    "fp16": ({"compression": "fp16"}, plain_step),
    "int8, predivided": (
        {"policy": {"*weight": hvd.ErrorFeedback(Int8())}, "gradient_predivide_factor": 2.0},
        plain_step,
    ),
    "topk": ({"policy": {"*": TopK(0.1)}, "bucket_bytes": 256}, plain_step),
    "powersgd": ({"policy": {"*weight": "powersgd"}}, plain_step),
    "accumulation, onebit": ({"backward_passes_per_step": 2, "policy": {"*weight": OneBit()}}, two_passes),
    "no_sync": ({"bucket_bytes": 256}, without_sync),
    "sums, by a schedule": ({"op": hvd.Sum}, scheduled),
}


def steps_taken(way: str, counts: list[int], *, joins: bool) -> list[torch.Tensor]:
    """Return what two epochs make of a model: those who have no data join, or step with everyone, without gradients."""
    options, step_of = WAYS[way]
    model = network()
    optimizer = hvd.DistributedOptimizer(momentum(model), model.named_parameters(), **options)
    for epoch in range(2):
        for step in range(max(counts)):
            if step < counts[hvd.rank()]:
                step_of(optimizer, model, hvd.rank(), 50 * epoch + step)
            elif not joins:
                optimizer.zero_grad()
                optimizer.synchronize()
                if step_of is scheduled:
                    optimizer.param_groups[0]["lr"] = 0.1 / (50 * epoch + step + 1)
                if step_of in (plain_step, scheduled):
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
        if joins:
            hvd.join()
            assert_same_on_all_ranks(everything(optimizer))
    return everything(optimizer)


@on_ranks(3)
def test_joined_ranks_do_as_ranks_without_gradients() -> None:
    for way in WAYS:
        joined, stepped = (steps_taken(way, [2, 0, 1], joins=joins) for joins in (True, False))
        assert all(map(torch.equal, joined, stepped)), way


@on_ranks(3)
def test_closures() -> None:
    model = network()
    optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters(), max_iter=3))

    def closure(step: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch_of(step, hvd.rank()))
        loss.backward()
        return loss

    for step in range(1 + hvd.rank()):
        optimizer.step(partial(closure, step))
    assert hvd.join() == hvd.size() - 1
    assert_same_on_all_ranks(model.parameters())


@on_ranks(3)
def test_two_optimizers() -> None:
    """A generator and a discriminator, and one loss through both."""
    first, second = network(seed=1), network(seed=2)
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), bucket_bytes=256) for model in (first, second)
    ]
    for step in range(2 + 2 * (hvd.rank() == 0)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (loss_of(first, batch_of(step, hvd.rank())) + loss_of(second, batch_of(step, hvd.rank()))).backward()
        for optimizer in optimizers:
            optimizer.step()
        optimizers[1].zero_grad()
        loss_of(second, batch_of(step + 10, hvd.rank())).backward()
        optimizers[1].step()
        shown = hvd.allreduce(torch.ones(()))  # a metric
        assert shown in ([1.0] if step < 2 else [torch.tensor(1 / hvd.size())])
    assert hvd.join() == 0
    for optimizer in optimizers:
        assert_same_on_all_ranks(everything(optimizer))


@on_ranks(3)
def test_verbs_with_zeros() -> None:
    size, late = hvd.size(), hvd.size() - 1
    if hvd.rank() == late:
        ones = torch.ones(5)
        for share, op in ((1 / size, hvd.Average), (1.0, hvd.Sum)):
            assert torch.equal(hvd.allreduce(ones, op=op), torch.full((5,), share))
            assert torch.equal(hvd.allreduce(ones.clone(), op=op), torch.full((5,), share))  # the quick way
        assert torch.equal(hvd.allreduce(torch.tensor([6, 9]), op=hvd.Sum), torch.tensor([6, 9]))
        whole, half = hvd.grouped_allreduce([ones, torch.ones(2, 2, dtype=torch.float16)], op=hvd.Sum)
        assert whole.tolist() == [1.0] * 5
        assert half.tolist() == [[1.0, 1.0]] * 2
        handles = [hvd.allreduce_async(torch.full((n,), 2.0), op=hvd.Sum, name=f"n{n}") for n in (1, 3, 7)]
        grouped = hvd.grouped_allreduce_async([ones, ones], op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
        assert [hvd.synchronize(handle).sum() for handle in handles] == [2.0, 6.0, 14.0]
        assert [output.tolist() for output in hvd.synchronize(grouped)] == [[2.0] * 5] * 2
        for compression in (hvd.Compression.fp16, "int8"):
            assert_close([hvd.allreduce(ones, op=hvd.Sum, compression=compression)], [ones], atol=0.02, rtol=0)
        leaf = torch.ones(3, requires_grad=True)
        hvd.allreduce(leaf, op=hvd.Average).sum().backward()
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, torch.full((3,), 1 / size))
        hvd.barrier()
        hvd.allreduce_async(torch.ones(4), op=hvd.Sum)  # for whose end join() waits
    assert hvd.join() == late
    assert torch.equal(hvd.allreduce(torch.ones(3), op=hvd.Sum), torch.full((3,), float(size)))
    assert hvd.join(-1) in range(size)  # all at once


def refused_verbs() -> list[Callable[[], object]]:
    communicator, is_root, size = current_world().communicator(), hvd.rank() == 1, hvd.size()
    values, parts = torch.ones(2 * size, 2), [torch.ones(2) for _ in range(size)]
    return [
        *(partial(verb, values) for verb in (hvd.allgather, hvd.alltoall, hvd.reducescatter, communicator.reduce)),
        *(partial(hvd.broadcast, values, root) for root in (0, 1)),
        *(partial(hvd.allreduce, values, op=op) for op in (hvd.Min, hvd.Max, hvd.Product)),
        partial(hvd.allgather_object, {"rank": hvd.rank()}),
        partial(hvd.broadcast_object, [1], 0),
        partial(hvd.alltoall, values, splits=[2] * size),
        lambda: communicator.gather(values[0], parts if is_root else None, 1),
        lambda: communicator.scatter(values[0].clone(), parts if is_root else None, 1),
    ]


class Averaging(hvd.rules.Rule):
    """Averages parameters after every step, and knows nothing of joining."""

    def after_step(self) -> None:
        for parameter in self.setup.optimizer.param_groups[0]["params"]:
            self.communicator.allreduce(parameter.detach(), "average")


@on_ranks(3)
def test_what_cannot_be_is_refused() -> None:
    """Rank 0 joins at once; the others call what cannot be, and go on."""
    optimizer = hvd.DistributedOptimizer(momentum(network()), rule=Averaging)
    if hvd.rank() > 0:
        for call in refused_verbs():
            with pytest.raises(PeerJoined, match="not supported while rank 0 has joined") as caught:
                call()
            assert caught.value.ranks == (0,)
            assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size() - 1.0] * 2
        for handle in [hvd.broadcast_async(torch.ones(n), 1) for n in range(20)]:  # the root is soon far ahead
            with pytest.raises(PeerJoined):
                hvd.synchronize(handle)
        with pytest.raises(PeerJoined):
            optimizer.step()
    assert hvd.join() in range(1, hvd.size())
    optimizer.step()
    with pytest.raises(ValueError, match="device must be the index"):
        hvd.join(-2)


@on_ranks(3)
def test_leftovers() -> None:
    """What rank 0 has accumulated goes into the step of the others, and windows begin anew."""
    weight = nn.Parameter(torch.zeros(3))
    sgd = torch.optim.SGD([weight], lr=1.0)
    optimizer = hvd.DistributedOptimizer(sgd, backward_passes_per_step=2, op=hvd.Sum)
    closed = hvd.DistributedOptimizer(momentum(network()))
    closed.close()
    weight.sum().backward()
    if hvd.rank() > 0:
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        weight.sum().backward()  # of a step that is given up
    assert hvd.join() > 0
    expected = -(1.0 + 2 * (hvd.size() - 1))
    assert weight.tolist() == [expected] * 3
    weight.grad = None  # and not zero_grad() of this optimizer, which begins a window by itself
    for _ in range(2):
        weight.sum().backward()
    optimizer.step()
    assert weight.tolist() == [expected - 2 * hvd.size()] * 3


@on_ranks(3)
def test_others_that_do_nothing() -> None:
    """Rank 0 gives up when the others do nothing."""
    communicator = current_world().communicator()
    if hvd.rank() == 0:
        communicator._engine.operations.timeout_s = 0.5
        with pytest.raises(CollectiveTimeout) as caught:
            hvd.join()
        assert caught.value.waiting_for == (1, 2)
        return
    wait_until(lambda: communicator.absence.has_leavers)
    with pytest.raises(PeerLost):
        hvd.join()


class Abandoned(Exception): ...


def told(how: str) -> str:
    """Join on rank 0, end on the last one, train on the others; return what a survivor is told."""
    hvd.init(timeout_s=RUN_TIMEOUT_S / 2)
    model = network()
    optimizer = hvd.DistributedOptimizer(momentum(model))

    def go_on() -> None:
        if hvd.rank() == 0:
            hvd.join()
        for step in range(1000):
            if hvd.rank() == hvd.size() - 1 and step == 3:
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "closing":  # the others leave the world before this rank does
                    optimizer.close()
                raise Abandoned
            plain_step(optimizer, model, hvd.rank(), step)

    with pytest.raises((PeerLost, Abandoned)) as caught:
        go_on()
    hvd.shutdown()
    return str(caught.value)


@pytest.mark.parametrize("how", ["killed", "raising", "closing"])
def test_a_rank_that_ends_while_others_have_joined_is_named(failing_world: Callable[[int], World], how: str) -> None:
    world = failing_world(3)
    world.start(told, how)
    for said in assert_survived(world, [2]):
        assert "lost rank 2" in said


@on_ranks(3)
def test_replicas_are_checked_when_nobody_has_joined() -> None:
    """Checks are left out while somebody has joined, and come at the same steps on all ranks afterwards."""
    model = network()
    optimizer = hvd.DistributedOptimizer(momentum(model), check_replicas_every=2)
    for epoch in range(3):
        for step in range(3 + hvd.rank()):
            plain_step(optimizer, model, hvd.rank(), 50 * epoch + step)
        hvd.join()
        assert hvd.allgather_object(optimizer.steps) == [(epoch + 1) * (2 + hvd.size())] * hvd.size()
        assert_same_on_all_ranks(everything(optimizer))


@on_ranks(2)
def test_sparse_gradients_go_on() -> None:
    for head in (nn.Linear(4, 2), nn.Identity()):
        model = nn.Sequential(nn.Embedding(20, 4, sparse=True), head)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _epoch in range(2):
            for step in range(2 + 2 * hvd.rank()):
                optimizer.zero_grad()
                model(torch.tensor([step, hvd.rank() + 5])).square().sum().backward()
                optimizer.step()
            hvd.join()
            assert_same_on_all_ranks(model.parameters())
        optimizer.close()


@on_ranks(2)
def test_a_rank_without_batches_stands_in_for_sparse_gradients_alone() -> None:
    model = nn.Embedding(1 << 18, 4, sparse=True)  # large enough that its gradients are never in a bucket
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(4 * hvd.rank()):
        optimizer.zero_grad()
        model(torch.tensor([step, 5])).square().sum().backward()
        optimizer.step()
    hvd.join()
    assert_same_on_all_ranks(model.parameters())
    optimizer.close()
