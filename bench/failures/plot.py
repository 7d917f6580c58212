"""Draws the loss and the steps of training through failures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from gradwire.bench.failures.outcome import BLOCK_STEPS
from gradwire.bench.failures.ways import DISK, IN_PROCESS, LABELS, RESTART, UNDISTURBED
from gradwire.bench.style import GRID, INK, OTHERS, OURS, QUIET, REFERENCE, save, tidy

_COLORS = {UNDISTURBED: REFERENCE, IN_PROCESS: OURS, RESTART: OTHERS[0], DISK: OTHERS[1]}


def draw(read: Mapping[str, Any], path: Path) -> None:
    """Write a PNG of the results that `bench failures -J` has written."""
    meta, rows = read["meta"], read["rows"]
    figure = Figure(figsize=(10, 4.2), dpi=150, layout="constrained")
    losses, steps = figure.subplots(1, 2)
    killed = ", one killed (gray line)"
    if meta["hosts"] > 1:
        killed = f" on {meta['hosts']} simulated hosts, a rank (gray line) or a whole host (dotted) killed"
    figure.suptitle(
        f"{meta['ranks']} ranks{killed} every {meta['every_s']:g} s",
        x=0.01,
        ha="left",
        fontsize=10,
        color=INK,
    )
    for row in rows:
        reached = row["reached"]
        times = [meta["minutes"] * point / (len(reached) - 1) for point in range(len(reached))]
        goodput = "" if row["way"] == UNDISTURBED or row["goodput"] is None else f": goodput {row['goodput']:.2f}"
        style = {"color": _COLORS[row["way"]], "linewidth": 1.6, "label": LABELS[row["way"]] + goodput}
        steps.plot(times, reached, **style)
        ends = [BLOCK_STEPS * (block + 1) for block in range(len(row["losses"]))]
        # The last step may end just after the last point.
        at = [next((at for at, step in zip(times, reached, strict=True) if step >= end), times[-1]) for end in ends]
        losses.plot(at, row["losses"], **style)
    for kill in max((row["kills"] for row in rows), key=len):
        for panel in (losses, steps):
            panel.axvline(kill["at_s"] / 60, color=GRID, linestyle=":" if kill["of_host"] else "-", zorder=0)
    losses.set_ylabel("training loss (nats per byte)", fontsize=9, color=QUIET)
    steps.set_ylabel("steps that count", fontsize=9, color=QUIET)
    for panel in (losses, steps):
        panel.set_xlabel("minutes since the start", fontsize=9, color=QUIET)
        panel.set_xlim(0, meta["minutes"])
        tidy(panel, 8)
        panel.grid(visible=False, axis="x")
    steps.set_ylim(bottom=0)
    figure.legend(*steps.get_legend_handles_labels(), loc="outside lower left", ncols=2, frameon=False, fontsize=8)
    save(figure, path)
