"""Plots of predictions: over the number of ranks, and beside published figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, PercentFormatter

from gradwire.bench.plots import DASHED, INK, OTHERS, OURS, REFERENCE, dress, legend, page, save
from gradwire.bench.simulate.presets import Compared
from gradwire.bench.simulate.scenario import Prediction


def draw_curve(points: Sequence[Prediction], title: str, path: Path) -> None:
    """Write a PNG of the samples per second, with and without exchanges, and of the efficiency."""
    figure = page(f"{title}: predicted", 9, 3.8)
    rate, share = figure.subplots(1, 2)
    ranks = [each.ranks for each in points]
    alone = [points[0].samples_per_s / points[0].ranks * each for each in ranks]
    rate.plot(ranks, alone, color=REFERENCE, linestyle=DASHED, linewidth=1, label="without exchange")
    rate.plot(ranks, [each.samples_per_s for each in points], color=OURS, marker=".", label="predicted")
    _over_ranks(rate, "samples per second", y_log=10)
    rate.legend(frameon=False, fontsize=8, labelcolor=INK)
    share.plot(ranks, [each.efficiency for each in points], color=OURS, marker=".")
    _over_ranks(share, "efficiency")
    share.set_ylim(0, 1.05)
    share.yaxis.set_major_formatter(PercentFormatter(1))
    save(figure, path)


def draw_compared(rows: Sequence[Compared], path: Path) -> None:
    """Write a PNG of predicted over published, by the number of ranks. Hollow marks are rows to which an input was fitted."""
    figure = page("Predicted over published; hollow: an input was fitted to it; grey: within 10 %", 9, 4.2)
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
    _over_ranks(panel, "predicted / published")
    legend(figure, panel, 3)
    save(figure, path)


def _over_ranks(panel: Axes, label: str, y_log: int = 0) -> None:
    """Make the horizontal axis the number of ranks."""
    dress(panel, "ranks", label, x_log=2, y_log=y_log)
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
