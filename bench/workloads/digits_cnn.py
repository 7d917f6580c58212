"""A small convolutional network that classifies scikit-learn's 1,797 handwritten digits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from gradwire.bench.workloads.loop import Workload

HELD_OUT = 360
SPLIT_SEED = 0
CONVOLUTIONS, CHANNELS, DROPOUT = 2, 32, 0.1
"""The convolutions of each of two stages, and the channels of the first stage; the second has twice as many."""


def network() -> nn.Sequential:
    """Return a network that maps images (batch, 1, 8, 8) to logits (batch, 10)."""
    parts: list[nn.Module] = []
    channels = 1
    for width in (CHANNELS, 2 * CHANNELS):
        for _ in range(CONVOLUTIONS):
            parts += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.GroupNorm(4, width), nn.ReLU()]
            channels = width
        parts.append(nn.MaxPool2d(2))
    return nn.Sequential(*parts, nn.Flatten(), nn.Dropout(DROPOUT), nn.Linear(channels * 4, 10))


def digits() -> tuple[Tensor, Tensor]:
    """Return all images (1797, 1, 8, 8) and their labels, in random order. Raises ModuleNotFoundError without scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}: pip install '.[train]' in a clone of gradwire") from None
    found = load_digits()
    order = np.random.default_rng(SPLIT_SEED).permutation(len(found.target))
    images = torch.from_numpy(found.images[order]).float().unsqueeze(1) / 16
    return images, torch.from_numpy(found.target[order]).long()


def workload(samples: int, seed: int = 0) -> Workload:
    """Return the workload. samples: images in a global batch. Raises ModuleNotFoundError without scikit-learn."""
    images, labels = digits()
    training = len(labels) - HELD_OUT

    def batch(step: int) -> tuple[Tensor, Tensor]:
        chosen = np.random.default_rng((seed, step)).choice(training, samples, replace=False)
        return images[chosen], labels[chosen]

    def build() -> nn.Module:
        torch.manual_seed(seed)
        return network()

    return Workload(
        title="digits_cnn",
        item="image",
        items_per_step=samples,
        samples=samples,
        seed=seed,
        lr=3e-3,
        build=build,
        batch=batch,
        validation=list(zip(torch.split(images[training:], 45), torch.split(labels[training:], 45), strict=True)),
        has_accuracy=True,
    )
