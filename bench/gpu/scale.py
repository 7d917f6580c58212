"""How much the benchmark of GPUs computes and sends, on a GPU and in its small form on CPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gradwire.bench.workloads.bytes_gpt import PRESETS, GPTSize


@dataclass(frozen=True)
class Scale:
    """preset, context, batch: the model, and the sequences of a rank and step. steps, rounds: of the turns, the latter at most.
    call_bytes: the sizes of the tensors of timed calls. calls: how often each is timed."""

    preset: str
    context: int
    batch: int
    steps: int
    rounds: int
    call_bytes: tuple[int, ...]
    calls: int

    @property
    def size(self) -> GPTSize:
        return replace(PRESETS[self.preset], context=self.context)


SCALES = {
    "cuda": Scale("100m", 1024, 8, steps=3, rounds=12, call_bytes=(1 << 10, 1 << 16, 1 << 20, 1 << 26), calls=50),
    "cpu": Scale("small", 16, 1, steps=1, rounds=2, call_bytes=(1 << 10, 1 << 16), calls=10),
}
