"""The rows of `bench rules`, their text, and a picture of the loss over tokens, over time and over bytes sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.ticker import FuncFormatter

from gradwire.bench.plots import DASHED, OTHERS, dress, legend, page, save, write_numbers

#: The key of each panel's points, its label, unit and scale, and the base of its axis.
PANELS = (
    ("tokens", "tokens of all ranks", "M", 1e6, 0),
    ("seconds", "seconds", "", 1, 0),
    ("sent_bytes", "bytes that a rank has sent", " MB", 1e6, 10),
)
EARLY = 0.12
"""The share of the first competitor's run whose losses lie above the plotted range. The plot shows the end of the runs."""


@dataclass(frozen=True)
class RuleRow:
    """The result of one model trained by one rule. Field names are the keys of the JSON.

    tokens_per_s: the rate of all ranks together. over_first: the loss over that of the first competitor.
    reach_time, reach_tokens, reach_bytes: the time, tokens and bytes until the loss was as low as the final loss of the first
    competitor, over the first competitor's own; None if the loss never was as low. wait_share: the part of the time that ranks
    waited, or None if it is not known. replicas_identical: None for rules whose ranks have different parameters.
    """

    competitor: str
    seed: int
    world_size: int
    parameters: int
    steps: float
    seconds: float
    tokens_per_s: float
    sent_bytes: float
    wait_share: float | None
    loss: float
    over_first: float
    reach_time: float | None
    reach_tokens: float | None
    reach_bytes: float | None
    replicas_identical: bool | None
    report: str
    curve: list[dict[str, float]]


def format_header(meta: Mapping[str, Any], row: RuleRow) -> list[str]:
    length = f"{meta['steps']} steps" if meta["steps"] else f"{meta['seconds']:g} s"
    return [
        f"# rules: bytes_gpt {meta['preset']}, {row.parameters / 1e6:.2f} M parameters, {meta['batch']} sequences of"
        f" {meta['context']} bytes a rank, world size {row.world_size}, {length}",
        f"# every {meta['every']}, outer Nesterov {meta['outer_lr']:g}/{meta['outer_momentum']:g}, warm-up"
        f" {meta['warmup_steps']} steps ({meta['warmup_codec']}), staleness {meta['staleness']},"
        f" late {meta['late']}, delay {meta['delay']}, k {meta['k']}",
        *([f"# Network: {meta['network']}"] if meta["network"] else []),
        *([f"# Slow: {meta['slow']}"] if meta["slow"] else []),
        f"# {meta['device']}, torch {meta['torch']}",
        "#",
        f"# {'':26}                                                over  reaches, of the first one's",
        f"# {'rule':26} seed    steps   seconds  tokens/s  sent (MB)  wait    loss   first   time tokens  bytes  replicas",
    ]


def format_row(row: RuleRow) -> str:
    waited = "-" if row.wait_share is None else f"{row.wait_share:.1%}"
    same = {None: "-", True: "identical", False: "differ"}[row.replicas_identical]
    reaches = (
        f"{'-' if share is None else f'{share:.3f}':>6}"
        for share in (row.reach_time, row.reach_tokens, row.reach_bytes)
    )
    return (
        f"  {row.competitor:26} {row.seed:4} {row.steps:8.0f} {row.seconds:9.1f} {row.tokens_per_s:9.0f}"
        f" {row.sent_bytes / 1e6:10.2f} {waited:>5} {row.loss:7.4f} {row.over_first:7.4f} {' '.join(reaches)}  {same}"
    )


def draw(rows: Sequence[RuleRow], meta: Mapping[str, Any], path: Path) -> None:
    """Write a PNG of the runs."""
    length = f"{meta['steps']} steps" if meta["steps"] else f"{meta['seconds']:g} s each"
    notes = "".join(f" · {meta[key]}" for key in ("network", "slow") if meta[key])
    title = (
        f"Update rules on bytes_gpt, {rows[0].parameters / 1e6:.1f} M parameters, {rows[0].world_size} ranks, {length}\n"
        f"loss on text not trained on (nats, log axis){notes}"
    )
    figure = page(title, 12.5, 4.6)
    panels = figure.subplots(1, 3, sharey=True)
    for panel, (key, label, unit, scale, log) in zip(panels, PANELS, strict=True):
        for number, row in enumerate(rows):
            style = (
                {"color": OTHERS[(number - 1) % len(OTHERS)]} if number else {"color": "#111111", "linestyle": DASHED}
            )
            points = [(point[key] / scale, point["loss"]) for point in row.curve if not log or point[key] > 0]
            name = f"{row.competitor}  {row.loss:.3f}"
            panel.plot(
                *(zip(*points, strict=True) if points else ([], [])), label=name, linewidth=1.6, marker=".", **style
            )
        dress(panel, label, x_log=log, y_log=10)
        if log:
            low, high = panel.get_xlim()
            write_numbers(panel.xaxis, subs=(1, 2, 5) if high < 30 * low else (1, 3))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _, unit=unit: f"{value:g}{unit}"))
    lowest = min(row.loss for row in rows)
    early = next(point["loss"] for point in rows[0].curve if point["seconds"] >= EARLY * rows[0].seconds)
    highest = max(early, *(row.loss for row in rows)) * 1.05
    panels[0].set_ylim(lowest * 0.98, highest)
    panels[0].set_yticks(_ticks(lowest, highest))
    legend(figure, panels[0], 4)
    save(figure, path)


def _ticks(lowest: float, highest: float) -> list[float]:
    step = 0.1 if highest - lowest < 1 else 0.25 if highest - lowest < 2.5 else 0.5
    first = int(lowest / step) + 1
    return [step * number for number in range(first, int(highest / step) + 1)]
