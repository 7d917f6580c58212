"""Sharded states (ZeRO stage 1): against the same training unsharded, to the bit, also through checkpoints on other worlds."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainer as hvd
from collectives import Communicator
from tests.harness import EXCHANGE_TIMEOUT_S, ON_EVERY_TRANSPORT, Worlds, wide
from tests.ranks.training import assert_same_on_all_ranks, copies, in_world
from trainer.gradients.saved import SHARDS

STEPS = 4
SEGMENT_BYTES = 256

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(SGD, foreach=False),
    "sgd foreach": partial(SGD, foreach=True),
    "adam": partial(torch.optim.Adam, lr=0.01, amsgrad=True, foreach=False),
    "adam foreach": partial(torch.optim.Adam, lr=0.01, foreach=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, foreach=False),
    "adamw foreach": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, foreach=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01),  # which has a state from the beginning
}


class Network(nn.Module):
    """Has parameters of every kind: of two dtypes, smaller than a rank's share, unused, frozen, and in another order in memory."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.convolution = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.one = nn.Parameter(torch.ones(()))
        self.unused = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.wide = nn.Linear(20, 33)
        self.last = nn.Linear(33, 7).double()

    def forward(self, inputs: Tensor) -> Tensor:
        seen = self.convolution(inputs).flatten(1).tanh()
        result: Tensor = self.last((self.wide(seen) * self.one).tanh().double())
        return result


def loss_of(model: Network, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(6, 3, 4, 4, generator=generator)
    return (model(inputs) - 1).square().mean()


def grouped(model: Network) -> list[dict[str, Any]]:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return [{"params": matrices, "lr": 0.03}, {"params": others, "weight_decay": 0.0}]


@contextmanager
def exchanged_by(algorithm: str) -> Iterator[Communicator]:
    """A Communicator of small segments whose allreduces go by this algorithm."""
    if algorithm != "auto":
        os.environ["COLLECTIVES_ALLREDUCE"] = algorithm
    try:
        with Communicator(timeout_s=EXCHANGE_TIMEOUT_S, segment_bytes=SEGMENT_BYTES) as communicator:
            yield communicator
    finally:
        os.environ.pop("COLLECTIVES_ALLREDUCE", None)


def wrapped(
    model: Network, communicator: Communicator, name: str, *, shard: bool, **options: Any
) -> hvd.DistributedOptimizer:
    optimizer = OPTIMIZERS[name](grouped(model))
    options = {"process_set": communicator, "bucket_bytes": 1500, **options}
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), shard_states=shard, **options)


def train(model: Network, optimizer: hvd.DistributedOptimizer, steps: range, *, schedule: bool = True) -> None:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, hvd.rank()).backward()
        optimizer.step()
        if schedule:
            scheduler.step()


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def state_bytes(optimizer: hvd.DistributedOptimizer) -> int:
    states = optimizer.state.values()
    return sum(value.nbytes for state in states for name, value in state.items() if name != "step")


@in_world
def compare(name: str, algorithm: str, options: dict[str, Any]) -> None:
    with exchanged_by(algorithm) as one, exchanged_by(algorithm) as other:
        model, twin = Network(), Network()
        whole = wrapped(model, one, name, shard=False, **options)
        sharded = wrapped(twin, other, name, shard=True, **options)
        for steps in (range(1), range(1, STEPS)):  # buckets are laid out anew after the first step
            train(model, whole, steps)
            train(twin, sharded, steps)
            assert_equal(model, twin)
        before = copies(twin.parameters())
        for each, net in ((whole, model), (sharded, twin)):
            net.frozen.requires_grad_(True)
            net.wide.weight.requires_grad_(False)
            each.add_param_group({"params": [extra := nn.Parameter(torch.ones(7))], "lr": 0.5})
            loss = (net.frozen(torch.ones(4)).sum() + net.convolution.bias.sum() + (extra * extra).sum()) * (
                hvd.rank() + 0.3
            )
            each.zero_grad()
            loss.backward()
            each.step()
            net.wide.weight.requires_grad_(True)
            train(net, each, range(STEPS, STEPS + 2))
        assert_equal(model, twin)
        assert not torch.equal(before[0], next(twin.parameters()))
        assert_same_on_all_ranks(twin.parameters())
        each_rank = hvd.allgather_object(state_bytes(sharded))
        assert sum(each_rank) == state_bytes(whole)
        whole.close()
        sharded.close()


@ON_EVERY_TRANSPORT
@pytest.mark.parametrize("size", [1, 2, 3, *wide(4), 5])
@pytest.mark.parametrize(
    ("name", "algorithm"), [("adamw foreach", "auto"), ("sgd", "ring"), ("adam", "rsag"), ("adagrad", "tree")]
)
def test_it_is_the_unsharded_training_to_the_bit(ranks: Worlds, name: str, algorithm: str, size: int) -> None:
    ranks(size).run(compare, name, algorithm, {})
