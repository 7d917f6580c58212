"""Sharded states whose parameters come back as codes: nothing that codes lose is lost, and replicas keep to each other."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire as hvd
from gradwire.collectives.compression import Int8
from gradwire.trainer.reducer.shards.optimizer_shards import SHARDS
from tests.harness import Worlds
from tests.ranks.test_trainer_sharded_states import Network, exchanged_by, train, wrapped
from tests.ranks.training import (
    assert_equal,
    assert_same_on_all_ranks,
    copies,
    distributed,
    in_world,
    on_ranks,
    through_a_file,
)

STEPS = 6


class Slope(nn.Module):
    """Has a loss whose gradient is the same wherever the parameters are: what a step makes of them does not depend on codes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(37, 90))
        self.vector = nn.Parameter(torch.randn(11))
        self.beside = nn.Parameter(torch.randn(500))  # in one bucket with it

    def loss(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(rank)
        return sum((each * torch.randn(each.shape, generator=generator)).sum() for each in self.parameters())


def residuals(optimizer: hvd.DistributedOptimizer) -> list[Tensor]:
    """Return the residual of each parameter, on all ranks alike. Collective."""
    part = optimizer.state_dict()[SHARDS]
    whole = []
    for parameter, ranges, mine in zip(
        (each for group in optimizer.param_groups for each in group["params"]),
        part["ranges"],
        part["residuals"],
        strict=True,
    ):
        flat = torch.zeros(parameter.numel())
        lengths = [stop - start for start, stop in ranges]
        for (start, stop), values in zip(ranges, mine.split(lengths), strict=True):
            flat[start:stop] = values
        whole.append(hvd.allreduce(flat, op=hvd.Sum).view(parameter.shape))
    return whole


@on_ranks(2)
@pytest.mark.parametrize(
    ("algorithm", "compression", "ratio"),
    [
        ("auto", "fp16", 1.3),
        ("ring", "int8", 1.5),
        ("ring", "topk", 1.8),
        ("auto", Int8(stochastic=True), 1.5),
    ],
    ids=str,
)
def test_what_codes_lose_stays_with_the_piece(algorithm: str, compression: Any, ratio: float) -> None:
    """ratio: of the bytes that parameters take without codes and with them, gradients being as many."""
    with exchanged_by(algorithm) as one, exchanged_by(algorithm) as other:
        model, twin = Slope(), Slope()
        plain = distributed(model.parameters(), 0.01, process_set=one)
        coded = distributed(
            twin.parameters(),
            0.01,
            process_set=other,
            bucket_bytes=5000,
            rule=hvd.rules.Sharded(compression),
        )
        for number in range(STEPS):
            for net, optimizer in ((model, plain), (twin, coded)):
                net.vector.requires_grad_(number != 1)  # so that what shares its bucket is cut anew
                optimizer.zero_grad()
                net.loss(hvd.rank()).backward()
                optimizer.step()
        assert_same_on_all_ranks(twin.parameters())
        for mine, theirs, residual in zip(model.parameters(), twin.parameters(), residuals(coded), strict=True):
            torch.testing.assert_close(theirs + residual, mine, rtol=1e-5, atol=1e-6)
        moved = model.matrix - Slope().matrix
        assert 0 < (twin.matrix - model.matrix).norm() / moved.norm() < 1, "codes lose something, but not all"
        assert hvd.size() == 1 or ratio < coded.stats.ratio < 2, "gradients travel as they are, half of all bytes"
        plain.close()
        coded.close()


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "topk", "parameter_compression": hvd.ErrorFeedback("onebit", warmup_steps=2)},
        {"compression": "int8", "parameter_compression": "bf16"},
    ],
    ids=str,
)
@on_ranks(3)
def test_replicas_are_equal_whatever_is_frozen_meanwhile(options: dict[str, Any]) -> None:
    with exchanged_by("auto") as communicator:
        model = Network()
        optimizer = wrapped(model, communicator, "adamw foreach", shard=True, **options)
        before = copies(model.parameters())
        train(model, optimizer, range(3))
        model.frozen.requires_grad_(True)
        model.wide.weight.requires_grad_(False)
        train(model, optimizer, range(3, 5))
        model.wide.weight.requires_grad_(True)
        train(model, optimizer, range(5, 7))
        assert_same_on_all_ranks(model.parameters())
        assert all(parameter.isfinite().all() for parameter in model.parameters())
        assert not torch.equal(before[0], next(model.parameters()))
        optimizer.close()


OPTIONS: dict[str, Any] = {"compression": "int8", "parameter_compression": Int8(stochastic=True)}


@in_world
def save_and_go_on() -> tuple[Any, Any, list[Tensor]]:
    """Return model and optimizer as they were saved midway, and the residuals then."""
    with exchanged_by("ring") as communicator:
        model = Network()
        optimizer = wrapped(model, communicator, "adam", shard=True, **OPTIONS)
        train(model, optimizer, range(3), schedule=False)
        weights, state = through_a_file([model.state_dict(), optimizer.state_dict()])
        saved = residuals(optimizer)
        train(model, optimizer, range(3, 6), schedule=False)
        optimizer.close()
    with exchanged_by("ring") as communicator:
        again = Network(seed=3)
        optimizer = wrapped(again, communicator, "adam", shard=True, **OPTIONS)
        train(again, optimizer, range(50, 52), schedule=False)  # of which everything is to be forgotten
        again.load_state_dict(weights)
        optimizer.load_state_dict(state)
        train(again, optimizer, range(3, 6), schedule=False)
        optimizer.close()
    assert_equal(model.parameters(), again.parameters())
    return weights, state, saved


@in_world
def go_on_elsewhere(parts: list[tuple[Any, Any, list[Tensor]]]) -> None:
    rank, size = hvd.rank(), hvd.size()
    states = [state for _, state, _ in parts]
    mine, also = states[rank % len(states)], states[size + rank :: size]
    with exchanged_by("ring") as communicator:
        model = Network(seed=3)
        optimizer = wrapped(model, communicator, "adam", shard=True, **OPTIONS)
        model.load_state_dict(parts[0][0])
        optimizer.load_state_dict(mine, also=also)
        assert_equal(residuals(optimizer), parts[0][2])
        train(model, optimizer, range(3, 5), schedule=False)
        assert_same_on_all_ranks(model.parameters())
        optimizer.close()
    with exchanged_by("ring") as communicator:
        other = wrapped(model, communicator, "adam", shard=True, compression="int8")
        with pytest.raises(ValueError, match="saved with parameter_compression"):
            other.load_state_dict(mine, also=also)
        other.close()


def test_a_checkpoint_goes_on_bit_for_bit_and_elsewhere_with_all_residuals(ranks: Worlds) -> None:
    parts = ranks(3).run(save_and_go_on)
    ranks(2).run(go_on_elsewhere, parts)
    ranks(4).run(go_on_elsewhere, parts)


@on_ranks(2)
def test_what_cannot_be_meant_is_refused() -> None:
    model = nn.Linear(4, 4)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for compression, words in (
        ("powersgd", "parameter_compression='powersgd' is for gradients"),
        ("dgc", "parameter_compression='dgc' is for gradients"),
        ("qsgd", "parameter_compression='qsgd' is for gradients"),
        ("int9", "int9"),
    ):
        with pytest.raises(ValueError, match=words):
            hvd.rules.Sharded(compression)
    with pytest.raises(ValueError, match="do not make the same DistributedOptimizer"):
        hvd.DistributedOptimizer(sgd, rule=hvd.rules.Sharded("int8" if hvd.rank() else "none"))
