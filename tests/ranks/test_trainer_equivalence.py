"""The same seed and data give the same weights as one process on the concatenated batch; replicas are equal bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire as hvd
from tests.harness import Worlds
from tests.ranks.training import (
    STEPS,
    assert_close,
    assert_same_on_all_ranks,
    batch,
    copies,
    in_world,
    loss_of,
    perceptron,
    share,
)

OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01, weight_decay=0.01),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, amsgrad=True),
}


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups with different options."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 0.05}]


def weights_of_one_process(name: str) -> list[Tensor]:
    model = perceptron()
    optimizer = OPTIMIZERS[name](param_groups(model))
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        optimizer.step()
    return copies(model.parameters())


@in_world
def weights_of_ranks(
    name: str, set_to_none: bool, accumulate: int, bucket_bytes: int, options: dict[str, Any]
) -> list[Tensor]:
    model = perceptron()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS[name](param_groups(model)),
        named_parameters=model.named_parameters(),
        bucket_bytes=bucket_bytes,
        backward_passes_per_step=accumulate,
        **options,
    )
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        for part in range(accumulate):
            (loss_of(model, share(step, part, accumulate)) / accumulate).backward()
        assert_same_on_all_ranks([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
    assert_same_on_all_ranks(model.parameters())
    optimizer.close()
    return copies(model.parameters())


def check(ranks: Worlds, size: int, name: str, *, rtol: float = 1e-4, atol: float = 1e-5, **how: Any) -> None:
    arguments = {"set_to_none": True, "accumulate": 1, "bucket_bytes": 400, "options": {}} | how
    for weights in ranks(size).run(weights_of_ranks, name, **arguments):
        assert_close(weights, weights_of_one_process(name), rtol=rtol, atol=atol)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_are_those_of_one_process(ranks: Worlds, name: str, size: int) -> None:
    check(ranks, size, name)


@pytest.mark.parametrize("bucket_bytes", [1, 400, 1 << 20])
def test_bucket_sizes(ranks: Worlds, bucket_bytes: int) -> None:
    check(ranks, 3, "sgd", bucket_bytes=bucket_bytes)


def test_gradients_zeroed_in_place(ranks: Worlds) -> None:
    check(ranks, 2, "sgd", set_to_none=False)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation(ranks: Worlds, set_to_none: bool) -> None:
    check(ranks, 2, "adamw", accumulate=4, set_to_none=set_to_none)


def test_predivision(ranks: Worlds) -> None:
    check(ranks, 3, "sgd", options={"gradient_predivide_factor": 3.0})


def test_compression_to_float16(ranks: Worlds) -> None:
    check(ranks, 2, "sgd", options={"compression": hvd.Compression.fp16}, rtol=1e-2, atol=1e-3)


def test_compression_to_bfloat16(ranks: Worlds) -> None:
    check(ranks, 2, "sgd", options={"compression": hvd.Compression.bf16}, rtol=5e-2, atol=1e-2)


@in_world
def gradient_on_the_wire(compression: hvd.compression.Cast, predivide: float) -> tuple[float, float]:
    """The averaged gradients of a weight whose gradients are 40000 on every rank, and of one with 1 + 2**-12."""
    weights = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(weights, lr=1.0), compression=compression, gradient_predivide_factor=predivide
    )
    (weights[0] * 40000 + weights[1] * (1 + 2**-12)).backward()
    first, second = (float(w.grad) for w in weights if w.grad is not None)
    optimizer.close()
    return first, second


def test_what_travels_is_what_compression_says(ranks: Worlds) -> None:
    exact = (40000.0, 1 + 2**-12)
    assert ranks(2).run(gradient_on_the_wire, hvd.Compression.none, 1.0) == [exact] * 2
    assert ranks(2).run(gradient_on_the_wire, hvd.Compression.fp16, 1.0)[0] == (40000.0, 1.0), "divided before the sum"
    assert ranks(2).run(gradient_on_the_wire, hvd.Compression.fp16, 2.0)[0] == (40000.0, 1.0)
    assert ranks(2).run(gradient_on_the_wire, hvd.Compression.bf16, 1.0)[0] == (39936.0, 1.0)


@in_world
def summed_gradient() -> float:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum)
    (weight * (hvd.rank() + 1)).backward()
    optimizer.step()
    optimizer.close()
    return float(weight)


def test_sum(ranks: Worlds) -> None:
    assert ranks(3).run(summed_gradient) == [-6.0] * 3


@in_world
def weights_of_a_group() -> float:
    """Ranks 0 and 2 train together; so do the others."""
    groups = [torch.distributed.new_group([r for r in range(hvd.size()) if r % 2 == parity]) for parity in (0, 1)]
    weight = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), process_set=groups[hvd.rank() % 2])
    (weight * hvd.rank()).backward()
    optimizer.step()
    optimizer.close()
    return float(weight)


def test_process_set(ranks: Worlds) -> None:
    assert ranks(4).run(weights_of_a_group) == [-1.0, -2.0, -1.0, -2.0]
