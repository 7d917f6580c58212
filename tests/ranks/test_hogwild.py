"""Hogwild: one set of parameters for all ranks of a host, what each may count on there, and what is refused."""

from __future__ import annotations

import copy
import gc
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire as hvd
from tests.harness import World, Worlds, meet, wide
from tests.ranks.exact import on_host
from tests.ranks.training import (
    assert_equal,
    assert_same_on_all_ranks,
    assert_survived,
    copies,
    in_world,
    loss_of,
    on_ranks,
    perceptron,
    share,
)

STEPS = 20
ROWS = 3  # of each rank


def sgd_of(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.5, **settings})


def mapped() -> int:
    """Return how many times this process has shared memory mapped."""
    return sum("memfd:gradwire" in line for line in Path("/proc/self/maps").read_text().splitlines())


@on_ranks(1, 3)
def test_all_ranks_see_what_each_writes() -> None:
    """Step on all ranks at the same time, each on rows of its own: by each step, 0.5 less."""
    model = nn.Embedding(ROWS * hvd.size(), 5, sparse=True)
    nn.init.constant_(model.weight, float(hvd.rank()))
    optimizer = hvd.servers.Hogwild(sgd_of(model), model.named_parameters())
    mine = torch.arange(ROWS * hvd.rank(), ROWS * (hvd.rank() + 1))
    hvd.barrier()
    for _ in range(STEPS * (1 + hvd.rank())):
        optimizer.zero_grad()
        model(mine).sum().backward()
        assert optimizer.step() is None
    assert torch.equal(model.weight[mine], torch.full((ROWS, 5), -0.5 * STEPS * (1 + hvd.rank())))
    hvd.barrier()
    wanted = torch.arange(1, hvd.size() + 1).repeat_interleave(ROWS) * STEPS * -0.5
    assert torch.equal(model.weight.detach(), wanted[:, None].expand(-1, 5))
    hvd.barrier()
    optimizer.close()


