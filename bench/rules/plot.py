"""The loss of each update rule over tokens, over time and over bytes sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from gradwire.bench.rules.table import RuleRow
from gradwire.bench.style import INK, OTHERS, QUIET, save, tidy

PANELS = (
    ("tokens", "tokens of all ranks", lambda value: value / 1e6, "M", "linear"),
    ("seconds", "seconds", lambda value: value, "", "linear"),
    ("sent_bytes", "bytes that a rank has sent (log axis)", lambda value: value / 1e6, " MB", "log"),
)
EARLY = 0.12
"""The share of the first competitor's run whose losses lie above the plotted range. The plot shows the end of the runs."""


def draw(rows: Sequence[RuleRow], meta: Mapping[str, Any], path: Path) -> None:
    """Write a PNG of the runs with the first seed."""
    shown = [row for row in rows if row.seed == rows[0].seed]
    figure = Figure(figsize=(12.5, 4.6), dpi=150, layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    length = f"{meta['steps']} steps" if meta["steps"] else f"{meta['seconds']:g} s each"
    network = f" · {meta['network']}" if meta["network"] else ""
    slow = f" · {meta['slow']}" if meta["slow"] else ""
    figure.suptitle(
        f"Update rules on bytes_gpt, {rows[0].parameters / 1e6:.1f} M parameters, {rows[0].world_size} ranks, {length}\n"
        f"loss on text not trained on (nats, log axis){network}{slow}",
        x=0.01,
        ha="left",
        fontsize=10,
        color=INK,
    )
    for panel, (key, label, scaled, unit, scale) in zip(panels, PANELS, strict=True):
        for number, row in enumerate(shown):
            points = [point for point in row.curve if scale == "linear" or point[key] > 0]
            style = (
                {"color": "#111111", "linestyle": (0, (4, 2))}
                if number == 0
                else {"color": OTHERS[(number - 1) % len(OTHERS)]}
            )
            panel.plot(
                [scaled(point[key]) for point in points],
                [point["loss"] for point in points],
                label=f"{row.competitor}  {row.loss:.3f}",
                linewidth=1.6,
                marker=".",
                **style,
            )
        panel.set_xscale(scale)
        panel.set_xlabel(label, fontsize=9, color=QUIET)
        if scale == "log":
            low, high = panel.get_xlim()
            panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 30 * low else (1, 3)))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _, unit=unit: f"{value:g}{unit}"))
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.yaxis.set_minor_formatter(NullFormatter())
        tidy(panel, 8)
    lowest = min(row.loss for row in shown)
    early = next(point["loss"] for point in shown[0].curve if point["seconds"] >= EARLY * shown[0].seconds)
    highest = max(early, *(row.loss for row in shown)) * 1.05
    panels[0].set_ylim(lowest * 0.98, highest)
    panels[0].set_yticks(_ticks(lowest, highest))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=4, frameon=False, fontsize=8)
    save(figure, path)


def _ticks(lowest: float, highest: float) -> list[float]:
    step = 0.1 if highest - lowest < 1 else 0.25 if highest - lowest < 2.5 else 0.5
    first = int(lowest / step) + 1
    return [step * number for number in range(first, int(highest / step) + 1)]
