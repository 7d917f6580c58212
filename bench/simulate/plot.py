"""Plots of predictions: over the number of ranks, and beside published figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, PercentFormatter

from gradwire.bench.simulate.presets import Compared
from gradwire.bench.simulate.scenario import Prediction
from gradwire.bench.style import INK, OTHERS, OURS, QUIET, REFERENCE, save, tidy


def draw_curve(points: Sequence[Prediction], title: str, path: Path) -> None:
    """Write a PNG of the samples per second, with and without exchanges, and of the efficiency."""
    figure = Figure(figsize=(9, 3.8), dpi=150, layout="constrained")
    figure.suptitle(f"{title}: predicted", x=0.01, ha="left", fontsize=10, color=INK)
    rate, share = figure.subplots(1, 2)
    ranks = [each.ranks for each in points]
    alone = points[0].samples_per_s / points[0].ranks
    rate.plot(
        ranks,
        [alone * each for each in ranks],
        color=REFERENCE,
        linestyle=(0, (4, 2)),
        linewidth=1,
        label="without exchange",
    )
    rate.plot(ranks, [each.samples_per_s for each in points], color=OURS, marker=".", label="predicted")
    rate.set_yscale("log")
    rate.set_ylabel("samples per second (log axis)", fontsize=9, color=QUIET)
    rate.legend(frameon=False, fontsize=8, labelcolor=INK)
    share.plot(ranks, [each.efficiency for each in points], color=OURS, marker=".")
    share.set_ylim(0, 1.05)
    share.yaxis.set_major_formatter(PercentFormatter(1))
    share.set_ylabel("efficiency", fontsize=9, color=QUIET)
    for panel in (rate, share):
        _over_ranks(panel)
        panel.xaxis.set_minor_formatter(NullFormatter())
    save(figure, path)


def draw_compared(rows: Sequence[Compared], path: Path) -> None:
    """Write a PNG of predicted over published, by the number of ranks. Hollow marks are rows to which an input was fitted."""
    figure = Figure(figsize=(9, 4.2), dpi=150, layout="constrained")
    figure.suptitle(
        "Predicted over published; hollow: an input was fitted to it; grey: within 10 %", x=0.01, ha="left", fontsize=10
    )
    panel = figure.subplots()
    panel.axhspan(0.9, 1.1, color="#eeeeee", zorder=0)
    panel.axhline(1, color=REFERENCE, linewidth=0.8)
    methods = list(dict.fromkeys((row.preset, row.method) for row in rows))
    colors = [OURS, *OTHERS]
    for number, (preset, method) in enumerate(methods):
        color, shift = colors[number % len(colors)], 2 ** (0.07 * (number - len(methods) / 2))
        for fitted in (False, True):
            shown = [row for row in rows if (row.preset, row.method, row.fitted) == (preset, method, fitted)]
            panel.scatter(
                [row.ranks * shift for row in shown],
                [1 + row.error for row in shown],
                s=26,
                edgecolors=color,
                facecolors="white" if fitted else color,
                label=None if fitted else f"{preset} {method}",
                zorder=3,
            )
    _over_ranks(panel)
    panel.set_ylabel("predicted / published", fontsize=9, color=QUIET)
    figure.legend(loc="outside lower left", ncols=3, frameon=False, fontsize=8, labelcolor=INK)
    save(figure, path)


def _over_ranks(panel: Axes) -> None:
    """Make the horizontal axis the number of ranks, on a log scale with base 2."""
    panel.set_xscale("log", base=2)
    panel.set_xlabel("ranks (log axis)", fontsize=9, color=QUIET)
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    tidy(panel, 8)
