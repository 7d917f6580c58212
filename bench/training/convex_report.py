"""The rows of `bench convex`, their text, and a picture of the distance from the minimum over steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONSTANT, DECAYING = "constant", "decaying"


@dataclass(frozen=True)
class ConvexRow:
    """The result of one run. Field names are the keys of the JSON.

    schedule: of the step size. gap: the loss above its minimum after the last step, divided by that at the start. gaps: the
    same after the steps in the meta's recorded_steps. replicas_identical: whether the ranks' final weights are equal.
    """

    codec: str
    settings: str
    feedback: bool
    schedule: str
    gap: float
    replicas_identical: bool
    gaps: list[float]


def format_header(meta: Mapping[str, Any]) -> list[str]:
    steps = meta["recorded_steps"][-1]
    return [
        f"# convex: ridge regression, {meta['parameters']} parameters, {meta['world_size']} ranks, {steps} steps",
        f"# {meta['device']}, torch {meta['torch']}",
        "# gap: the loss above its minimum, over that at the start",
        "# step size  codec      feedback       gap  replicas",
    ]


def format_row(row: ConvexRow) -> str:
    return (
        f"  {row.schedule:9}  {row.codec:9}  {'yes' if row.feedback else 'no':8}  {row.gap:8.1e}"
        f"  {'identical' if row.replicas_identical else 'differ'}"
    )


def draw(rows: Sequence[ConvexRow], meta: Mapping[str, Any], path: Path) -> None:
    """Draw the gaps over the steps, a panel for each schedule of the step size."""
    from gradwire.bench.plots import DASHED, OTHERS, REFERENCE, dress, legend, page, save

    title = f"ridge regression, {meta['parameters']} parameters, {meta['world_size']} ranks with different data"
    figure = page(f"{title}\nsolid: with error feedback · dotted: without · dashed: no codec", 8.6, 3.9)
    panels = figure.subplots(1, 2, sharey=True)
    colors = dict(zip(dict.fromkeys(row.codec for row in rows if row.settings != "None"), OTHERS, strict=False))
    for panel, schedule in zip(panels, (CONSTANT, DECAYING), strict=True):
        for row in (row for row in rows if row.schedule == schedule):
            line = "-" if row.feedback else ":" if row.codec in colors else DASHED
            label = row.codec if row.feedback or row.codec not in colors else None
            color = colors.get(row.codec, REFERENCE)
            panel.plot(meta["recorded_steps"], row.gaps, color=color, linestyle=line, linewidth=1.6, label=label)
        dress(panel, "step", "loss above its minimum" if schedule == CONSTANT else "", x_log=10, y_log=10)
        panel.set_title(f"step size {schedule}", loc="left", fontsize=9)
        panel.set_ylim(1e-9, 2)
    legend(figure, panels[0], len(colors) + 1)
    save(figure, path)
