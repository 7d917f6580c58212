"""Draw the schedules of docs/algorithms.md from the planners themselves: `python docs/drawings.py` writes docs/images/*.png.

Left to right the rounds, top to bottom the ranks. An arrow is a message; its label names the blocks it carries. Solid: the
receiver adds what arrives to what it has. Dashed: it replaces it. Each picture carries a digest of its messages, by which a
test sees that it still shows what the planners plan.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from gradwire.collectives.schedules.algorithms import PLANNERS
from gradwire.collectives.schedules.schedule import Action, Place, Schedule

IMAGES = Path(__file__).parent / "images"
ADDS, COPIES = "#c2410c", "#1d4ed8"


def blocks_text(start: int, stop: int) -> str:
    return str(start) if stop == start + 1 else f"{start}-{stop - 1}"


class Message(NamedTuple):
    """An arrow: the blocks from start to stop, of those that the buffer has."""

    receiver: int
    sender: int
    start: int
    stop: int
    adds: bool


class Picture(NamedTuple):
    name: str
    title: str
    schedules: list[Schedule]

    def rounds(self) -> list[list[Message]]:
        """The messages of each round, in an order that does not depend on the planner's."""
        return [
            sorted(
                Message(schedule.rank, step.peer, *step.span, step.action is Action.REDUCE)
                for schedule in self.schedules
                for step in schedule.rounds[index]
                if step.action is not Action.SEND
            )
            for index in range(len(self.schedules[0].rounds))
        ]

    def digest(self) -> str:
        messages = [[tuple(message) for message in messages] for messages in self.rounds()]
        return hashlib.sha256(f"{self.title}: {messages}".encode()).hexdigest()


def draw(picture: Picture) -> None:
    size, rounds = len(picture.schedules), len(picture.rounds())
    crowd = max(1.0, max(map(len, picture.rounds())) / 5)  # more than five messages a round need room for their labels
    spread = 0.2 * min(crowd, 2)
    figure, axes = plt.subplots(figsize=(1.2 + 1.75 * crowd * rounds, 0.9 + 0.62 * size))
    for rank in range(size):
        axes.axhline(rank, color="#d4d4d8", linewidth=1, zorder=0)
    for index, messages in enumerate(picture.rounds()):
        if index % 2 == 0:
            axes.axvspan(index, index + 1, color="#f4f4f5", zorder=-1)
        for place, message in enumerate(messages):
            colour = ADDS if message.adds else COPIES
            start = index + 0.08 + spread * (place + 0.5) / len(messages)
            length = 0.82 - spread
            axes.annotate(
                "",
                xy=(start + length, message.receiver),
                xytext=(start, message.sender),
                arrowprops={
                    "arrowstyle": "-|>",
                    "color": colour,
                    "linestyle": "-" if message.adds else (0, (4, 2)),
                    "linewidth": 1.3,
                    "shrinkA": 2,
                    "shrinkB": 2,
                },
            )
            if picture.schedules[0].blocks > 1:
                along = 0.16
                axes.text(
                    start + length * along,
                    message.sender + (message.receiver - message.sender) * along,
                    blocks_text(message.start, message.stop),
                    fontsize=7.5,
                    ha="center",
                    va="center",
                    color=colour,
                    bbox={"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none", "alpha": 0.9},
                )
    axes.set_xlim(0, rounds)
    axes.set_ylim(size - 0.5, -0.5)
    axes.set_xticks([i + 0.5 for i in range(rounds)], [f"round {i + 1}" for i in range(rounds)], fontsize=8)
    axes.set_yticks(range(size), [f"rank {r}" for r in range(size)], fontsize=8)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_title(picture.title, fontsize=10, loc="left")
    figure.tight_layout()
    about = {"Description": picture.digest(), "Software": None}  # matplotlib's version says nothing about the schedules
    figure.savefig(IMAGES / f"{picture.name}.png", dpi=130, metadata=about)
    plt.close(figure)


def pictures() -> Iterator[Picture]:
    hosts = ((0, 1), (2, 3), (4,))
    shown = re.findall(r"images/(\w+)\.png", (IMAGES.parent / "algorithms.md").read_text())
    for name, planner in PLANNERS["allreduce"].items():
        if name not in shown:
            continue
        size = {"ring": 4, "direct": 4, "tree": 6}.get(name, 5)
        schedules = [planner(Place(rank, size, 0, hosts)) for rank in range(size)]
        where = ", hosts {0, 1}, {2, 3}, {4}" if name == "hierarchical" else ""
        blocks = schedules[0].blocks
        cut = f"buffer in {blocks} blocks" if blocks > 1 else "whole buffer"
        yield Picture(name, f"allreduce, {name}: {size} ranks{where}, {cut}", schedules)
    size = 6
    schedules = [PLANNERS["broadcast"]["tree"](Place(rank, size)) for rank in range(size)]
    yield Picture("broadcast", "broadcast, tree: 6 ranks", schedules)


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    for picture in pictures():
        draw(picture)


if __name__ == "__main__":
    main()
