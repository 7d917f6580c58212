"""Divide the samples of a batch among ranks by the measured time of their steps."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_SPREAD = 1.25
"""A line is fitted only if the largest measured batch is this many times the smallest: else noise decides the slope."""

_CHANGED = 0.1
"""A rank has changed if a step takes longer or shorter than its former steps predict by this share."""

_KEPT = 4
"""The number of different batch sizes whose times are kept for each rank."""

WORTH = 0.03
"""New parts must shorten the step of the slowest rank by more than this share."""


class Cost(NamedTuple):
    """The seconds of a step on a rank: `fixed`, and `per_sample` for each sample of its part of the batch."""

    fixed: float
    per_sample: float

    def seconds(self, samples: int) -> float:
        """Return the seconds of a step with so many samples."""
        return self.fixed + self.per_sample * samples


def check_bounds(samples: int, ranks: int, least: int, most: int | None) -> None:
    """Raise ValueError unless so many samples can be divided among the ranks with at least `least` and at most `most` each."""
    if samples < least * ranks:
        raise ValueError(f"{samples} samples are too few for {ranks} ranks with at least {least} samples each")
    if most is not None and samples > most * ranks:
        raise ValueError(f"{samples} samples are too many for {ranks} ranks with at most {most} samples each")


def divide(samples: int, costs: Sequence[Cost], least: int = 1, most: int | None = None) -> list[int]:
    """Return how many samples each rank gets, so that the slowest rank's step is as short as possible.

    The parts are whole numbers from `least` to `most`, and their sum is `samples`. Among equally short steps, ranks with fewer
    samples get more. Raises ValueError if no division is within the bounds.
    """
    check_bounds(samples, len(costs), least, most)
    limit = samples if most is None else most

    def within(seconds: float) -> list[int]:
        """Return how many samples each rank can take in so many seconds, within the bounds."""
        fitting = (min(float(limit), (seconds - cost.fixed) / cost.per_sample) for cost in costs)
        return [max(least, int(each)) for each in fitting]

    low, high = 0.0, max(cost.seconds(samples) for cost in costs)
    for _ in range(60):  # bisection; the loop below does the rest
        middle = (low + high) / 2
        low, high = (middle, high) if sum(within(middle)) <= samples else (low, middle)
    parts = within(low)
    queue = [(cost.seconds(part + 1), part, rank) for rank, (cost, part) in enumerate(zip(costs, parts, strict=True))]
    queue = [entry for entry in queue if entry[1] < limit]
    heapq.heapify(queue)
    for _ in range(samples - sum(parts)):
        _, part, rank = heapq.heappop(queue)
        parts[rank] = part + 1
        if part + 1 < limit:
            heapq.heappush(queue, (costs[rank].seconds(part + 2), part + 1, rank))
    return parts


def better(parts: Sequence[int], costs: Sequence[Cost], least: int, most: int | None) -> list[int] | None:
    """Return new parts of a batch; None unless they shorten the predicted step of the slowest rank by more than WORTH."""
    found = divide(sum(parts), costs, least, most)
    before, after = (max(cost.seconds(part) for cost, part in zip(costs, each, strict=True)) for each in (parts, found))
    return found if after < (1 - WORTH) * before else None


class Speed:
    """Predicts the time of a rank's step from measured ones."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # by the number of samples, the last measured ones last

    @property
    def cost(self) -> Cost | None:
        """Return the rank's Cost; None before its first measurement.

        With sufficiently different numbers of samples, it is a least-squares line. Otherwise, or if noise or a change of the
        rank's speed makes such a line impossible, it is proportional to the samples of the last measurement."""
        if not self._seconds:
            return None
        if (line := self._line()) is not None:
            return line
        samples, seconds = next(reversed(self._seconds.items()))
        return Cost(0.0, seconds / samples)

    def measured(self, seconds: Mapping[int, float]) -> None:
        """Add the measured seconds of steps, by their number of samples. Forget the former ones if the rank has changed."""
        for samples, taken in seconds.items():
            line = self._line()
            former = self._seconds.get(samples, None if line is None else line.seconds(samples))
            if former is not None and abs(taken - former) > _CHANGED * former:
                self._seconds.clear()
            self._seconds.pop(samples, None)
            self._seconds[samples] = taken
        while len(self._seconds) > _KEPT:
            self._seconds.pop(next(iter(self._seconds)))

    def _line(self) -> Cost | None:
        """Return the least-squares line of seconds over samples; None if it is not a possible Cost."""
        if not self._seconds or max(self._seconds) < _SPREAD * min(self._seconds):
            return None
        mean_samples = sum(self._seconds) / len(self._seconds)
        mean_s = sum(self._seconds.values()) / len(self._seconds)
        spread = sum((samples - mean_samples) ** 2 for samples in self._seconds)
        slope = sum((samples - mean_samples) * (taken - mean_s) for samples, taken in self._seconds.items()) / spread
        fixed = mean_s - slope * mean_samples
        return Cost(fixed, slope) if slope > 0 and fixed >= 0 else None
