"""Draw the schedules of docs/algorithms.md from the planners themselves: `python docs/drawings.py` writes docs/images/*.png.

Left to right the rounds, top to bottom the ranks. An arrow is a message; its label names the blocks it carries. Solid: the
receiver adds what arrives to what it has. Dashed: it replaces it.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from collectives.algorithms import PLANNERS
from collectives.schedule import Action, Place, Schedule

IMAGES = Path(__file__).parent / "images"
ADDS, COPIES = "#c2410c", "#1d4ed8"


def blocks_text(start: int, stop: int) -> str:
    return str(start) if stop == start + 1 else f"{start}-{stop - 1}"


def draw(title: str, schedules: list[Schedule], path: Path) -> None:
    rounds = len(schedules[0].rounds)
    size = len(schedules)
    figure, axes = plt.subplots(figsize=(1.2 + 1.75 * rounds, 0.9 + 0.62 * size))
    for rank in range(size):
        axes.axhline(rank, color="#d4d4d8", linewidth=1, zorder=0)
    for index in range(rounds):
        if index % 2 == 0:
            axes.axvspan(index, index + 1, color="#f4f4f5", zorder=-1)
        messages = [(s, step) for s in schedules for step in s.rounds[index] if step.action is not Action.SEND]
        for place, (receiver, step) in enumerate(messages):
            adds = step.action is Action.REDUCE
            start = index + 0.08 + 0.2 * (place + 0.5) / len(messages)
            axes.annotate(
                "",
                xy=(start + 0.62, receiver.rank),
                xytext=(start, step.peer),
                arrowprops={
                    "arrowstyle": "-|>",
                    "color": ADDS if adds else COPIES,
                    "linestyle": "-" if adds else (0, (4, 2)),
                    "linewidth": 1.3,
                    "shrinkA": 2,
                    "shrinkB": 2,
                },
            )
            if schedules[0].blocks > 1:
                along = 0.16
                axes.text(
                    start + 0.62 * along,
                    step.peer + (receiver.rank - step.peer) * along,
                    blocks_text(*step.span),
                    fontsize=7.5,
                    ha="center",
                    va="center",
                    color=ADDS if adds else COPIES,
                    bbox={"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none", "alpha": 0.9},
                )
    axes.set_xlim(0, rounds)
    axes.set_ylim(size - 0.5, -0.5)
    axes.set_xticks([i + 0.5 for i in range(rounds)], [f"round {i + 1}" for i in range(rounds)], fontsize=8)
    axes.set_yticks(range(size), [f"rank {r}" for r in range(size)], fontsize=8)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_title(title, fontsize=10, loc="left")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    hosts = ((0, 1), (2, 3), (4,))
    for name, planner in PLANNERS["allreduce"].items():
        size = {"ring": 4, "direct": 4, "tree": 6}.get(name, 5)
        schedules = [planner(Place(rank, size, 0, hosts)) for rank in range(size)]
        where = ", hosts {0, 1}, {2, 3}, {4}" if name == "hierarchical" else ""
        blocks = schedules[0].blocks
        cut = f"buffer in {blocks} blocks" if blocks > 1 else "whole buffer"
        draw(f"allreduce, {name}: {size} ranks{where}, {cut}", schedules, IMAGES / f"{name}.png")
    size = 6
    draw(
        "broadcast, tree: 6 ranks",
        [PLANNERS["broadcast"]["tree"](Place(r, size)) for r in range(size)],
        IMAGES / "broadcast.png",
    )


if __name__ == "__main__":
    main()
