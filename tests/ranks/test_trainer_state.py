"""Starting equal: parameters, optimizer state, objects."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import gradwire as hvd
from tests.harness import Worlds
from tests.ranks.training import assert_same_on_all_ranks, copies, in_world, loss_of, on_ranks, perceptron, share


@in_world
def run(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def check(ranks: Worlds, function: Callable[..., Any], *arguments: Any, size: int = 3) -> None:
    ranks(size).run(run, function, *arguments)


def normalized(seed: int) -> nn.Module:
    """With buffers: floating-point, and a scalar of int64."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for _ in range(seed + 1):
        model(torch.randn(4, 1, 5, 5))
    return model  # type: ignore[no-any-return]


def parameters_of(root: int) -> None:
    wanted = normalized(root).state_dict().values()
    model = normalized(hvd.rank())
    hvd.broadcast_parameters(model.state_dict(), root_rank=root)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(model.state_dict().values(), wanted, strict=True))
    for parameters in (model.named_parameters(), list(model.parameters())):
        for parameter in model.parameters():
            parameter.data += hvd.rank() + 1
        hvd.broadcast_parameters(parameters, root)
        assert_same_on_all_ranks(model.parameters())
    with pytest.raises(TypeError, match=r"can broadcast tensors, .* not str"):
        hvd.broadcast_parameters({"a": "b"}, 0)  # type: ignore[dict-item]


def test_broadcast_parameters(ranks: Worlds) -> None:
    check(ranks, parameters_of, 2)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
    "rate in a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
}


def optimizer_state_of(name: str, wrap: bool, root: int) -> None:
    """Only the root has taken steps, with another learning rate: the others go on as if they had, from where they are."""
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
        hooks_off = optimizer.no_sync() if isinstance(optimizer, hvd.DistributedOptimizer) else None
        if hooks_off is not None:
            with hooks_off:
                closure()
        else:
            closure()
        inner.step(closure if name == "lbfgs" and not wrap else lambda: torch.tensor(1.0))  # type: ignore[arg-type]
        inner.param_groups[0]["initial_lr"] = 0.25
        optimizer.zero_grad()
    before = copies(model.parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=root)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), "parameters moved"
    assert optimizer.param_groups[0]["initial_lr"] == 0.25

    state = optimizer.state_dict()
    everyones = hvd.allgather_object(str(state))
    assert everyones == [everyones[root]] * hvd.size()
    assert state["state"], "there is something to compare"


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_broadcast_optimizer_state(ranks: Worlds, name: str, wrap: bool) -> None:
    check(ranks, optimizer_state_of, name, wrap, 1)


class Schedule(NamedTuple):
    """What an optimizer may keep: a tuple that is not made from an iterable."""

    rate: torch.Tensor
    milestones: tuple[int, ...]


def named_tuples_of(root: int) -> None:
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


def test_broadcast_named_tuples(ranks: Worlds) -> None:
    check(ranks, named_tuples_of, 1)


@on_ranks(3)
def test_broadcast_fresh_optimizer_state() -> None:
    """Nobody has taken a step."""
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (hvd.rank() + 1), weight_decay=0.5)
    before = copies(model.parameters())
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert not optimizer.state


@on_ranks(3)
def test_objects() -> None:
    rank, size = hvd.rank(), hvd.size()
    mine = {"rank": rank, "text": "x" * rank}
    assert hvd.broadcast_object(mine) == {"rank": 0, "text": ""}
    assert hvd.broadcast_object(mine if rank == 2 else None, root_rank=2, name="n") == {"rank": 2, "text": "xx"}
    assert hvd.allgather_object(mine, name="n") == [{"rank": r, "text": "x" * r} for r in range(size)]
