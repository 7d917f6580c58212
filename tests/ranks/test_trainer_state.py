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
def test_broadcast_of_what_else_a_state_may_hold() -> None:
    """Named tuples, expanded tensors and values of other types arrive; what the root cannot send is an error on all ranks."""
    root = 1
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if hvd.rank() == root:
        optimizer.param_groups[0]["schedule"] = Schedule(torch.tensor(0.5), (1, 2))
        optimizer.param_groups[0]["kept_in"] = torch.bfloat16  # nothing that a tree of tensors holds
        optimizer.state["of all"] = [Schedule(torch.ones(1).expand(2), ())]  # type: ignore[index]
    hvd.broadcast_optimizer_state(optimizer, root)
    assert optimizer.param_groups[0]["kept_in"] is torch.bfloat16
    schedule = optimizer.param_groups[0]["schedule"]
    assert schedule == Schedule(torch.tensor(0.5), (1, 2))
    assert isinstance(schedule, Schedule)
    (other,) = optimizer.state["of all"]  # type: ignore[index]
    assert isinstance(other, Schedule)
    assert torch.equal(other.rate, torch.ones(2))
    for unsent in (torch.eye(2).to_sparse(), lambda: 0):
        if hvd.rank() == root:
            optimizer.param_groups[0]["unsent"] = unsent
        with pytest.raises(ValueError, match=f"^rank {hvd.rank()}: rank 1 has what cannot be sent"):
            hvd.broadcast_optimizer_state(optimizer, root)
    optimizer.param_groups[0].pop("unsent", None)
    hvd.broadcast_optimizer_state(optimizer, root)


class Master(torch.optim.Optimizer):
    """Keeps float32 weights and other dtypes in its state, also in nested containers, for parameters of narrow dtypes."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["master"] = parameter.float()
                state["nested"] = {"moments": [torch.zeros_like(state["master"], dtype=torch.float64)]}
                state["step"], state["count"] = torch.tensor(0.0), torch.tensor([2**40 + 1])
                state["signs"] = torch.zeros_like(parameter, dtype=torch.bool)
            (moment,) = state["nested"]["moments"]
            moment.mul_(0.9).add_(parameter.grad)
            state["signs"] = parameter.grad > 0
            state["count"] += 1
            state["step"] += 1
            parameter.copy_(state["master"].sub_(moment.float(), alpha=self.param_groups[0]["lr"]))


def narrow_model() -> nn.Module:
    return perceptron().bfloat16()


def narrow_share(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = share(step)
    return inputs.bfloat16(), targets.bfloat16()


def bits(state: Any) -> Any:
    """Return a state with the bytes and dtype of each tensor in place of it."""
    if isinstance(state, torch.Tensor):
        return str(state.dtype), state.contiguous().view(-1).view(torch.uint8).tolist()
    if isinstance(state, dict):
        return {key: bits(value) for key, value in state.items()}
    return [bits(each) for each in state] if isinstance(state, (list, tuple)) else state


@on_ranks(3)
def test_states_of_other_dtypes_than_the_parameters_arrive_as_they_are() -> None:
    root, model = 1, narrow_model()
    optimizer = Master(model.parameters())
    if hvd.rank() == root:
        loss_of(model, narrow_share(0)).backward()
        optimizer.step()
    mine = bits(optimizer.state_dict())
    hvd.broadcast_optimizer_state(optimizer, root)
    assert bits(optimizer.state_dict()) == hvd.broadcast_object(mine, root)


@on_ranks(3)
def test_join_leaves_states_of_other_dtypes_equal() -> None:
    """Rank 1 takes two steps more than the others, and then all take one."""
    model = narrow_model()
    optimizer = hvd.DistributedOptimizer(Master(model.parameters()), check_replicas_every=1)

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss_of(model, narrow_share(number)).backward()
        optimizer.step()

    for number in range(3 if hvd.rank() == 1 else 1):
        step(number)
    assert hvd.join() == 1
    for _ in range(2):
        held = bits([model.state_dict(), optimizer.state_dict()])
        assert held == hvd.broadcast_object(held, 1)
        assert held[1]["state"][0]["master"][0] == "torch.float32"
        step(3)
    optimizer.close()


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
