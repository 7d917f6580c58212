"""The rows of `bench convergence`, their text, and a picture of the loss over steps, with one panel per kind of codec."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from gradwire.bench.plots import DASHED, INK, OTHERS, QUIET, dress, page, running_means, save, write_numbers

NONE = "none"
NOTES = """\
training: mean loss of the last steps; validation: loss on data not trained on, and that over no compression's.
wire: bytes that a rank sends in a step; ratio: those without compression over them."""

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


@dataclass(frozen=True)
class ConvergenceRow:
    """The result of one model trained with one codec. Field names are the keys of the JSON.

    wire_bytes: the bytes that a rank sends in a step. ratio: those without a codec over wire_bytes. losses: those of all
    steps, averaged over the ranks. replicas_identical: whether the ranks' final weights are bitwise equal.
    """

    model: str
    codec: str
    settings: str
    world_size: int
    parameters: int
    steps: int
    seed: int
    training_loss: float
    validation_loss: float
    validation_over_none: float
    accuracy: float | None
    wire_bytes: float
    ratio: float
    replicas_identical: bool
    losses: list[float]


def format_header(meta: Mapping[str, Any]) -> list[str]:
    return [
        f"# convergence: world size {meta['world_size']} backend {meta['backend']}, {meta['steps']} steps, seed {meta['seed']}",
        f"# {meta['device']}, torch {meta['torch']}",
        *(f"# {line}" for line in NOTES.splitlines()),
    ]


def format_heading(row: ConvergenceRow) -> list[str]:
    return [
        "#",
        f"# {row.model}: {row.parameters / 1e6:.2f} M parameters",
        "# codec      training validation  over none  accuracy   wire (B/step)    ratio  replicas",
    ]


def format_row(row: ConvergenceRow) -> str:
    accuracy = "" if row.accuracy is None else f"{row.accuracy:.1%}"
    return (
        f"  {row.codec:10} {row.training_loss:8.4f} {row.validation_loss:10.4f} {row.validation_over_none:10.4f}"
        f" {accuracy:>9} {row.wire_bytes:15.0f} {row.ratio:8.2f}  {'identical' if row.replicas_identical else 'differ'}"
    )


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
    heights = [max(1, -(-len(kinds[model]) // COLUMNS)) for model in models]
    says = (
        f"training loss (nats), a running mean · {meta['world_size']} ranks, {meta['steps']} steps, seed {meta['seed']}, "
        "the same data in the same order\ndashed: without a codec · behind each codec: its bytes and its validation loss, "
        "over those without one"
    )
    figure = page(f"Training with codecs\n{says}", 11, 1.0 + 2.9 * sum(heights))
    parts = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights, hspace=0.04)[:, 0]
    for model, height, part in zip(models, heights, parts, strict=True):
        of_model = [row for row in rows if row.model == model]
        heading = f"{model}, {of_model[0].parameters / 1e6:.2f} M parameters"
        part.suptitle(heading, x=0.01, ha="left", fontsize=11, color=INK)
        panels = part.subplots(height, COLUMNS, squeeze=False, sharex=True, sharey=True)
        for panel, (title, of_kind) in zip(panels.flat, kinds[model], strict=False):
            _draw_kind(panel, title, of_kind, of_model)
        for unused in panels.flat[len(kinds[model]) :]:
            unused.axis("off")
    save(figure, path)


def _draw_kind(panel: Axes, title: str, of_kind: Sequence[ConvergenceRow], of_model: Sequence[ConvergenceRow]) -> None:
    without = of_model[0]
    assert without.codec == NONE
    for row, color in zip(of_kind, OTHERS, strict=False):
        share = f"{row.wire_bytes / without.wire_bytes:.3f}  {row.validation_over_none:.3f}"
        panel.plot(*smoothed(row), color=color, linewidth=1.6, zorder=4, label=f"{row.codec}  {share}")
    panel.plot(*smoothed(without), color="#111111", linewidth=1.1, linestyle=DASHED, zorder=5)
    panel.set_title(title, loc="left", fontsize=9, color=QUIET)
    panel.legend(loc="upper right", fontsize=8, frameon=False, labelcolor=INK, handlelength=1.2)
    dress(panel, y_log=10)
    lowest = min(loss for row in of_model for loss in smoothed(row)[1] if math.isfinite(loss) and loss > 0)
    reference = smoothed(without)[1]
    highest = reference[int(EARLY * len(reference))]
    panel.set_ylim(lowest * 0.97, highest * (highest / lowest) ** LEGEND)
    write_numbers(panel.yaxis, subs=(1,) if highest / lowest > 30 else (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8))
