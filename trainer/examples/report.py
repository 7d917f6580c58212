"""The output of a training run: progress while it runs, then a table, a loss curve and summary.json."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS = "gradwire"
BASELINE = "DDP"
LINE_EVERY_S = 5.0

POINTS_APART = 0.04
"""The least distance between the last validation of a plot and the others, as a part of the plot's width."""


@dataclass
class Record:
    """Keeps the history of one model in training, averaged over the ranks. Entry i of losses and of step_s belongs to
    step i."""

    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    wait_s: float = 0.0
    """Seconds out of sum(step_s) that were spent waiting for communication."""
    validation: list[tuple[int, float, float]] = field(default_factory=list)
    """Tuples (steps done, loss, accuracy)."""
    replicas_identical: bool = True
    """Whether every rank ended with the same bits in all parameters."""

    def median_step_s(self) -> float:
        return statistics.median(self.step_s)

    def steps_per_s(self) -> float:
        return len(self.step_s) / sum(self.step_s)

    def wait_share(self) -> float:
        return self.wait_s / sum(self.step_s)


@contextmanager
def progress(rank: int, item: str, items_per_step: int) -> Iterator[Callable[[float, Record], None]]:
    """Yield a function that shows the progress of a run, given the fraction done and the record so far.

    Rank 0 shows a bar if stdout is a terminal, else a plain line every few seconds; other ranks show nothing.
    """

    def describe(record: Record) -> str:
        text = (
            f"step {len(record.losses)}  loss {record.losses[-1]:.3f}"
            f"  {record.steps_per_s() * items_per_step:,.0f} {item}s/s  communication {record.wait_share():.1%}"
        )
        if not record.validation:
            return text
        step, loss, _ = record.validation[-1]
        return f"{text}  validation {loss:.3f}" + (f" at step {step}" if step != len(record.losses) else "")

    if rank != 0:
        yield lambda fraction, record: None
    elif sys.stdout.isatty():
        columns = BarColumn(bar_width=20), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
        with Progress(*columns) as bar:
            task = bar.add_task("", total=1.0)
            yield lambda fraction, record: bar.update(task, completed=fraction, description=describe(record))
    else:
        printed = -LINE_EVERY_S

        def line(fraction: float, record: Record) -> None:
            nonlocal printed
            if time.monotonic() - printed >= LINE_EVERY_S or fraction >= 1:
                printed = time.monotonic()
                print(f"{fraction:4.0%}  {describe(record)}", flush=True)

        yield line


