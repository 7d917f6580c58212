"""The loss over steps and over wire bytes: two panels a model, a line a codec, each named where it ends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from bench.convergence import NONE, ConvergenceRow
from bench.plot import FRAME, GRID, INK, QUIET, with_unit
from trainer.examples.report import centred_means

#: Codecs of one kind have one colour, and the first of them a line without breaks.
KINDS = {
    "#111111": ("none",),
    "#8c8c8c": ("fp16", "bf16"),
    "#2e86ab": ("int8", "fp8", "int4"),
    "#5b8e7d": ("natural", "qsgd", "terngrad"),
    "#d1495b": ("onebit",),
    "#e09f3e": ("topk", "threshold", "randomk", "dgc"),
    "#8e6c8a": ("powersgd",),
}
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (2, 1.5)), (0, (1, 1)))
BYTE_UNITS = (("B", 1.0), ("KB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12))
#: Between the names of neighbouring lines, in parts of a panel.
LEAST_GAP = 0.052
#: A running mean is over 2 in so many steps.
SMOOTHED = 40
EARLY = 0.05

Curve: TypeAlias = tuple[list[int], list[float]]


def style(codec: str) -> dict[str, Any]:
    for color, names in KINDS.items():
        if codec in names:
            width = 2.4 if codec == NONE else 1.4
            return {"color": color, "linestyle": DASHES[names.index(codec)], "linewidth": width}
    return {"color": FRAME, "linestyle": "-", "linewidth": 1.4}


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Places in [0, 1], in their order, moved so that neighbours are at least `gap` apart, or evenly where there is no room."""
    order = sorted(range(len(places)), key=lambda index: places[index])
    if (len(places) - 1) * gap >= 1:
        gap = 1 / (len(places) - 1)
    moved = [min(1.0, max(0.0, place)) for place in places]
    for before, after in pairwise(order):
        moved[after] = max(moved[after], moved[before] + gap)
    limit = 1.0
    for index in reversed(order):
        moved[index] = min(moved[index], limit)
        limit = moved[index] - gap
    return moved


def smoothed(row: ConvergenceRow) -> tuple[list[int], list[float]]:
    """Steps, and the mean loss of each and its neighbours, where it has as many on either side."""
    reach = row.steps // SMOOTHED
    return list(range(1 + reach, row.steps + 1 - reach)), centred_means(row.losses, reach)[reach : row.steps - reach]


def draw(rows: Sequence[ConvergenceRow], meta: Mapping[str, Any], path: Path) -> None:
    """Write a PNG."""
    models = list(dict.fromkeys(row.model for row in rows))
    figure = Figure(figsize=(13, 1.0 + 4.6 * len(models)), dpi=150)
    panels = figure.subplots(len(models), 2, squeeze=False)
    for model, (by_step, by_byte) in zip(models, panels, strict=True):
        of_model = [row for row in rows if row.model == model]
        curves = [smoothed(row) for row in of_model]
        _draw_by_step(by_step, of_model, curves)
        _draw_by_byte(by_byte, of_model, curves)
        by_step.set_title(f"{model}, {of_model[0].parameters / 1e6:.2f} M parameters", loc="left", color=INK)
    height = figure.get_figheight()
    figure.text(0.012, 1 - 0.36 / height, "Training with codecs", fontsize=13, fontweight="bold")
    says = (
        f"training loss (nats), a running mean · {meta['world_size']} ranks, {meta['steps']} steps, seed {meta['seed']},"
        " the same data in the same order · sparse codecs and onebit with error feedback"
    )
    figure.text(0.012, 1 - 0.62 / height, says, fontsize=9, color=QUIET)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.7 / height), w_pad=3, h_pad=2)
    figure.savefig(path)


def _draw_by_step(panel: Axes, rows: Sequence[ConvergenceRow], curves: Sequence[Curve]) -> None:
    """Names to the right of the panel, from top to bottom as the lines end."""
    for row, (steps, losses) in zip(rows, curves, strict=True):
        panel.plot(steps, losses, zorder=5 if row.codec == NONE else 3, **style(row.codec))
    panel.set_xlim(1, curves[0][0][-1])
    panel.set_xlabel("step", fontsize=9, color=QUIET)
    _finish(panel, curves)
    ends = [_height(panel, losses[-1]) for _, losses in curves]
    for row, end, place in zip(rows, ends, spread(ends, LEAST_GAP), strict=True):
        at = {"transform": panel.transAxes, "clip_on": False, "color": style(row.codec)["color"]}
        panel.plot([1, 1.025], [end, place], linewidth=0.6, **at)
        told = f"{row.codec}  {row.validation_over_none:.3f}" if row.codec != NONE else NONE
        panel.text(1.03, place, told, fontsize=8, va="center", **at)
    panel.text(1.03, 1.04, "validation / none", fontsize=7.5, color=QUIET, transform=panel.transAxes)


def _draw_by_byte(panel: Axes, rows: Sequence[ConvergenceRow], curves: Sequence[Curve]) -> None:
    """Names above the panel, in the order of the bytes."""
    panel.set_xscale("log")
    for row, (steps, losses) in zip(rows, curves, strict=True):
        sent = [row.wire_bytes * step for step in steps]
        panel.plot(sent, losses, zorder=5 if row.codec == NONE else 3, **style(row.codec))
        panel.plot(sent[-1:], losses[-1:], "o", markersize=4, color=style(row.codec)["color"], zorder=6)
    panel.set_xlabel("bytes sent by a rank", fontsize=9, color=QUIET)
    panel.xaxis.set_major_locator(LogLocator(numticks=20))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: with_unit(value, BYTE_UNITS)))
    panel.xaxis.set_minor_formatter(NullFormatter())
    _finish(panel, curves)
    low, high = (math.log(limit) for limit in panel.get_xlim())
    ends = [
        (math.log(row.wire_bytes * steps[-1]) - low) / (high - low)
        for row, (steps, _) in zip(rows, curves, strict=True)
    ]
    for row, end, place, (_, losses) in zip(rows, ends, spread(ends, 0.8 * LEAST_GAP), curves, strict=True):
        at = {"transform": panel.transAxes, "clip_on": False, "color": style(row.codec)["color"]}
        panel.plot([place, end, end], [1.02, 0.98, _height(panel, losses[-1])], linewidth=0.5, alpha=0.6, **at)
        panel.text(
            place, 1.03, row.codec, fontsize=8, rotation=60, ha="left", va="bottom", rotation_mode="anchor", **at
        )


def _height(panel: Axes, loss: float) -> float:
    """Where a loss is in the panel, from 0 at the bottom to 1 at the top; what has diverged is at the top."""
    low, high = (math.log(limit) for limit in panel.get_ylim())
    if not math.isfinite(loss):
        return 1.0
    return min(1.0, max(0.0, (math.log(max(loss, 1e-30)) - low) / (high - low)))


def _finish(panel: Axes, curves: Sequence[Curve]) -> None:
    """What comes before EARLY of the steps is above the panel, for what matters is at the end."""
    without = curves[0][1]
    highest = without[int(EARLY * len(without))]
    lowest = min(loss for _, losses in curves for loss in losses if math.isfinite(loss) and loss > 0)
    panel.set_yscale("log")
    panel.set_ylim(lowest * 0.97, highest)
    panel.yaxis.set_major_locator(
        LogLocator(subs=(1,) if highest / lowest > 30 else (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8), numticks=20)
    )
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.grid(True, which="major", color=GRID, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.tick_params(which="both", labelsize=9, color=FRAME, labelcolor=INK)
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color(FRAME)
