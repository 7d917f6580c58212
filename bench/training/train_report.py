"""The output of `bench train`: progress while it runs, then a table, a loss curve and summary.json."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from gradwire.bench.plots import DASHED, OTHERS, dress, page, running_means, save
from gradwire.bench.workloads.loop import Workload

OURS, DDP = "gradwire", "DDP"
LINE_EVERY_S = 5.0
POINTS_APART = 0.04
"""The least distance between the last validation of a plot and the others, as a part of the plot's width."""


@dataclass
class Record:
    """The history of one model, averaged over the ranks. validations: tuples (steps done, loss, accuracy)."""

    losses: list[float]
    step_s: list[float]
    validations: list[tuple[int, float, float]]
    wait_share: float = 0.0
    replicas_identical: bool = True

    def items_per_s(self, workload: Workload) -> float:
        return len(self.step_s) / sum(self.step_s) * workload.items_per_step


@contextmanager
def progress(rank: int, workload: Workload) -> Iterator[Callable[[float, Record], None]]:
    """Yield a function that shows the progress of a run, given the fraction done and the record so far.

    Rank 0 shows a bar if stdout is a terminal, else a plain line every few seconds; other ranks show nothing.
    """

    def describe(record: Record) -> str:
        rate = f"{record.items_per_s(workload):,.0f} {workload.item}s/s"
        text = f"step {len(record.losses)}  loss {record.losses[-1]:.3f}  {rate}  communication {record.wait_share:.1%}"
        if not record.validations:
            return text
        step, loss, _ = record.validations[-1]
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


def summary(workload: Workload, world_size: int, records: dict[str, Record]) -> dict[str, Any]:
    """Return the contents of summary.json."""

    def outcome(record: Record) -> dict[str, Any]:
        return {
            "loss_first": record.losses[0],
            "loss_last": record.losses[-1],
            "val_loss": record.validations[-1][1],
            "items_per_s": record.items_per_s(workload),
            "replicas_identical": record.replicas_identical,
        }

    ours = records[OURS]
    said = {"steps": len(ours.losses), **outcome(ours), "comm_share": ours.wait_share, "world_size": world_size}
    if workload.has_accuracy:
        said["accuracy"] = ours.validations[-1][2]
    if ddp := records.get(DDP):
        medians = {"step_s": statistics.median(ddp.step_s), "gradwire_step_s": statistics.median(ours.step_s)}
        said |= {"ddp": {**outcome(ddp), **medians}, "times_as_fast": medians["step_s"] / medians["gradwire_step_s"]}
    return said


def table(title: str, workload: Workload, records: dict[str, Record], said: dict[str, Any]) -> Table:
    result = Table("", title=title, title_justify="left")
    for name in records:
        result.add_column(name, justify="right")

    def row(label: str, text: Callable[[Record], str]) -> None:
        result.add_row(label, *map(text, records.values()))

    row("steps", lambda record: str(len(record.losses)))
    row("loss, first step", lambda record: f"{record.losses[0]:.4f}")
    row("loss, last step", lambda record: f"{record.losses[-1]:.4f}")
    row("validation loss", lambda record: f"{record.validations[-1][1]:.4f}")
    if workload.has_accuracy:
        row("validation accuracy", lambda record: f"{record.validations[-1][2]:.2%}")
    row(f"{workload.item}s per second", lambda record: f"{record.items_per_s(workload):,.0f}")
    row("step, median", lambda record: f"{statistics.median(record.step_s) * 1e3:.2f} ms")
    if DDP in records:
        result.add_row(f"speed of a step, {DDP} = 1", f"{said['times_as_fast']:.2f}", "1.00")
    result.add_row("waiting for communication", f"{records[OURS].wait_share:.1%}")
    row("replicas bit-identical", lambda record: "yes" if record.replicas_identical else "NO")
    return result


def curves(title: str, workload: Workload, records: dict[str, Record]) -> Figure:
    """Return a plot of the loss over the steps: a faint line of single steps, their running mean, and the validations."""
    figure = page(title, 8, 4.8)
    panel = figure.add_subplot()
    for number, (name, record) in enumerate(records.items()):
        color, steps = OTHERS[number], len(record.losses)
        reach = min(20, steps // 20)
        each = f"{name}, each step"
        if reach:
            panel.plot(range(1, steps + 1), record.losses, color=color, alpha=0.3, linewidth=0.8, label=each)
            each = f"{name}, mean of {2 * reach + 1} steps"
        line = DASHED if number else "-"
        panel.plot(range(1, steps + 1), running_means(record.losses, reach), color=color, linestyle=line, label=each)
        *earlier, last = record.validations
        shown = [one for one in earlier if last[0] - one[0] >= POINTS_APART * steps] + [
            last
        ]  # points that do not touch
        done, losses, _ = zip(*shown, strict=True)
        label = f"{name}, validation: {losses[-1]:.3f}"
        panel.plot(done, losses, "D" if number else "o", color=color, markersize=8 - 4 * number, label=label)
    ours = records[OURS].losses
    dress(panel, "step", f"cross-entropy (nats per {workload.item})", y_log=10 if min(ours) < ours[0] / 20 else 0)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.set_xlim(0, len(ours) * 1.02)
    panel.legend(frameon=False)
    return figure


def publish(out: Path, workload: Workload, world_size: int, records: dict[str, Record]) -> None:
    """Print the table; write loss.png and summary.json into `out`."""
    title = f"{workload.title}, {count(world_size, 'rank')}"
    said = summary(workload, world_size, records)
    Console().print(table(title, workload, records, said))
    save(curves(title, workload, records), out / "loss.png")
    (out / "summary.json").write_text(json.dumps(said, indent=2) + "\n")
    print(f"wrote {out / 'loss.png'} and {out / 'summary.json'}", flush=True)


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
