"""What gradients a parameter server gets: of some parameters on some ranks, sparse, not finite; and parameters that have changed
on a rank. All against the same training in one process."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire as hvd
from gradwire.collectives import CollectiveError, Communicator
from tests.ranks.test_parameter_server import served, sgd_of, train
from tests.ranks.training import assert_close, assert_same_on_all_ranks, batch_of, loss_of, network, on_ranks

STEPS = 4
WAYS = ["all serve", "one serves", "in a group"]


def options_of(way: str) -> dict[str, Any]:
    """Return the options of a parameter server."""
    ways = {"one serves": {"servers": [1]}, "in a group": {"inner": hvd.global_process_set}, "alone": {"quorum": 1}}
    return ways.get(way, {})


class Branches(nn.Module):
    """Uses its parts on some ranks or in some steps only: of 5, the last never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList([nn.Linear(3, 2, dtype=torch.float64) for _ in range(5)])

    def loss(self, step: int, rank: int) -> Tensor:
        used = [True, step % 2 == 1, rank == 1, rank == 1 and step == 2, False]
        inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
        return sum(part(inputs).square().mean() for part, is_used in zip(self.parts, used, strict=True) if is_used)


class Lookup(nn.Module):
    """Looks up rows of a sparse embedding, other ones on each rank; on rank 0, none in some steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(20, 3, sparse=True, dtype=torch.float64)

    def loss(self, step: int, rank: int) -> Tensor | None:
        if rank == 0 and step % 2 == 1:
            return None
        return self.table(torch.tensor([step, rank, 7, 7])).square().sum()


class Mixed(Lookup):
    """Has a sparse gradient on rank 0, and a dense one of the same table on rank 1; a matrix is beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(3, 70, dtype=torch.float64)

    def loss(self, step: int, rank: int) -> Tensor | None:
        rows = torch.tensor([step, 7, 7])
        found = self.table(rows) if rank == 0 else nn.functional.embedding(rows, self.table.weight)
        return self.other(found).square().mean()


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.5)


def in_one_process(model: Any, optimizer: torch.optim.Optimizer, size: int) -> None:
    """Train by the averages over all ranks."""
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [loss for rank in range(size) if (loss := model.loss(step, rank)) is not None]
        (sum(losses) / size).backward()
        optimizer.step()


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_parameters_move_as_in_one_process(way: str) -> None:
    for make, make_optimizer in ((Branches, adamw), (Lookup, torch.optim.SparseAdam), (Mixed, torch.optim.Adagrad)):
        alone, model = make(), make()
        in_one_process(alone, make_optimizer(alone.parameters()), hvd.size())
        optimizer = hvd.servers.ParameterServer(
            make_optimizer(model.parameters()), model.named_parameters(), **options_of(way)
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            if (loss := model.loss(step, hvd.rank())) is not None:
                loss.backward()
            optimizer.step()
        assert_close(model.parameters(), alone.parameters(), rtol=1e-9, atol=1e-12)
        assert_same_on_all_ranks(model.parameters())
        optimizer.close()


def clamp(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.1, 0.1)


def clamp_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def replace(model: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())


@pytest.mark.parametrize("way", [*WAYS, "alone"])
@on_ranks(2)
def test_a_change_of_parameters_between_steps_is_an_error_on_all_ranks(way: str) -> None:
    """Change them on rank 1; the same values, written again, are no change. A group is as usable as before."""
    group = Communicator()
    for change in (clamp, clamp_data, replace):
        model, optimizer = served(**({"inner": group} if way == "in a group" else options_of(way)))
        train(model, optimizer, range(1))
        model.load_state_dict(model.state_dict())
        train(model, optimizer, range(1, 2))
        hvd.barrier()
        if hvd.rank() == 1:
            change(model)
        with pytest.raises((RuntimeError, CollectiveError), match="rank 1: this rank") as caught:
            train(model, optimizer, range(2, 30))
        assert isinstance(caught.value, CollectiveError) == (hvd.rank() == 0 and way != "in a group")
        for _ in range(2):
            with pytest.raises(CollectiveError):
                optimizer.step()
        assert group.allgather_record(hvd.rank()) == [0, 1]
        optimizer.close()
    group.close()


def not_finite(step: int, rank: int) -> bool:
    return (step == 1 and rank == 1) or step == 2


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_a_grad_scaler_leaves_out_what_is_not_finite(way: str, clips: bool) -> None:
    """Overflow on rank 1 in one step, and on both ranks in the next."""
    alone, model = network().double(), network().double()
    plain = sgd_of(alone)
    for step in range(STEPS):
        finite = [rank for rank in range(hvd.size()) if not not_finite(step, rank)]
        gradients = [
            torch.autograd.grad(loss_of(alone, batch_of(step, rank, torch.float64)), list(alone.parameters()))
            for rank in finite
        ]
        for number, parameter in enumerate(alone.parameters()):
            parameter.grad = sum(each[number] for each in gradients) / len(finite) if finite else None
        plain.step()
    optimizer = hvd.servers.ParameterServer(sgd_of(model), model.named_parameters(), **options_of(way))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, batch_of(step, hvd.rank(), torch.float64))
        scaler.scale(loss * torch.inf if not_finite(step, hvd.rank()) else loss).backward()
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == (32.0 if hvd.rank() == 0 else 16.0)
    assert_close(model.parameters(), alone.parameters(), rtol=1e-9, atol=1e-12)
    assert_same_on_all_ranks(model.parameters())
    assert set(optimizer.versions) == {STEPS}
    optimizer.close()
