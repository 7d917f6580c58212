"""The time of training steps, measured alike on all ranks."""

from __future__ import annotations

import time
from statistics import median

from gradwire.collectives import Communicator

SKIPPED, COUNTED = 2, 7
"""The number of first steps after a change that are not timed, since they touch new memory and make plans, and of steps that are
timed."""

WINDOW = 1 + SKIPPED + COUNTED
"""Steps from one change to the next."""


class StepTimer:
    """Measures the steps that follow restart(). step: the last one that was recorded."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.step, self._now_s = -1, 0.0
        self.restart(0)

    def restart(self, step: int) -> None:
        """Measure the steps after this one, which is the first with a change."""
        self._due = step + SKIPPED + COUNTED
        self._measured: list[tuple[float, float]] = []

    def record(self, step: int, exchange_s: float = 0.0, *, counts: bool = True) -> tuple[float, float] | None:
        """Record the step that has ended, by its number. Return the seconds of a step on the slowest rank and those of the
        exchanges on the rank that began them last, which does not wait: medians, the same on all ranks. None while there are too
        few steps. Collective in the step that ends the measurement.

        exchange_s: seconds of the exchanges on this rank. counts: False on a rank that has joined, whose steps are not
        measured."""
        now_s = time.perf_counter()
        step_s, self.step, self._now_s = now_s - self._now_s, step, now_s
        if counts and step > self._due - COUNTED:
            self._measured.append((step_s, exchange_s))
        if step < self._due:
            return None
        mine = [median(column) for column in zip(*self._measured, strict=True)]  # empty if this rank has joined
        steps, exchanges = zip(*filter(None, self._communicator.allgather_record(mine)), strict=True)
        return max(steps), min(exchanges)
