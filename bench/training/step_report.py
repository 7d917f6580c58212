"""The rows of `bench step`, and their table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradwire.bench.timing import format_interval

COMPUTE = "compute"
"""The competitor that exchanges nothing."""


@dataclass(frozen=True)
class StepRow:
    """One competitor's result. step_ms, p99_ms: median and 99th percentile of the turns, per step, on the slowest rank.

    items_per_s: tokens, images or the like, of all ranks together. as_ddp, as_compute: the speed as a multiple of theirs.
    beyond_compute_as_ddp: DDP's median time beyond `compute` in the same round, over the competitor's; None if it takes no
    longer than `compute`. of_best_plan: step_ms as a multiple of that of the fastest fixed plan; None without fixed plans. plan:
    of the exchange, in words; None if the competitor has none. loss: averaged over the ranks, of the last step that all
    competitors have taken. replicas_identical: whether the ranks' final weights are bitwise equal.
    """

    competitor: str
    world_size: int
    step_ms: float
    p99_ms: float
    items_per_s: float
    as_ddp: float
    as_compute: float
    beyond_compute_as_ddp: float | None
    of_best_plan: float | None
    plan: str | None
    loss: float
    replicas_identical: bool


@dataclass(frozen=True)
class StepSpeedup:
    """The speed of a competitor as a multiple of a peer's in this run. interval: of 95 %; None with too few turns."""

    competitor: str
    peer: str
    times: float
    interval: tuple[float, float] | None


def format_table(rows: Sequence[StepRow], speedups: Sequence[StepSpeedup], meta: dict[str, Any]) -> list[str]:
    width = max(8, *(len(row.competitor) for row in rows))
    model = " ".join(filter(None, (meta["model"], meta["preset"])))
    samples = f"sequences of {meta['context']} bytes" if meta["context"] else f"{meta['item']}s"
    rate = f"{meta['item']}s/s"
    return [
        f"# step of {model}: {meta['parameters'] / 1e6:.2f} M parameters, {meta['batch']} {samples} a rank,"
        f" world size {rows[0].world_size} backend {meta['backend']}, {meta['rounds']} turns of {meta['steps']} steps",
        *([f"# Network: {meta['network']}"] if meta["network"] else []),
        "#",
        f"# {'':{width}}     step      p99            times as fast as  beyond compute,  of the best",
        f"# {'':{width}}     (ms)     (ms) {rate:>9}      ddp   compute  as fast as ddp  plan's time      loss  replicas   plan",
        *(
            f"  {row.competitor:{width}} {row.step_ms:8.2f} {row.p99_ms:8.2f} {row.items_per_s:9.0f}"
            f" {row.as_ddp:8.2f} {row.as_compute:9.2f} {_times(row.beyond_compute_as_ddp):>15} {_times(row.of_best_plan):>12}"
            f" {row.loss:9.4f}  {_replicas(row):9}  {row.plan or ''}".rstrip()
            for row in rows
        ),
        *(
            f"# {speedup.competitor} is {speedup.times:.2f} times as fast as {speedup.peer}"
            f"  {format_interval(speedup.interval)}".rstrip()
            for speedup in speedups
        ),
    ]


def _replicas(row: StepRow) -> str:
    if row.competitor == COMPUTE:  # its ranks train alone
        return ""
    return "identical" if row.replicas_identical else "differ"


def _times(number: float | None) -> str:
    return "-" if number is None else f"{number:.2f}"
