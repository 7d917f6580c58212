"""docs/examples/one_file.py computes the same numbers as the package."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire as hvd
from gradwire.collectives import Communicator
from gradwire.collectives.compression.dense import Int8
from tests.harness import EXCHANGE_TIMEOUT_S, wide
from tests.pages import ROOT
from tests.ranks.exact import Checks
from tests.ranks.programs import launch
from tests.ranks.training import assert_equal, on_ranks

PATH = ROOT / "docs/examples/one_file.py"


def one_file() -> Any:
    """Return the example as a module."""
    spec = importlib.util.spec_from_file_location("one_file", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def communicator() -> Communicator:
    """Return one that does not cut these buffers into segments, in which other ranks would begin the sums."""
    return Communicator(timeout_s=EXCHANGE_TIMEOUT_S, segment_bytes=1 << 20)


def numbers(numel: int, step: int = 0) -> Tensor:
    """Return numbers of very different magnitudes, other ones on each rank."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(numel, generator=generator) ** 3


@on_ranks(2, 3, *wide(4), initialized=False)
def test_the_ring_is_that_of_the_package() -> None:
    example = one_file()
    with Checks() as checks, communicator() as comm:
        for numel in (0, 1, comm.size - 1, comm.size + 1, 1000, 100_003):
            with checks.case(numel=numel):
                mine, expected = numbers(numel), numbers(numel)
                example.allreduce(mine)
                comm.allreduce(expected, "sum", algorithm="ring")
                checks.equal(mine, expected)


@on_ranks(2, 3, *wide(4), initialized=False)
def test_codes_and_residuals_are_those_of_the_package() -> None:
    """Also blocks that are zero, tiny or infinite, after which the residuals are still right."""
    example = one_file()
    with communicator() as comm:
        for blocks in (1, 2, 130):
            average = example.Int8Average(blocks)
            feedback = comm.new_feedback(Int8(), 256 * blocks)
            for step in range(4):
                mine = numbers(256 * blocks, step).view(blocks, 256)
                if step == 1:
                    mine[0, 7] = float("inf")
                    mine[1:2] = 0
                    mine[2:4] *= 2.0**-120
                    mine[4:6, 3] = float("nan")
                expected = mine.flatten()
                average(mine)
                comm.allreduce(expected, "average", compression=Int8(), feedback=feedback)
                torch.testing.assert_close(mine.flatten(), expected, rtol=0, atol=0, equal_nan=True)


@on_ranks(2, initialized=False)
def test_gradients_are_averages_also_after_an_error_and_where_one_is_missing() -> None:
    rank, used, rare = dist.get_rank(), nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))
    optimizer = one_file().DistributedOptimizer(torch.optim.SGD([used, rare], lr=0.1))
    broken = used * 1
    broken.register_hook(lambda gradient: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        (rare.sum() + broken.sum()).backward()
    optimizer.zero_grad()
    for passes in (1, 2):
        ((rank + 1) * used.sum() + (rare.sum() if rank == 0 else 0)).backward()
        assert_equal([used.grad], [torch.full((3,), 1.5 * passes)])
        assert_equal([rare.grad], [torch.full((2, 2), 0.5 * passes)])


@on_ranks(2, *wide(3))
@pytest.mark.parametrize("compression", ["none", "int8"])
def test_the_training_curve_is_that_of_the_package(compression: str) -> None:
    """Begin with an exchange of zeros: after the first one, the package makes its buckets anew, and moves residuals."""
    example = one_file()
    curves, ends = [], []
    for is_package in (False, True):
        torch.manual_seed(dist.get_rank() * (not is_package))
        model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
        policy = {"*": hvd.ErrorFeedback(compression)} if compression != "none" else None
        optimizer = (
            hvd.DistributedOptimizer(inner, model.named_parameters(), policy=policy)
            if is_package
            else example.DistributedOptimizer(inner, compression)
        )
        (0 * model(torch.zeros(1, 8))).sum().backward()
        optimizer.step()
        curves.append(example.train(model, optimizer, steps=60))
        ends.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    assert curves[0] == pytest.approx(curves[1], rel=0, abs=1e-6)
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-6)
    assert curves[0][-1] < 0.5 * curves[0][0]


def test_it_is_short_and_learns_with_and_without_codes(tmp_path: Path) -> None:
    assert len(PATH.read_text().splitlines()) <= 220
    said = launch(PATH, tmp_path)
    for compression in ("none", "int8"):
        losses = [float(loss) for loss in re.findall(rf"{compression}, steps .*: loss ([0-9.]+)", said)]
        assert len(losses) == 5
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < 0.25 * losses[0]
