"""Starting equal: parameters, optimizer state, objects."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import gradwire as hvd
from tests.ranks.training import (
    assert_equal,
    assert_same_on_all_ranks,
    copies,
    loss_of,
    on_ranks,
    perceptron,
    share,
)


def normalized(seed: int) -> nn.Module:
    """With buffers: floating-point, and a scalar of int64."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for _ in range(seed + 1):
        model(torch.randn(4, 1, 5, 5))
    return model  # type: ignore[no-any-return]


@on_ranks(3)
def test_broadcast_parameters() -> None:
    root = 2
    wanted = normalized(root).state_dict().values()
    model = normalized(hvd.rank())
    hvd.broadcast_parameters(model.state_dict(), root_rank=root)
    assert_equal(model.state_dict().values(), wanted)
    for parameters in (model.named_parameters(), list(model.parameters())):
        for parameter in model.parameters():
            parameter.data += hvd.rank() + 1
        hvd.broadcast_parameters(parameters, root)
        assert_same_on_all_ranks(model.parameters())
    with pytest.raises(TypeError, match=r"can broadcast tensors, .* not str"):
        hvd.broadcast_parameters({"a": "b"}, 0)  # type: ignore[dict-item]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
    "rate in a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
}


@on_ranks(3)
@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_broadcast_optimizer_state(name: str, wrap: bool) -> None:
    """Only the root has taken steps, with another learning rate: the others go on as if they had, from where they are."""
    root = 1
    model = perceptron(hvd.rank())
    inner = OPTIMIZERS[name](model.parameters())
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters()) if wrap else inner

    def closure() -> torch.Tensor:
        model.zero_grad()
        loss = loss_of(model, share(0))
        loss.backward()
        return loss

    if hvd.rank() == root:
        OPTIMIZERS[name](model.parameters())
        with optimizer.no_sync() if isinstance(optimizer, hvd.DistributedOptimizer) else nullcontext():
            closure()
        inner.step(closure if name == "lbfgs" and not wrap else lambda: torch.tensor(1.0))  # type: ignore[arg-type]
        inner.param_groups[0]["initial_lr"] = 0.25
        optimizer.zero_grad()
    before = copies(model.parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=root)
    assert_equal(before, model.parameters())
    assert optimizer.param_groups[0]["initial_lr"] == 0.25

    state = optimizer.state_dict()
    everyones = hvd.allgather_object(str(state))
    assert everyones == [everyones[root]] * hvd.size()
    assert state["state"], "there is something to compare"


class Schedule(NamedTuple):
    """What an optimizer may keep: a tuple that is not made from an iterable."""

    rate: torch.Tensor
    milestones: tuple[int, ...]


@on_ranks(3)
def test_broadcast_named_tuples() -> None:
    root = 1
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if hvd.rank() == root:
        optimizer.param_groups[0]["schedule"] = Schedule(torch.tensor(0.5), (1, 2))
        optimizer.state["of all"] = [Schedule(torch.ones(2), ())]  # type: ignore[index]
    hvd.broadcast_optimizer_state(optimizer, root)
    schedule = optimizer.param_groups[0]["schedule"]
    assert schedule == Schedule(torch.tensor(0.5), (1, 2))
    assert isinstance(schedule, Schedule)
    (other,) = optimizer.state["of all"]  # type: ignore[index]
    assert isinstance(other, Schedule)
    assert torch.equal(other.rate, torch.ones(2))


@on_ranks(3)
def test_broadcast_fresh_optimizer_state() -> None:
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (hvd.rank() + 1), weight_decay=0.5)
    before = copies(model.parameters())
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert_equal(before, model.parameters())
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert not optimizer.state


@on_ranks(3)
def test_objects() -> None:
    rank, size = hvd.rank(), hvd.size()
    mine = {"rank": rank, "text": "x" * rank}
    assert hvd.broadcast_object(mine) == {"rank": 0, "text": ""}
    assert hvd.broadcast_object(mine if rank == 2 else None, root_rank=2, name="n") == {"rank": 2, "text": "xx"}
    assert hvd.allgather_object(mine, name="n") == [{"rank": r, "text": "x" * r} for r in range(size)]
