"""A deep, narrow perceptron of 300 small parameters: its step shows what each gradient costs, whatever its size."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from gradwire.bench.workloads.loop import Workload

LAYERS, WIDTH = 150, 32
VALIDATION_BATCHES = 8
VALIDATION_STEP = 1 << 32
"""The number of the first batch of the validation data, which no training reaches."""


class MLP(nn.Module):
    """Maps vectors (batch, WIDTH) to logits (batch, WIDTH). All layers but the last are added to their input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        for name, parameter in self.named_parameters():
            # Each layer multiplies the mean square of its input by about 1 + 1 / LAYERS.
            nn.init.normal_(parameter, std=(2 / (LAYERS * WIDTH)) ** 0.5 if name.endswith("weight") else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        *hidden, last = self.layers
        for layer in hidden:
            x = x + torch.relu(layer(x))
        logits: Tensor = last(x)
        return logits


def workload(samples: int, seed: int = 0) -> Workload:
    """Return the workload: random vectors, of the class that a fixed random matrix gives them. samples: vectors in a global
    batch."""
    matrix = torch.from_numpy(np.random.default_rng(seed).standard_normal((WIDTH, WIDTH))).float()

    def batch(step: int) -> tuple[Tensor, Tensor]:
        vectors = torch.from_numpy(np.random.default_rng((seed, step)).standard_normal((samples, WIDTH))).float()
        return vectors, (vectors @ matrix).argmax(-1)

    def build() -> nn.Module:
        torch.manual_seed(seed)
        return MLP()

    return Workload(
        title="mlp",
        item="vector",
        items_per_step=samples,
        samples=samples,
        seed=seed,
        lr=1e-3,
        build=build,
        batch=batch,
        validation=[batch(VALIDATION_STEP + number) for number in range(VALIDATION_BATCHES)],
        has_accuracy=True,
    )
