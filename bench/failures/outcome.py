"""Finds steps, losses, kills and outages of a run in the log of its steps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from gradwire.bench.failures.kills import Kill
from gradwire.bench.failures.ways import UNDISTURBED

BLOCK_STEPS = 50
"""Over how many steps losses are averaged."""
_POINTS = 240
_HANG_S = 120.0
"""For how long a run gets no further, which then counts as a hang."""


@dataclass
class Run:
    """Holds what one way came to.

    exit_status: None where the job did not end. goodput: steps over those of the undisturbed run. loss: the mean of the last
    whole block of steps. loss_over: that, over the mean of the same steps of the undisturbed run, less 1. outages_s: after each
    kill, the time to the next step that was not reached before. reached: the last step that was reached, at equal intervals of
    time from the beginning of the run to its end. losses: the means of all blocks of steps.
    """

    way: str
    exit_status: int | None
    hangs: int = 0
    steps: int = 0
    goodput: float | None = None
    loss: float | None = None
    loss_over: float | None = None
    kills: list[Kill] = field(default_factory=list)
    outages_s: list[float] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Run:
        """Return what asdict() made a record of."""
        return cls(**{**record, "kills": [Kill(**kill) for kill in record["kills"]]})


def described(way: str, status: int | None, log: Path, began: float, seconds: float, kills: Sequence[Kill]) -> Run:
    """Return a run of so many seconds by its log. began: time.time() seconds."""
    losses: dict[int, float] = {}
    progress = [(0.0, 0)]  # when each step was reached first
    lines = log.read_text().splitlines() if log.exists() else []
    for text in lines:
        with suppress(json.JSONDecodeError):  # of a rank that was killed while it wrote
            record = json.loads(text)
            losses[record["step"]] = record["loss"]
            if record["step"] > progress[-1][1]:
                progress.append((record["time"] - began, record["step"]))
    found = Run(way, status, kills=list(kills), steps=progress[-1][1])
    times = [at for at, _ in progress] + [seconds]
    gaps = [after - before for before, after in pairwise(times)]
    found.hangs = sum(gap > _HANG_S for gap in gaps) + (status is None)
    for kill in kills:
        before = max(step for at, step in progress if at <= kill.at_s)
        # The step after that may have been exchanged already when the rank was killed.
        after = next((at for at, step in progress if at > kill.at_s and step > before + 1), None)
        if after is not None:
            found.outages_s.append(after - kill.at_s)
    for point in range(_POINTS + 1):
        found.reached.append(max(step for at, step in progress if at <= seconds * point / _POINTS))
    for first in range(1, found.steps - BLOCK_STEPS + 2, BLOCK_STEPS):
        block = [losses[step] for step in range(first, first + BLOCK_STEPS) if step in losses]
        found.losses.append(sum(block) / len(block))
    return found


def compare(runs: Sequence[Run]) -> None:
    """Set goodput and losses of runs beside those of the undisturbed one, where there is one."""
    undisturbed = next((run for run in runs if run.way == UNDISTURBED), None)
    for run in runs:
        run.loss = run.losses[-1] if run.losses else None
        if undisturbed is not None and undisturbed.steps:
            run.goodput = run.steps / undisturbed.steps
            if 0 < len(run.losses) <= len(undisturbed.losses):
                run.loss_over = run.losses[-1] / undisturbed.losses[len(run.losses) - 1] - 1


def line(run: Run) -> str:
    """Return what is printed of a run."""
    hosts, firsts = sum(kill.of_host for kill in run.kills), sum(kill.of_rank_0 for kill in run.kills)
    said = [
        f"{run.way:12} exit {run.exit_status}",
        f"{run.hangs} hangs",
        f"{len(run.kills)} kills ({hosts} of hosts, {firsts} with rank 0)",
        f"{run.steps} steps",
        "goodput -" if run.goodput is None else f"goodput {run.goodput:.3f}",
        "loss -" if run.loss is None else f"loss {run.loss:.4f}",
        "" if run.loss_over is None else f"{run.loss_over:+.2%} at the same steps",
        f"outage {median(run.outages_s):.2f} s median, {max(run.outages_s):.2f} s worst" if run.outages_s else "",
    ]
    return "  ".join(filter(None, said))
