"""Draw docs/images/training-steps.png, the picture of the README, from three runs in docs/figures/, which figures.py measures.

The picture carries a digest of the runs, by which a test sees that it shows them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from figure_views import FOLDER, figures
from plots import digest_of, sign

from gradwire.bench.plots import INK, OURS, QUIET, REFERENCE, page, save

IMAGE = Path(__file__).parent / "images" / "training-steps.png"
#: The title of each run, by its name.
TITLES = {
    "step-one-host": "2 processes on one computer",
    "step-2-hosts-10gbit": "2 computers, 10 Gbit/s",
    "step-4-hosts-1gbit": "4 computers, 1 Gbit/s",
}
#: What is drawn of each run, and how it is called.
LABELS = {
    "ddp": "DDP over gloo",
    "ddp+fp16": "DDP, fp16 hook",
    "gradwire": "gradwire",
    "gradwire+int8": "gradwire, int8",
    "gradwire+powersgd": "gradwire, powersgd",
    "gradwire+onebit": "gradwire, onebit",
}
COMPUTING = "#cbd5e1"


def digest() -> str:
    """Return what stands for the runs that the picture shows."""
    return digest_of(*(FOLDER / f"{name}.json" for name in TITLES))


def draw() -> None:
    """Draw a bar for each competitor, as long as its step, over DDP's; its first part is computing, the rest what the
    exchange adds."""
    runs = {title: {row["competitor"]: row for row in figures(name)["rows"]} for name, title in TITLES.items()}
    shown = {title: [name for name in LABELS if name in rows] for title, rows in runs.items()}
    counts = [len(names) for names in shown.values()]
    figure = page("A training step of a GPT with 12.8 M parameters", 8.4, 0.27 * sum(counts) + 1.5)
    panels = figure.subplots(len(runs), 1, sharex=True, height_ratios=[count + 0.4 for count in counts])
    for panel, (title, names) in zip(panels, shown.items(), strict=True):
        rows = runs[title]
        _bars(panel, names, rows)
        panel.set_title(title, loc="left", fontsize=9, color=INK)
    panels[0].set_xlim(0, 1.12)
    panels[-1].set_xlabel("time of a step / that of DDP over gloo", fontsize=9, color=QUIET)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=3, frameon=False, fontsize=8, labelcolor=INK)
    save(figure, IMAGE)
    sign(IMAGE, digest())


def _bars(panel: Any, names: list[str], rows: dict[str, dict[str, Any]]) -> None:
    ddp_ms = rows["ddp"]["step_ms"]
    computing = min(1.0, rows["compute"]["step_ms"] / ddp_ms)
    for number, name in enumerate(names):
        whole = rows[name]["step_ms"] / ddp_ms
        color, what = (
            (OURS, "beyond computing, gradwire")
            if name.startswith("gradwire")
            else (REFERENCE, "beyond computing, DDP")
        )
        known = panel.get_legend_handles_labels()[1]
        panel.barh(number, computing, color=COMPUTING, height=0.7, label="computing" if not known else None)
        panel.barh(
            number,
            max(0.0, whole - computing),
            left=computing,
            color=color,
            height=0.7,
            label=None if what in known else what,
        )
        panel.text(whole + 0.01, number, f"{whole:.2f}", va="center", fontsize=8, color=INK)
    panel.set_yticks(range(len(names)), [LABELS[name] for name in names], fontsize=8)
    panel.invert_yaxis()
    panel.spines[["top", "right", "bottom", "left"]].set_visible(False)
    panel.tick_params(length=0, labelsize=8, labelcolor=INK)


if __name__ == "__main__":
    draw()
