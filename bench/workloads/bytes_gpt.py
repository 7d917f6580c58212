"""A byte-level GPT, on the source text of Python's standard library or on another text."""

from __future__ import annotations

import argparse
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from gradwire.bench.options import count_from
from gradwire.bench.workloads.loop import Workload

VOCABULARY = 256
TEXT_BYTES = 8 * 1024**2
PIECES = 100
HELD_OUT_EVERY = 20
VALIDATION_BATCHES = 8
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class GPTSize:
    """The size of a model. width: of the residual stream. heads: of each layer. context: the bytes that the model sees."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128
    lr: float = 2e-3


PRESETS = {
    "small": GPTSize(),
    "13m": GPTSize(width=512, heads=8, lr=1e-3),
    "100m": GPTSize(layers=14, width=768, heads=12, context=1024, lr=6e-4),
}


def add_flags(parser: argparse.ArgumentParser, batch: int = 4) -> None:
    """Add the flags of a bytes_gpt. batch: the default of the sequences of a rank and step."""
    add = parser.add_argument
    add("--preset", choices=tuple(PRESETS), default="small", help="the model (default small)")
    add("--batch", type=partial(count_from, 1), default=batch, help=f"samples a rank and step (default {batch})")
    add("--context", type=partial(count_from, 1), help="bytes of a sequence (default as the model has it)")


def size_of(chosen: argparse.Namespace) -> GPTSize:
    """Return the size of the model that the flags of add_flags() describe."""
    size = PRESETS[chosen.preset]
    return replace(size, context=chosen.context or size.context)


def source_files(folder: Path) -> Iterator[Path]:
    """Yield the .py, .txt and .md files of a folder, in the same order on every rank."""
    for path, folders, files in os.walk(folder):
        folders[:] = sorted(set(folders) - SKIPPED)
        yield from (Path(path, name) for name in sorted(files) if name.endswith((".py", ".txt", ".md")))


def read_text(path: Path | None) -> Tensor:
    """Return the first TEXT_BYTES bytes of a file or folder as uint8. path: None for the standard library."""
    path = path or Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for file in source_files(path) if path.is_dir() else [path]:
        text += file.read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    return torch.frombuffer(text[:TEXT_BYTES], dtype=torch.uint8)


class Block(nn.Module):
    """Applies pre-norm causal attention, then a pre-norm perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        per_head = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = per_head.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(-2))
        perceived: Tensor = self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return x + perceived


class GPT(nn.Module):
    """Maps bytes (batch, time) to logits of the next byte (batch, time, 256); input and output embeddings are tied."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=0.02 / ((2 * size.layers) ** 0.5 if into_residual else 1.0))

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text) + self.position.weight[: text.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.embedding.weight)


def workload(size: GPTSize, samples: int, seed: int = 0, text: Path | None = None) -> Workload:
    """Return the workload. samples: sequences in a global batch. Raises ValueError if the text is too short."""
    read = read_text(text)
    pieces = read.tensor_split(PIECES)
    held_out = torch.cat(pieces[::HELD_OUT_EVERY])
    training = torch.cat([piece for i, piece in enumerate(pieces) if i % HELD_OUT_EVERY])
    if len(held_out) <= size.context:
        raise ValueError(f"a text of {len(read)} bytes is too short for a context of {size.context}")

    def at(source: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        spans = source[starts[:, None] + torch.arange(size.context + 1)].long()
        return spans[:, :-1], spans[:, 1:]

    def batch(step: int) -> tuple[Tensor, Tensor]:
        random = np.random.default_rng((seed, step))
        return at(training, torch.from_numpy(random.integers(len(training) - size.context, size=samples)))

    def build() -> nn.Module:
        torch.manual_seed(seed)
        return GPT(size)

    starts = torch.linspace(0, len(held_out) - size.context - 1, VALIDATION_BATCHES * samples).long()
    return Workload(
        title="bytes_gpt",
        item="token",
        items_per_step=samples * size.context,
        samples=samples,
        seed=seed,
        lr=size.lr,
        build=build,
        batch=batch,
        validation=[at(held_out, some) for some in torch.split(starts, samples)],
    )
