"""Train a byte-level GPT on the source text of Python's standard library, or on your own text.

python -m gradwire.trainer.examples.bytes_gpt                                         one process
torchrun --standalone --nproc-per-node 2 -m gradwire.trainer.examples.bytes_gpt       two processes
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import gradwire as hvd
from gradwire.trainer.examples.config import LoopConfig, parse
from gradwire.trainer.examples.loop import Run, Task

VOCABULARY = 256
TEXT_BYTES = 8 * 1024**2
PIECES = 100
HELD_OUT_EVERY = 20
VALIDATION_BATCHES = 8
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
PRESETS = {"13m": {"layers": 4, "width": 512, "heads": 8, "batch": 8, "lr": 1e-3}}


@dataclass(frozen=True)
class GPTConfig(LoopConfig):
    text: Annotated[Path | None, "a text, or a folder of *.py, *.txt and *.md to read"] = None
    layers: Annotated[int, "blocks of the model"] = 4
    width: Annotated[int, "of the residual stream"] = 128
    heads: Annotated[int, "attention heads of a block"] = 4
    context: Annotated[int, "bytes that the model sees"] = 128


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

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.Sequential(*(Block(config.width, config.heads) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=0.02 / ((2 * config.layers) ** 0.5 if into_residual else 1.0))

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text) + self.position.weight[: text.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.embedding.weight)


def task(config: GPTConfig) -> Task:
    text = read_text(config.text)
    pieces = text.tensor_split(PIECES)
    held_out = torch.cat(pieces[::HELD_OUT_EVERY])
    training = torch.cat([piece for i, piece in enumerate(pieces) if i % HELD_OUT_EVERY])
    if len(held_out) <= config.context:
        raise ValueError(f"a text of {len(text)} bytes is too short for a context of {config.context}")

    def at(source: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        spans = source[starts[:, None] + torch.arange(config.context + 1, dtype=torch.int64, device="cpu")].long()
        return spans[:, :-1], spans[:, 1:]

    def batch(step: int) -> tuple[Tensor, Tensor]:
        random = np.random.default_rng((config.seed, step))
        return at(training, torch.from_numpy(random.integers(len(training) - config.context, size=config.batch)))

    starts = torch.linspace(
        0, len(held_out) - config.context - 1, VALIDATION_BATCHES * config.batch, dtype=torch.float32, device="cpu"
    ).long()
    return Task(
        title="bytes_gpt",
        item="token",
        items_per_step=config.batch * config.context,
        build=lambda: GPT(config),
        batch=batch,
        validation=[at(held_out, some) for some in torch.split(starts, config.batch)],
    )


def main() -> None:
    default = GPTConfig(out=Path("runs/bytes_gpt"))
    config = parse(default, __doc__.partition("\n")[0], positional="text", presets=PRESETS).until(seconds=60.0)
    hvd.init()
    status = Run(task(config), config)()
    hvd.shutdown()
    raise SystemExit(status)


if __name__ == "__main__":
    main()
