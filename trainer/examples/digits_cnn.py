"""Train a small convolutional network on scikit-learn's 1,797 handwritten digits.

python -m gradwire.trainer.examples.digits_cnn                                        one process
torchrun --standalone --nproc-per-node 2 -m gradwire.trainer.examples.digits_cnn      two processes
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from torch import Tensor, nn

import gradwire as hvd
from gradwire.trainer.examples.config import LoopConfig, parse
from gradwire.trainer.examples.loop import Run, Task

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}: pip install '.[train]' in a clone of gradwire") from None

HELD_OUT = 360
SPLIT_SEED = 0


@dataclass(frozen=True)
class CNNConfig(LoopConfig):
    layers: Annotated[int, "convolutions of each of the two stages"] = 2
    width: Annotated[int, "channels of the first stage; the second has twice as many"] = 32
    dropout: Annotated[float, "before the last layer"] = 0.1


def network(config: CNNConfig) -> nn.Sequential:
    """Return a network that maps images (batch, 1, 8, 8) to logits (batch, 10)."""
    parts: list[nn.Module] = []
    channels = 1
    for width in (config.width, 2 * config.width):
        for _ in range(config.layers):
            parts += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.GroupNorm(4, width), nn.ReLU()]
            channels = width
        parts.append(nn.MaxPool2d(2))
    return nn.Sequential(*parts, nn.Flatten(), nn.Dropout(config.dropout), nn.Linear(channels * 4, 10))


def task(config: CNNConfig) -> Task:
    digits = load_digits()
    order = np.random.default_rng(SPLIT_SEED).permutation(len(digits.target))
    images = torch.from_numpy(digits.images[order]).float().unsqueeze(1) / 16
    labels = torch.from_numpy(digits.target[order]).long()
    training = len(labels) - HELD_OUT

    def batch(step: int) -> tuple[Tensor, Tensor]:
        chosen = np.random.default_rng((config.seed, step)).choice(training, config.batch, replace=False)
        return images[chosen], labels[chosen]

    return Task(
        title="digits_cnn",
        item="image",
        items_per_step=config.batch,
        build=lambda: network(config),
        batch=batch,
        validation=list(zip(torch.split(images[training:], 45), torch.split(labels[training:], 45), strict=True)),
        report_accuracy=True,
    )


def main() -> None:
    default = CNNConfig(batch=64, lr=3e-3, out=Path("runs/digits_cnn"))
    config = parse(default, __doc__.partition("\n")[0]).until(steps=400)
    hvd.init()
    status = Run(task(config), config)()
    hvd.shutdown()
    raise SystemExit(status)


if __name__ == "__main__":
    main()
