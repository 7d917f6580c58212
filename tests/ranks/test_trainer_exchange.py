"""How gradients are exchanged: order, overlap, buffers, failures, and the end."""

import time
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import gradwire as hvd
from gradwire.collectives import CollectiveError, Communicator, Mismatch
from gradwire.trainer.world.world import current_world
from tests.ranks.training import (
    assert_same_on_all_ranks,
    buckets_of,
    distributed,
    loss_of,
    on_ranks,
    perceptron,
    share,
    spy,
)


class Parallel(nn.Module):
    """Layers side by side; backward reaches them in the reverse of the order in which they are called."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(count))

    def forward(self, order: list[int]) -> Tensor:
        total = torch.zeros(1, 4)
        for i in order:
            total = total + self.layers[i](torch.ones(1, 4))
        return total.sum()


@on_ranks(2)
def test_buckets_follow_the_order_of_rank_0() -> None:
    """Rank 0 reaches layers 2, 0, 3 and never 1 and 4, which therefore come last."""
    model = Parallel(5)
    optimizer = distributed(model.parameters(), 0.1, named_parameters=model.named_parameters(), bucket_bytes=128)
    sent: list[int] = []
    spy(optimizer, lambda tensor, options: sent.append(tensor.untyped_storage().data_ptr()))
    for step in range(3):
        optimizer.zero_grad()
        sent.clear()
        model([0, 1, 2, 3, 4] if hvd.rank() else [3, 0, 2]).backward()
        buckets = buckets_of(model)
        seen = [[name.split(".")[1] for name in buckets[place]] for place in sent if place in buckets]
        assert seen == ([["2", "0"], ["3", "4"], ["1"]] if step else [["4", "3"], ["2", "1"], ["0"]])
        optimizer.step()
    assert_same_on_all_ranks([p.grad for p in model.parameters() if p.grad is not None])


@on_ranks(2)
def test_parameters_on_the_cpu_are_reduced_in_shared_memory_also_beside_a_gpu() -> None:
    """With a GPU, the ranks of a world can exchange CUDA tensors, over NCCL, which this machine may not have."""
    world = current_world()
    world._membership = replace(world._membership, device_types=("cpu", "cuda"))
    optimizer = distributed(perceptron().parameters(), 0.1)
    assert optimizer.communicator.chosen("allreduce", 1 << 20) == "shared"


@on_ranks(2)
def test_parameters_on_different_devices_are_an_error_on_all_ranks() -> None:
    world = current_world()
    world._membership = replace(world._membership, device_types=("cpu", "cuda")[: 1 + hvd.rank()])
    with pytest.raises(ValueError, match="tensors on cpu and cuda"):
        world.open_communicator(None)


@on_ranks(2)
def test_buckets_travel_while_backward_runs_and_have_arrived_when_it_returns() -> None:
    """Something has been sent when backward() reaches the last parameter, and all ranks have the same when it returns."""
    model = perceptron()
    optimizer = distributed(model.parameters(), 0.1, bucket_bytes=200)
    seen: list[str] = []
    spy(optimizer, lambda *_: seen.append("sent"))
    model[0].weight.register_hook(lambda _: seen.append("the last parameter"))
    for step in range(3):
        optimizer.zero_grad()
        seen.clear()
        loss_of(model, share(step)).backward()
        assert seen[0] == "sent"
        assert "the last parameter" in seen
        assert_same_on_all_ranks([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()


@on_ranks(2)
def test_gradients_are_views_of_fused_buckets() -> None:
    model = perceptron()
    optimizer = distributed(model.parameters(), 0.1)
    sent: list[int] = []
    spy(optimizer, lambda tensor, options: sent.append(tensor.numel()))
    loss_of(model, share(0)).backward()
    assert len({p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None}) == 1
    numel = sum(p.numel() for p in model.parameters())
    assert len(sent) == 1
    assert numel < sent[0] < numel + 6 * 16 + 6, "gradients, padding and one element of presence for each"


LATE_S = 0.4


@on_ranks(2)
def test_time_spent_waiting_is_measured() -> None:
    """Rank 0 is still in backward, for LATE_S and more, when rank 1 begins to wait."""
    model = perceptron()
    optimizer = distributed(model.parameters(), 0.1)

    def be_late(gradient: Tensor) -> None:
        torch.distributed.recv(torch.ones(1), 1)
        time.sleep(LATE_S)

    def tell(gradient: Tensor) -> None:
        torch.distributed.send(torch.ones(1), 0)

    model[0].weight.register_hook(tell if hvd.rank() else be_late)  # of the last gradient
    assert optimizer.communication_wait_s == 0
    begin = time.perf_counter()
    loss_of(model, share(0)).backward()
    waited, took = optimizer.communication_wait_s, time.perf_counter() - begin
    if hvd.rank() == 0:
        assert 0 < waited < took - LATE_S, "what it computed counts as waiting"
    else:
        assert LATE_S / 2 < waited < took


@on_ranks(3)
@pytest.mark.parametrize(
    ("last", "name"),
    [
        ([(3, 4, torch.float32)], "parameter [23]"),
        ([(3, 2, torch.float64)], "parameter [23]"),
        ([(3, 2, torch.float32), (1, 1, torch.float32)], "parameter 4"),
    ],
    ids=["shape", "dtype", "count"],
)
def test_ranks_must_have_the_same_parameters(last: list[tuple[int, int, torch.dtype]], name: str) -> None:
    """The last rank has another shape or dtype, or parameters more."""
    given = last if hvd.rank() == hvd.size() - 1 else [(3, 2, torch.float32)]
    layers = [nn.Linear(2, 3), *(nn.Linear(inputs, outputs, dtype=dtype) for inputs, outputs, dtype in given)]
    with pytest.raises(ValueError, match=f"^rank {hvd.rank()}: .*'{name}' .* on rank 0, and .* on rank 2$"):
        distributed([p for layer in layers for p in layer.parameters()], 0.1)


@on_ranks(2)
def test_failures_surface_from_backward() -> None:
    """Rank 1 does something else than rank 0, and both say so when they call backward(), then and later."""
    model = perceptron()
    communicator = Communicator(timeout_s=2.0)
    optimizer = distributed(model.parameters(), 0.1, process_set=communicator)
    loss_of(
        model, share(0)
    ).backward()  # so that the exchange is known, and has begun when the ranks find that they differ
    other = lambda: communicator.allreduce(torch.zeros(3))  # noqa: E731
    for message in ("the ranks do not agree", "broken", "broken"):
        optimizer.zero_grad()
        call = other if hvd.rank() == 1 and message != "broken" else loss_of(model, share(0)).backward
        with pytest.raises(CollectiveError, match=message):
            call()
    optimizer.close()
    communicator.close()


@on_ranks(2)
def test_training_goes_on_after_a_mismatch_before_data_moved() -> None:
    """Rank 1 does something else than rank 0 before anything is known: both say so, and training goes on."""
    model = perceptron()
    communicator = Communicator(timeout_s=20.0)
    optimizer = distributed(model.parameters(), 0.1, process_set=communicator)
    other = lambda: communicator.allreduce(torch.zeros(3))  # noqa: E731
    with pytest.raises(Mismatch, match=r"float32\[3\]"):
        (loss_of(model, share(0)).backward if hvd.rank() == 0 else other)()
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, share(hvd.rank())).backward()
        optimizer.step()
    mine = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    everyones = [torch.empty_like(mine) for _ in range(communicator.size)]
    communicator.allgather(everyones, mine)
    assert all(torch.equal(other, mine) for other in everyones)
    optimizer.close()
    communicator.close()


@on_ranks(2)
def test_close_gives_parameters_back() -> None:
    """Gradients are local again, and a Communicator that was given stays open."""
    model = perceptron()
    communicator = Communicator()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    for process_set in (None, communicator):
        optimizer = hvd.DistributedOptimizer(inner, process_set=process_set)
        optimizer.close()
        optimizer.close()
    loss_of(model, share(0)).backward()
    inner.step()
    assert len(set(hvd.allgather_object(float(model[0].weight.grad.sum())))) == 2
    total = torch.ones(1)
    communicator.allreduce(total)
    assert total == 2
    communicator.close()
    with pytest.raises(CollectiveError, match="closed"):
        optimizer.step()


@on_ranks(2)
def test_a_wrapper_that_is_dropped_does_not_live_on_in_the_hooks_of_the_parameters() -> None:
    model = perceptron()
    optimizer = distributed(model.parameters(), 0.1)
    loss_of(model, share(0)).backward()
    alive = weakref.ref(optimizer)
    optimizer = distributed(model.parameters(), 0.1)
    assert alive() is None
    optimizer.zero_grad()
    loss_of(model, share(0)).backward()
    assert_same_on_all_ranks([p.grad for p in model.parameters() if p.grad is not None])
