"""What the tests of codecs in DistributedOptimizer share: a model large enough for them, and what they owe."""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

import gradwire as hvd
from gradwire.collectives.compression.dense import Int8
from gradwire.collectives.compression.powersgd import PowerSGD
from gradwire.collectives.compression.sparse import DGC, Threshold, TopK
from gradwire.trainer.reducer.compression import Compressor, ErrorFeedback
from tests.ranks.training import through_a_file

#: With memory: residuals, and what these codecs keep beside them.
REMEMBERING: dict[str, Compressor] = {
    "int8, stochastic": ErrorFeedback(Int8(stochastic=True)),
    "onebit": "onebit",
    "topk": TopK(ratio=0.05),
    "threshold": Threshold(ratio=0.05),
    "randomk": "randomk",
    "dgc": DGC(ratio=0.01, ramp_steps=4),
    "powersgd": PowerSGD(rank=2),
    "int4, after a warm-up": ErrorFeedback("int4", warmup_steps=2),
}

BUCKET_BYTES = 40_000
HEIGHT = 3


class Ladder(nn.Module):
    """Matrices of 80 x 64 and 64 x 80 in turns, each large enough for a codec, and biases, which are not; called in an order
    of its own, so that buckets change after the first step."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 80), nn.Tanh(), nn.Linear(80, 64)) for _ in range(HEIGHT)
        )

    def forward(self, x: Tensor) -> Tensor:
        for i in (1, 0, *range(2, HEIGHT)):
            x = x + self.layers[i](x)
        return x


def loss_at(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs, targets = torch.randn(2, 8, 64, generator=generator)
    return nn.functional.mse_loss(model(inputs), targets)


def optimizer_of(model: nn.Module, compression: Compressor, **options: Any) -> hvd.DistributedOptimizer:
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05),
        model.named_parameters(),
        compression=compression,
        bucket_bytes=BUCKET_BYTES,
        **options,
    )


def train(model: nn.Module, optimizer: hvd.DistributedOptimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_at(model, step, hvd.rank())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


#: A codec without error feedback that loses little, so that what it is given to add comes out at once.
FINE = Int8(block=16)


def residuals_of(optimizer: hvd.DistributedOptimizer, **options: Any) -> list[Tensor]:
    """Return what the results lack so far, by parameter: an optimizer without error feedback that loads the state adds it to its
    next gradients. It is right to the digits of FINE. options: further ones that both optimizers have. Collective."""
    groups = [[nn.Parameter(torch.zeros_like(each)) for each in group["params"]] for group in optimizer.param_groups]
    twins = [each for group in groups for each in group]
    heir = hvd.DistributedOptimizer(
        torch.optim.SGD([{"params": group} for group in groups], lr=1.0),
        zip(optimizer.names, twins, strict=True),
        compression=FINE,
        **options,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        heir.load_state_dict(through_a_file(optimizer.state_dict()))
    torch.stack([(0 * twin).sum() for twin in twins]).sum().backward()
    found = [twin.grad.clone() for twin in twins if twin.grad is not None]
    heir.close()
    return found


class Weights(nn.Module):
    """Gradients are what one says they are."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(60 + i, 80)) for i in range(4))
        with torch.no_grad():
            self.weights[2].data = self.weights[2].t().contiguous().t()

    def forward(self, gradients: dict[int, Tensor]) -> Tensor:
        order = sorted(gradients, key=lambda i: i % 2)
        return torch.stack([(self.weights[i] * gradients[i]).sum() for i in order]).sum()


def given(step: int, rank: int, indices: Iterable[int] = range(4)) -> dict[int, Tensor]:
    """Return gradients of a rank for Weights."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    everything = [torch.randn(60 + i, 80, generator=generator) for i in range(4)]
    return {i: everything[i] for i in indices}
