"""What the tests of codecs in DistributedOptimizer share: a model large enough for them, and what they owe."""

from typing import Any

import torch
from torch import Tensor, nn

import gradwire as hvd
from gradwire.collectives.compression.dense import Int8
from gradwire.collectives.compression.powersgd import PowerSGD
from gradwire.collectives.compression.sparse import DGC, Threshold, TopK
from gradwire.trainer.reducer.buffers import CodedBuffer
from gradwire.trainer.reducer.compression import Compressor, ErrorFeedback

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


def encoded(optimizer: hvd.DistributedOptimizer) -> list[CodedBuffer]:
    return optimizer._rule.reducer.layout.coded


def owed(optimizer: hvd.DistributedOptimizer) -> dict[int, Tensor]:
    """What the results lack so far, by parameter. Collective."""
    part = optimizer.state_dict().get("gradwire", {"waiting": {}})
    found = {index: entry["residual"] for index, entry in part["waiting"].items()}
    for bucket in encoded(optimizer):
        found |= {index: o["residual"] for index, o in zip(bucket.items, bucket.export(), strict=True) if o}
    return {index: in_shape(optimizer._rule.reducer.parameters[index], residual) for index, residual in found.items()}


def in_shape(parameter: Tensor, residual: Tensor) -> Tensor:
    return residual.as_strided(parameter.shape, parameter.stride())
