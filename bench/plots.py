"""The style of the pictures that benchmarks draw."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

#: The colors of lines: ours, its reference, and all others.
OURS, REFERENCE = "#d1495b", "#222222"
OTHERS = ("#2e86ab", "#e09f3e", "#5b8e7d", "#8e6c8a", "#79b4d8", "#a26769", "#b5b95b")
INK, QUIET, FRAME, GRID = "#333333", "#666666", "#bbbbbb", "#e6e6e6"
DASHED = (0, (4, 2))


def page(title: str, width: float, height: float) -> Figure:
    """Return a figure with a title at its left. width, height: in inches."""
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, color=INK)
    return figure


def dress(panel: Axes, x: str = "", y: str = "", *, x_log: int = 0, y_log: int = 0) -> None:
    """Give a panel its labels, a pale grid, and a frame on the left and at the bottom only.

    x_log, y_log: the base of a logarithmic axis; 0 for a linear one. Its label says that it is logarithmic.
    """
    for axis, label, base in ((panel.xaxis, x, x_log), (panel.yaxis, y, y_log)):
        axis.set_label_text(f"{label} (log axis)" if base and label else label, fontsize=9, color=QUIET)
        if base:
            (panel.set_xscale if axis is panel.xaxis else panel.set_yscale)("log", base=base)
            write_numbers(axis)
    panel.grid(True, which="major", color=GRID, linewidth=0.8)
    panel.tick_params(which="both", labelsize=8, color=FRAME, labelcolor=INK)
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color(FRAME)


def write_numbers(axis: Axis, subs: Sequence[float] = ()) -> None:
    """Write the ticks of an axis as plain numbers. subs: ticks at these multiples of the powers of ten."""
    if subs:
        axis.set_major_locator(LogLocator(subs=subs, numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def legend(figure: Figure, panel: Axes, columns: int) -> None:
    """Write the names of a panel's lines below the figure."""
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=columns, frameon=False, fontsize=8, labelcolor=INK)


def running_means(values: Sequence[float], reach: int) -> list[float]:
    """Return the mean of each value and its neighbours, `reach` on either side.

    Near the beginning, where losses fall steeply, it includes as few values after as before. Near the end, it includes
    `reach` values before and all that follow, so that the mean does not follow the last few values.
    """
    reaches = (min(reach, i) for i in range(len(values)))
    return [statistics.fmean(values[i - k : i + k + 1]) for i, k in enumerate(reaches)]


def save(figure: Figure, path: Path) -> None:
    """Write a figure to a file, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
