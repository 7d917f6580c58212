"""Draws the loss and the steps of training through failures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradwire.bench.failures.outcome import BLOCK_STEPS
from gradwire.bench.failures.ways import DISK, IN_PROCESS, LABELS, RESTART, UNDISTURBED
from gradwire.bench.plots import GRID, OTHERS, OURS, REFERENCE, dress, legend, page, save

_COLORS = {UNDISTURBED: REFERENCE, IN_PROCESS: OURS, RESTART: OTHERS[0], DISK: OTHERS[1]}


def draw(read: Mapping[str, Any], path: Path) -> None:
    """Write a PNG of the results that `bench failures -J` has written."""
    meta, rows = read["meta"], read["rows"]
    killed = ", one killed (gray line)"
    if meta["hosts"] > 1:
        killed = f" on {meta['hosts']} simulated hosts, a rank (gray line) or a whole host (dotted) killed"
    figure = page(f"{meta['ranks']} ranks{killed} every {meta['every_s']:g} s", 10, 4.2)
    losses, steps = figure.subplots(1, 2)
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
    for panel, label in ((losses, "training loss (nats per byte)"), (steps, "steps that count")):
        dress(panel, "minutes since the start", label)
        panel.set_xlim(0, meta["minutes"])
        panel.grid(visible=False, axis="x")
    steps.set_ylim(bottom=0)
    legend(figure, steps, 2)
    save(figure, path)