class Mixed(nn.Module):
    """Hold parameters of several dtypes, layouts and sizes, one of them frozen, one tied, and one empty."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.convolution = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.scale = nn.Parameter(torch.randn((), dtype=torch.float64))
        self.matrix = nn.Parameter(torch.randn(5, 3).t())
        self.tied = self.matrix
        self.brief = nn.Parameter(torch.randn(7).bfloat16())
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.convolution(inputs).mean((2, 3)) * self.scale + self.frozen
        out: Tensor = (features.float() @ self.matrix).square().sum() + self.brief.float().square().sum()
        return out + self.empty.sum()


def step_once(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, closure: bool) -> None:
    inputs = torch.randn(2, 2, 5, 5, generator=torch.Generator().manual_seed(number))

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(inputs)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    if closure:
        assert isinstance(optimizer.step(evaluate), Tensor)  # type: ignore[arg-type]
    else:
        evaluate()
        optimizer.step()


@on_ranks(3)
def test_ranks_that_take_turns_are_one_process_to_the_bit() -> None:
    """Train one after the other, to the bit as one process does that has an optimizer for each rank."""
    model = Mixed(seed=hvd.rank())
    weight, matrix = model.convolution.weight, model.matrix
    strides = [parameter.stride() for parameter in model.parameters()]
    named = sorted(model.named_parameters(), reverse=bool(hvd.rank()))  # each rank may have its own order
    plain = torch.optim.AdamW([parameter for _, parameter in named], lr=0.1)
    optimizer = hvd.servers.Hogwild(plain, named)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    assert model.convolution.weight is weight
    assert model.tied is model.matrix is matrix
    assert [parameter.stride() for parameter in model.parameters()] == strides

    alone = Mixed(seed=0)
    theirs = [torch.optim.AdamW(alone.parameters(), lr=0.1) for _ in range(hvd.size())]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in theirs]
    for number in range(3 * hvd.size()):
        turn = number % hvd.size()
        if turn == hvd.rank():
            step_once(model, optimizer, number, closure=number % 2 == 0)
            scheduler.step()
        step_once(alone, theirs[turn], number, closure=False)
        schedulers[turn].step()
        hvd.barrier()
        assert_equal(model.parameters(), alone.parameters())
        hvd.barrier()
    optimizer.close()


@on_ranks(3)
def test_who_closes_has_a_copy_and_leaves_the_others_alone() -> None:
    """Close one rank after the other; what is left of the shared memory goes with the last."""
    gc.collect()
    before = mapped()
    model = nn.Linear(2, 2, bias=False)
    optimizer = hvd.servers.Hogwild(sgd_of(model))
    shared = copies(model.parameters())
    assert mapped() == before + 1
    hvd.barrier()
    if hvd.rank() == 0:
        optimizer.close()
        gc.collect()
        assert mapped() == before
        with torch.no_grad():
            model.weight.fill_(7)
        optimizer.close()
        assert model.weight.eq(7).all()
        with pytest.raises(RuntimeError, match="rank 0: this optimizer is closed"):
            optimizer.step()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.optimizer.step()
        assert model.weight.eq(6.5).all()
    hvd.barrier()
    if hvd.rank() != 0:
        assert torch.equal(model.weight, shared[0])
        optimizer.close()
        gc.collect()
        assert mapped() == before
        assert torch.equal(model.weight, shared[0])


def lose_one(dies: int) -> None:
    """Lose a rank: the others have what it wrote, and train on, though they have left all Communicators."""
    hvd.init()
    model = nn.Embedding(3, 2, sparse=True)
    nn.init.zeros_(model.weight)
    optimizer = hvd.servers.Hogwild(sgd_of(model, lr=1.0))
    mine = torch.tensor([hvd.rank()])
    hvd.barrier()
    model(mine).sum().backward()
    optimizer.step()
    meet("trained")
    if hvd.rank() == dies:
        os._exit(0)
    hvd.shutdown()
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(mine).sum().backward()
        optimizer.step()
    assert model.weight[mine].eq(-(STEPS + 1)).all()
    assert model.weight[dies].eq(-1).all()
    optimizer.close()


@pytest.mark.parametrize("dies", [0, 2])
def test_nothing_is_needed_of_the_others(failing_world: Callable[[int], World], dies: int) -> None:
    world = failing_world(3)
    world.start(lose_one, dies)
    assert_survived(world, [dies])


@on_ranks(4)
def test_process_sets_have_parameters_of_their_own() -> None:
    """Train two sets of parameters in one world, each shared by two ranks."""
    evens, odds = hvd.add_process_set([0, 2]), hvd.add_process_set([1, 3])
    mine, other = (evens, odds) if evens.included() else (odds, evens)
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match="is not part of"):
        hvd.servers.Hogwild(sgd_of(model), process_set=other)
    optimizer = hvd.servers.Hogwild(sgd_of(model), process_set=mine)
    if mine.rank() == 1:
        with torch.no_grad():
            model.weight.fill_(float(hvd.rank()))
    hvd.barrier()
    assert model.weight.eq(2 + hvd.rank() % 2).all()
    hvd.barrier()
    optimizer.close()


@on_ranks(2)
def test_state_is_each_ranks_own() -> None:
    model = perceptron()
    optimizer = hvd.servers.Hogwild(
        torch.optim.Adam(model.parameters(), lr=0.1 * (1 + hvd.rank())), model.named_parameters()
    )
    hvd.barrier()
    loss_of(model, share(0)).backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["param_groups"][0]["lr"] == 0.1 * (1 + hvd.rank())
    assert saved.keys() == {"state", "param_groups"}
    plain = torch.optim.Adam(perceptron().parameters())
    plain.load_state_dict(saved)
    optimizer.step()
    optimizer.load_state_dict(plain.state_dict())
    for name, theirs in saved["state"].items():
        assert all(torch.equal(optimizer.state_dict()["state"][name][key], theirs[key]) for key in theirs)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copied(optimizer)
    hvd.barrier()
    twin = copy.deepcopy(model)  # the model can be, and has memory of its own then
    with torch.no_grad():
        next(twin.parameters()).fill_(hvd.rank())
    hvd.barrier()
    assert_same_on_all_ranks(model.parameters())
    assert repr(optimizer).startswith("Hogwild(Adam")
    hvd.barrier()
    optimizer.close()


@on_ranks(2)
def test_what_cannot_be_meant_is_refused() -> None:
    model = perceptron()
    for wrong in (model, hvd.DistributedOptimizer(sgd_of(model)), hvd.servers.Hogwild(sgd_of(model))):
        with pytest.raises(TypeError, match=f"rank {hvd.rank()}: optimizer "):
            hvd.servers.Hogwild(wrong)  # type: ignore[arg-type]
    sparse, meta = nn.Parameter(torch.eye(3).to_sparse()), nn.Parameter(torch.ones(1, device="meta"))
    other = nn.Parameter(torch.ones(2 + hvd.rank()))
    picture = nn.Parameter(torch.ones(2, 3).t() if hvd.rank() else torch.ones(3, 2))
    for parameter, named, error, said in (
        (sparse, None, TypeError, "'parameter 0' cannot be trained by Hogwild: a dense tensor is needed"),
        (meta, None, ValueError, "'parameter 0' is on meta; Hogwild trains parameters on the CPU"),
        (other, [], ValueError, "must name all parameters"),
        (other, ["weight"], ValueError, "ranks 0 and 1 do not train the same parameters: 'weight'"),
        (picture, ["image"], ValueError, r"image.stride\(\) is \(2, 1\) on rank 0; \(1, 3\) on rank 1"),
    ):
        with pytest.raises(error, match=said):
            hvd.servers.Hogwild(torch.optim.SGD([parameter]), named and [(name, parameter) for name in named])
    optimizer = hvd.servers.Hogwild(sgd_of(model), model.named_parameters())
    with pytest.raises(ValueError, match="cannot be added to a Hogwild optimizer"):
        optimizer.add_param_group({"params": []})
    model.to(torch.float64)
    with pytest.raises(RuntimeError, match=r"'0.weight' is no longer in the memory that the ranks share"):
        optimizer.step()
    optimizer.close()
    assert next(model.parameters()).dtype == torch.float64


@in_world
def share_nothing(said: str) -> None:
    """See errors, with which nothing is changed on any rank."""
    model = perceptron(hvd.rank())
    before = [(parameter.data_ptr(), parameter.detach().clone()) for parameter in model.parameters()]
    with pytest.raises(ValueError, match=said):
        hvd.servers.Hogwild(sgd_of(model), model.named_parameters())
    for parameter, (address, value) in zip(model.parameters(), before, strict=True):
        assert parameter.data_ptr() == address
        assert torch.equal(parameter, value)


@on_ranks(3, initialized=False)
def test_ranks_of_several_hosts_are_refused() -> None:
    with on_host(f"host {torch.distributed.get_rank() % 2}"):
        share_nothing(
            "rank [012]: memory can be shared by the ranks of one host only; these are on 2 hosts: ranks 0, 2; rank 1$"
        )


@pytest.mark.parametrize("ranks", ["sockets", *wide("process_group")], indirect=True)
def test_ranks_that_share_no_memory_are_refused(ranks: Worlds) -> None:
    ranks(3).run(share_nothing, "ranks 0, 1, 2 are on one host but share no memory: it is turned off")
