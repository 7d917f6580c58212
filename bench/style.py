"""The style of the pictures that benchmarks draw."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

#: The colors of lines: ours, its reference, and all others.
OURS, REFERENCE = "#d1495b", "#222222"
OTHERS = ("#2e86ab", "#e09f3e", "#5b8e7d", "#8e6c8a", "#79b4d8", "#a26769", "#b5b95b")
INK, QUIET, FRAME, GRID = "#333333", "#666666", "#bbbbbb", "#e6e6e6"


def tidy(panel: Axes, label_size: int) -> None:
    """Give a panel a pale grid, and a frame on the left and at the bottom only. label_size: in points."""
    panel.grid(True, which="major", color=GRID, linewidth=0.8)
    panel.tick_params(which="both", labelsize=label_size, color=FRAME, labelcolor=INK)
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color(FRAME)


def save(figure: Figure, path: Path) -> None:
    """Write a figure to a file, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
