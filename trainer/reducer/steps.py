"""The time of training steps, measured alike on all ranks."""

from __future__ import annotations

import time
from statistics import median
from typing import NamedTuple

from gradwire.collectives import Communicator

SKIPPED = 2
"""The number of steps after the one with a change that are not timed, since they touch new memory and make plans."""


class Measured(NamedTuple):
    """Seconds, the same on all ranks. steps: of each step, on its slowest rank. part: the median of a part of the steps, on the
    rank with the lowest median."""

    steps: list[float]
    part: float


class StepTimer:
    """Measures the steps after a change. counted: the number of exchanges that are timed. step: the last one recorded."""

    def __init__(self, communicator: Communicator, counted: int) -> None:
        self._communicator, self._counted = communicator, counted
        self.step, self._now_s = -1, 0.0
        self.restart(0)

    def restart(self, step: int) -> None:
        """Measure the steps after this one, which is the first with a change."""
        self._due = step + SKIPPED + self._counted
        self._measured: list[tuple[float, float]] = []

    def record(self, step: int, part_s: float, *, counts: bool = True) -> Measured | None:
        """Record a step that has ended, and the seconds of a part of it. Return None while there are too few. Collective in the
        step that ends the measurement.

        step: the number of earlier exchanges. If there were several since the last call, as with a closure or after a step that
        was left out, their mean counts. counts: False on a rank that has joined, whose steps are not measured."""
        now_s = time.perf_counter()
        exchanges, elapsed_s = step - self.step, now_s - self._now_s
        self.step, self._now_s = step, now_s
        if counts and exchanges > 0 and step > self._due - self._counted:
            self._measured.append((elapsed_s / exchanges, part_s))
        if step < self._due:
            return None
        everyones = self._communicator.allgather_record([list(column) for column in zip(*self._measured, strict=True)])
        # Ranks that have joined have measured fewer steps, or none.
        lengths = [len(columns[0]) if columns else 0 for columns in everyones]
        if not any(lengths):
            self.restart(step)
            return None
        whole = [columns for columns, length in zip(everyones, lengths, strict=True) if length == max(lengths)]
        steps, parts = zip(*whole, strict=True)
        return Measured([max(each) for each in zip(*steps, strict=True)], min(map(median, parts)))
