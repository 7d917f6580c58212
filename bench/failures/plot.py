"""Loss and goodput of training through failures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from gradwire.bench.style import INK, OTHERS, OURS, QUIET, REFERENCE, save, tidy

_LABELS = {
    "undisturbed": "no failures",
    "in-process": "gradwire run --min-np: survivors keep running",
    "torchrun": "torchrun, commits in memory",
    "disk": "torchrun, checkpoints on disk",
}
_COLORS = {"undisturbed": REFERENCE, "in-process": OURS, "torchrun": OTHERS[0], "disk": OTHERS[1]}
_SMOOTHED = 50
"""Over how many steps losses are averaged."""


def draw(read: Mapping[str, Any], path: Path) -> None:
    """Write a PNG of what `bench failures -J` has written."""
    meta, rows = read["meta"], read["rows"]
    figure = Figure(figsize=(10, 4.4), dpi=150, layout="constrained")
    losses, steps = figure.subplots(1, 2)
    hosts = f" on {meta['hosts']} simulated hosts" if meta["hosts"] > 1 else ""
    figure.suptitle(
        f"{meta['ranks']} ranks{hosts}, one killed every {meta['every_s']:g} s",
        x=0.01,
        ha="left",
        fontsize=10,
        color=INK,
    )
    for row in rows:
        label = _LABELS[row["way"]]
        if row["way"] != "undisturbed":
            label += f": goodput {row['goodput']:.2f}"
        times = [seconds / 60 for seconds, *_ in row["curve"]]
        furthest, reached = 0, []
        for _, step, *_ in row["curve"]:
            furthest = max(furthest, step)
            reached.append(furthest)
        style = {"color": _COLORS[row["way"]], "linewidth": 1.6, "label": label}
        steps.plot(times, reached, **style)
        means = [
            sum(point[2] for point in row["curve"][i : i + _SMOOTHED]) / _SMOOTHED
            for i in range(0, len(row["curve"]) - _SMOOTHED, _SMOOTHED)
        ]
        losses.plot(times[_SMOOTHED::_SMOOTHED][: len(means)], means[: len(times[_SMOOTHED::_SMOOTHED])], **style)
    losses.set_ylabel("training loss (nats)", fontsize=9, color=QUIET)
    steps.set_ylabel("steps completed", fontsize=9, color=QUIET)
    for panel in (losses, steps):
        panel.set_xlabel("minutes", fontsize=9, color=QUIET)
        tidy(panel, 8)
    figure.legend(*steps.get_legend_handles_labels(), loc="outside lower left", ncols=2, frameon=False, fontsize=8)
    save(figure, path)
