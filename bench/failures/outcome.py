"""Finds the steps, losses, hangs and outages of a run in the log of its steps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from gradwire.bench.failures.kills import KillRecord
from gradwire.bench.failures.ways import UNDISTURBED

BLOCK_STEPS = 50
"""The number of steps over which losses are averaged."""
_POINTS = 240
_HANG_S = 120.0
"""If no new step ends for longer than this, the run hangs."""


@dataclass
class Outcome:
    """Holds the results of one way to survive failures.

    exit_status: None if the job did not end. goodput: steps over those of the undisturbed run. losses: the means of all
    whole blocks of BLOCK_STEPS steps. loss: the last of them. loss_over: loss over that of the same steps of the
    undisturbed run, less 1. outages_s: after each kill, the time to the second step that was not reached before.
    reached: the last step that was reached, at equal intervals of time from the start of the run to its end.
    """

    way: str
    exit_status: int | None
    hangs: int = 0
    steps: int = 0
    goodput: float | None = None
    loss: float | None = None
    loss_over: float | None = None
    kills: list[KillRecord] = field(default_factory=list)
    outages_s: list[float] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Outcome:
        """Return the run of which asdict() has made a record."""
        return cls(**{**record, "kills": [KillRecord(**kill) for kill in record["kills"]]})


def described(
    way: str, status: int | None, log: Path, began: float, seconds: float, kills: Sequence[KillRecord]
) -> Outcome:
    """Return the results of a run from its log. began: its start, as time.time(). seconds: its length."""
    losses: dict[int, float] = {}
    progress = [(0.0, 0)]  # the seconds at which each step was first reached
    lines = log.read_text().splitlines() if log.exists() else []
    for text in lines:
        with suppress(json.JSONDecodeError):  # the rank was killed while it wrote the line
            record = json.loads(text)
            losses[record["step"]] = record["loss"]
            if record["step"] > progress[-1][1]:
                progress.append((record["time"] - began, record["step"]))
    found = Outcome(way, status, kills=list(kills), steps=progress[-1][1])
    times = [at for at, _ in progress] + [seconds]
    gaps = [after - before for before, after in pairwise(times)]
    found.hangs = sum(gap > _HANG_S for gap in gaps) + (status is None)
    for kill in kills:
        before = max(step for at, step in progress if at <= kill.at_s)
        # The next step does not count: it may have been exchanged already when the rank was killed.
        after = next((at for at, step in progress if at > kill.at_s and step > before + 1), None)
        if after is not None:
            found.outages_s.append(after - kill.at_s)
    for point in range(_POINTS + 1):
        found.reached.append(max(step for at, step in progress if at <= seconds * point / _POINTS))
    for first in range(1, found.steps - BLOCK_STEPS + 2, BLOCK_STEPS):
        block = [losses[step] for step in range(first, first + BLOCK_STEPS) if step in losses]
        found.losses.append(sum(block) / len(block))
    return found


def compare(runs: Sequence[Outcome]) -> None:
    """Set loss of all runs, and goodput and loss_over, relative to the undisturbed run if there is one."""
    undisturbed = next((run for run in runs if run.way == UNDISTURBED), None)
    for run in runs:
        run.loss = run.losses[-1] if run.losses else None
        if undisturbed is not None and undisturbed.steps:
            run.goodput = run.steps / undisturbed.steps
            if 0 < len(run.losses) <= len(undisturbed.losses):
                run.loss_over = run.losses[-1] / undisturbed.losses[len(run.losses) - 1] - 1


def line(run: Outcome) -> str:
    """Return the line that is printed for a run."""
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