@dataclass(frozen=True)
class RunReport:
    """Presents the outcome of a run of one model, or of two side by side."""

    title: str
    item: str
    items_per_step: int
    world_size: int
    accuracy: bool
    """Whether to report the accuracy."""
    records: dict[str, Record]

    def summary(self) -> dict[str, Any]:
        ours = self.records[OURS]
        result = {
            "steps": len(ours.losses),
            **self._outcome(ours),
            "comm_share": ours.wait_share(),
            "world_size": self.world_size,
        }
        if self.accuracy:
            result["accuracy"] = ours.validation[-1][2]
        if ddp := self.records.get(BASELINE):
            step_s, ours_s = ddp.median_step_s(), ours.median_step_s()
            result["ddp"] = {**self._outcome(ddp), "step_s": step_s, "gradwire_step_s": ours_s}
            result["times_as_fast"] = self._times_as_fast()
        return result

    def _times_as_fast(self) -> float:
        """Return the time of DDP's median step, divided by that of ours."""
        return self.records[BASELINE].median_step_s() / self.records[OURS].median_step_s()

    def _outcome(self, record: Record) -> dict[str, Any]:
        """Return the values that the summary has for each model."""
        return {
            "loss_first": record.losses[0],
            "loss_last": record.losses[-1],
            "val_loss": record.validation[-1][1],
            "items_per_s": record.steps_per_s() * self.items_per_step,
            "replicas_identical": record.replicas_identical,
        }

    def table(self) -> Table:
        result = Table(title=f"{self.title}, {self._ranks()}", title_justify="left")
        result.add_column("")
        for name in self.records:
            result.add_column(name, justify="right")
        columns = self.records.values()
        result.add_row("steps", *(str(len(r.losses)) for r in columns))
        result.add_row("loss, first step", *(f"{r.losses[0]:.4f}" for r in columns))
        result.add_row("loss, last step", *(f"{r.losses[-1]:.4f}" for r in columns))
        result.add_row("validation loss", *(f"{r.validation[-1][1]:.4f}" for r in columns))
        if self.accuracy:
            result.add_row("validation accuracy", *(f"{r.validation[-1][2]:.2%}" for r in columns))
        result.add_row(f"{self.item}s per second", *(f"{r.steps_per_s() * self.items_per_step:,.0f}" for r in columns))
        result.add_row("step, median", *(f"{r.median_step_s() * 1e3:.2f} ms" for r in columns))
        if BASELINE in self.records:
            result.add_row(f"speed of a step, {BASELINE} = 1", f"{self._times_as_fast():.2f}", "1.00")
        result.add_row("waiting for communication", f"{self.records[OURS].wait_share():.1%}")
        result.add_row("replicas bit-identical", *("yes" if r.replicas_identical else "NO" for r in columns))
        return result

    def figure(self) -> Figure:
        """Return a plot of the loss over the steps: a faint line of single steps, their running mean, and the
        validations, the last of them with the final parameters."""
        from matplotlib.figure import Figure  # a slow import, which only rank 0 needs
        from matplotlib.ticker import MaxNLocator

        figure = Figure(figsize=(8, 4.8), dpi=150, layout="constrained")
        axes = figure.add_subplot()
        _draw_record(axes, OURS, self.records[OURS], {"color": "tab:blue"}, marker="o", size=8)
        if BASELINE in self.records:
            style = {"color": "tab:orange", "linestyle": (0, (5, 3))}
            _draw_record(axes, BASELINE, self.records[BASELINE], style, marker="D", size=4)
        ours = self.records[OURS]
        rate = f"{ours.steps_per_s() * self.items_per_step:,.0f} {self.item}s/s"
        axes.set_title(self.title, loc="left", fontweight="bold")
        axes.set_title(f"{self._ranks()}, {rate}", loc="right", fontsize=9, color="0.35")
        axes.set_xlabel("step")
        axes.set_ylabel(f"cross-entropy (nats per {self.item})")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if min(ours.losses) < ours.losses[0] / 20:
            axes.set_yscale("log")
        axes.set_xlim(0, len(ours.losses) * 1.02)
        axes.grid(color="0.9")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        return figure

    def publish(self, out: Path) -> None:
        """Print the table; write loss.png and summary.json into `out`."""
        Console().print(self.table())
        temporary = out / "loss.png.partial"
        self.figure().savefig(temporary, format="png")
        os.replace(temporary, out / "loss.png")
        temporary = out / "summary.json.partial"
        temporary.write_text(json.dumps(self.summary(), indent=2) + "\n")
        os.replace(temporary, out / "summary.json")
        print(f"wrote {out / 'loss.png'} and {out / 'summary.json'}", flush=True)

    def _ranks(self) -> str:
        return count(self.world_size, "rank")


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def running_means(values: list[float], reach: int) -> list[float]:
    """Return the mean of each value and its neighbours, `reach` on either side.

    Near the beginning, where losses fall steeply, it includes as few values after as before. Near the end, it includes
    `reach` values before and all that follow, so that the mean does not follow the last few values.
    """
    reaches = (min(reach, i) for i in range(len(values)))
    return [statistics.fmean(values[i - k : i + k + 1]) for i, k in enumerate(reaches)]


def apart(validation: list[tuple[int, float, float]], least: float) -> list[tuple[int, float, float]]:
    """Return the validations, except those fewer than `least` steps before the last, whose points would touch it."""
    last = validation[-1]
    return [earlier for earlier in validation[:-1] if last[0] - earlier[0] >= least] + [last]


def _draw_record(axes: Axes, name: str, record: Record, style: dict[str, Any], marker: str, size: float) -> None:
    number, color = len(record.losses), style["color"]
    steps, reach = range(1, number + 1), min(20, number // 20)
    each = f"{name}, each step"
    if reach:
        axes.plot(steps, record.losses, color=color, alpha=0.3, linewidth=0.8, label=each)
        each = f"{name}, mean of {2 * reach + 1} steps"
    axes.plot(steps, running_means(record.losses, reach), linewidth=1.6, label=each, **style)
    done, losses, _ = zip(*apart(record.validation, least=number * POINTS_APART), strict=True)
    label = f"{name}, validation: {losses[-1]:.3f}"
    axes.plot(done, losses, marker, color=color, markersize=size, markeredgecolor="white", label=label)
