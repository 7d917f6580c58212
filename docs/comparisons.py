"""Draw docs/images/comparisons.png, the picture of the README, from three runs in docs/figures/, which figures.py measures.

The picture carries a digest of the numbers, by which a test sees that it shows them.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from gradwire.collectives.parsing import format_size

DOCS = Path(__file__).parent
IMAGE = DOCS / "images" / "comparisons.png"
#: The title of each comparison, by the name of its run.
TITLES = {
    "compare-inside": "Inside a host: {ranks} processes",
    "compare-between": "Between hosts: {ranks} processes on {hosts} hosts",
    "compare-compressed": "Between hosts, compressed: {ranks} processes, {size}",
}
OURS, PEER, INK, QUIET = "#0f766e", "#a1a1aa", "#27272a", "#71717a"
#: Of the picture, in inches: its width, the height of a bar, and of a heading above bars.
WIDTH, BAR, HEADING = 8.4, 0.3, 0.36


def numbers() -> dict[str, Any]:
    """Return what the picture shows."""
    runs = {name: json.loads((DOCS / "figures" / f"{name}.json").read_text()) for name in TITLES}
    inside, between, _ = (run["meta"] for run in runs.values())
    machine = f"{inside['device']}, torch {inside['torch']}; between hosts: {between['network']}"
    return {"machine": machine, "comparisons": [measured(TITLES[name], run) for name, run in runs.items()]}


def digest() -> str:
    """Return what stands for all that the picture shows."""
    return hashlib.sha256(json.dumps(numbers(), sort_keys=True).encode()).hexdigest()


def size_text(size: int) -> str:
    """Return a size as the page has it: 64 MB of 1024-based megabytes."""
    text = format_size(size)
    return f"{text[:-1]} {text[-1]}B" if text[-1].isalpha() else f"{text} B"


def measured(title: str, run: Any) -> dict[str, Any]:
    """Return a comparison as a run of `python -m gradwire.bench allreduce -J FILE` has it: torch.distributed's time over ours."""
    rows, meta = run["rows"], run["meta"]
    peer = {row["bytes"]: row["time_us"] for row in rows if row["algorithm"] == "torch"}
    coded = any(row["codec"] != "none" for row in rows)
    bars = []
    for row in rows:
        ours = row["codec"] != "none" if coded else row["algorithm"] == "auto"
        if ours and row["algorithm"] != "torch":
            label = row["codec"].partition("+")[0] if coded else size_text(row["bytes"])
            bars.append({"label": label, "times_as_fast": round(peer[row["bytes"]] / row["time_us"], 1)})
    size = size_text(rows[0]["bytes"])
    return {"title": title.format(ranks=rows[0]["world_size"], hosts=len(meta["hosts"]), size=size), "bars": bars}


def draw() -> None:
    """Draw one bar for each number, under the heading of its comparison; gloo is 1."""
    shown = numbers()
    comparisons = shown["comparisons"]
    bars = sum(len(comparison["bars"]) for comparison in comparisons)
    height = bars * BAR + len(comparisons) * HEADING
    figure, axes = plt.subplots(figsize=(WIDTH, height + 0.9))
    longest = max(bar["times_as_fast"] for comparison in comparisons for bar in comparison["bars"])
    top = 0.0
    for comparison in comparisons:
        axes.text(0, top - 0.6 * HEADING, comparison["title"], fontsize=10, weight="bold", color=INK, va="center")
        top -= HEADING
        axes.plot([1, 1], [top - BAR * len(comparison["bars"]), top], color=PEER, linestyle=(0, (3, 2)), zorder=3)
        for bar in comparison["bars"]:
            middle, value = top - BAR / 2, bar["times_as_fast"]
            axes.barh(middle, value, height=0.72 * BAR, color=OURS)
            axes.text(-0.012 * longest, middle, bar["label"], fontsize=9.5, color=INK, ha="right", va="center")
            axes.text(value + 0.008 * longest, middle, f"{value:g} x", fontsize=9.5, color=INK, va="center")
            top -= BAR
    axes.text(1, top - 0.06, "gloo = 1", fontsize=8.5, color=QUIET, ha="center", va="top")
    axes.set_xlim(-0.085 * longest, 1.09 * longest)
    axes.set_ylim(top - 0.22, 0)
    axes.axis("off")
    title = "allreduce of float32: how many times as fast as gloo"
    figure.text(0.012, 1 - 0.2 / (height + 0.9), title, fontsize=12, weight="bold", color=INK, va="center")
    figure.text(0.012, 0.12 / (height + 0.9), shown["machine"], fontsize=8.5, color=QUIET, va="center")
    figure.subplots_adjust(0.012, 0.26 / (height + 0.9), 0.99, 1 - 0.36 / (height + 0.9))
    figure.savefig(IMAGE, dpi=160, metadata={"Description": digest(), "Software": None})
    plt.close(figure)


if __name__ == "__main__":
    draw()
