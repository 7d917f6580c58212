"""The time of training steps, measured alike on all ranks."""

from __future__ import annotations

import time
from typing import NamedTuple

from gradwire.collectives import Communicator

SKIPPED = 2
"""The number of first steps after a change that are not timed, since they touch new memory and make plans."""


class Measured(NamedTuple):
    """Seconds, the same on all ranks. steps: of each step, on its slowest rank. least: the median of the other number that the
    ranks gave, on the rank with the lowest median."""

    steps: list[float]
    least: float


class StepTimer:
    """Measures the steps after a change. counted: the number of steps that are timed. step: the last one that was recorded."""

    def __init__(self, communicator: Communicator, counted: int) -> None:
        self._communicator, self._counted = communicator, counted
        self.step, self._now_s = -1, 0.0
        self.restart(0)

    def restart(self, step: int) -> None:
        """Measure the steps after this one, which is the first with a change."""
        self._due = step + SKIPPED + self._counted
        self._measured: list[tuple[float, float]] = []

    def record(self, step: int, other: float, *, counts: bool = True) -> Measured | None:
        """Record the step that has ended, by its number, and another number of it. Return None while there are too few steps.
        Collective in the step that ends the measurement. counts: False on a rank that has joined, whose steps are not
        measured."""
        now_s = time.perf_counter()
        step_s, self.step, self._now_s = now_s - self._now_s, step, now_s
        if counts and step > self._due - self._counted:
            self._measured.append((step_s, other))
        if step < self._due:
            return None
        mine = [list(column) for column in zip(*self._measured, strict=True)]
        everyones = self._communicator.allgather_record(mine)
        # Ranks that have joined have measured fewer steps, or none.
        whole = [columns for columns in everyones if columns and len(columns[0]) == self._counted]
        steps, others = zip(*whole, strict=True)
        return Measured([max(each) for each in zip(*steps, strict=True)], min(map(_middle, others)))


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
