"""Draws the loss over steps: for each model, one panel per kind of codec, with the loss without a codec."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from gradwire.bench.style import INK, OTHERS, QUIET, save, tidy
from gradwire.bench.training.convergence_table import ConvergenceRow
from gradwire.trainer.examples.report import running_means

#: The kinds of codecs, with one panel each. All other codecs share one more panel.
KINDS = (
    ("half precision", ("fp16", "bf16")),
    ("8 and 4 bits", ("int8", "fp8", "int4")),
    ("random rounding", ("natural", "qsgd", "terngrad")),
    ("one bit, error feedback", ("onebit",)),
    ("few numbers, error feedback", ("topk", "threshold", "randomk", "dgc", "chunktopk")),
    ("low rank", ("powersgd",)),
)
COLUMNS = 3
#: A running mean covers 2 / SMOOTHED of the steps.
SMOOTHED = 40
#: The loss after this part of the steps is the highest in view, so that the end of the runs is visible.
EARLY = 0.05
#: The room for the legend above that loss, over the height of the curves below it.
LEGEND = 0.5


def smoothed(row: ConvergenceRow) -> tuple[list[int], list[float]]:
    """Return steps, and the mean loss of each step and its neighbours. Steps with too few neighbours are left out."""
    reach = row.steps // SMOOTHED
    return list(range(1 + reach, row.steps + 1 - reach)), running_means(row.losses, reach)[reach : row.steps - reach]


def kinds_of(rows: Sequence[ConvergenceRow]) -> list[tuple[str, list[ConvergenceRow]]]:
    """Return the rows with a codec, by kind. Codecs of no kind are at the end; kinds without a row are left out."""
    known = {name for _, names in KINDS for name in ("none", *names)}
    kinds = [*KINDS, ("others", tuple(row.codec for row in rows if row.codec not in known))]
    found = [(title, [row for name in names for row in rows if row.codec == name]) for title, names in kinds]
    return [(title, of_kind) for title, of_kind in found if of_kind]


def draw(rows: Sequence[ConvergenceRow], meta: Mapping[str, Any], path: Path) -> None:
    """Write a PNG of the losses."""
    models = list(dict.fromkeys(row.model for row in rows))
    kinds = {model: kinds_of([row for row in rows if row.model == model]) for model in models}
    heights = [-(-len(kinds[model]) // COLUMNS) for model in models]
    figure = Figure(figsize=(11, 1.0 + 2.9 * sum(heights)), dpi=150, layout="constrained")
    says = (
        f"training loss (nats), a running mean · {meta['world_size']} ranks, {meta['steps']} steps, seed {meta['seed']}, "
        "the same data in the same order\ndashed: without a codec · behind each codec: its bytes and its validation loss, "
        "over those without one"
    )
    figure.suptitle(f"Training with codecs\n{says}", x=0.01, ha="left", fontsize=9.5, color=INK)
    for model, part in zip(models, _parts(figure, heights), strict=True):
        of_model = [row for row in rows if row.model == model]
        part.suptitle(
            f"{model}, {of_model[0].parameters / 1e6:.2f} M parameters", x=0.01, ha="left", fontsize=11, color=INK
        )
        panels = part.subplots(-(-len(kinds[model]) // COLUMNS), COLUMNS, squeeze=False, sharex=True, sharey=True)
        for panel, (title, of_kind) in zip(panels.flat, kinds[model], strict=False):
            _draw_kind(panel, title, of_kind, of_model)
        for unused in panels.flat[len(kinds[model]) :]:
            unused.axis("off")
    save(figure, path)


def _parts(figure: Figure, heights: Sequence[int]) -> list[Any]:
    parts = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights, hspace=0.04)
    return list(parts[:, 0])


def _draw_kind(panel: Axes, title: str, of_kind: Sequence[ConvergenceRow], of_model: Sequence[ConvergenceRow]) -> None:
    without = next((row for row in of_model if row.codec == "none"), None)
    for row, color in zip(of_kind, OTHERS, strict=False):
        share = f"{row.wire_bytes / without.wire_bytes:.3f}  {row.validation_over_none:.3f}" if without else ""
        panel.plot(*smoothed(row), color=color, linewidth=1.6, zorder=4, label=f"{row.codec}  {share}")
    if without is not None:
        panel.plot(*smoothed(without), color="#111111", linewidth=1.1, linestyle=(0, (4, 2)), zorder=5)
    panel.set_title(title, loc="left", fontsize=9, color=QUIET)
    panel.legend(loc="upper right", fontsize=8, frameon=False, labelcolor=INK, handlelength=1.2)
    curves = [smoothed(row)[1] for row in of_model]
    reference = smoothed(without)[1] if without is not None else curves[0]
    lowest = min(loss for losses in curves for loss in losses if math.isfinite(loss) and loss > 0)
    highest = reference[int(EARLY * len(reference))]
    panel.set_yscale("log")
    panel.set_ylim(lowest * 0.97, highest * (highest / lowest) ** LEGEND)
    wide = highest / lowest > 30
    panel.yaxis.set_major_locator(LogLocator(subs=(1,) if wide else (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8), numticks=20))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())
    tidy(panel, 8)
    panel.set_axisbelow(True)
