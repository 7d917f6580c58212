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

USEFUL = 0.01
"""Parts that shorten the step of the slowest rank by less than this share, compared with equal parts, are of no use."""

_FLAT = 1e-6
"""The share of a step that each sample takes if the measured steps do not get shorter with fewer samples."""


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
        raise ValueError(f"global_batch must be at least {least * ranks} (least={least}, {ranks} ranks), not {samples}")
    if most is not None and samples > most * ranks:
        raise ValueError(f"global_batch must be at most {most * ranks} (most={most}, {ranks} ranks), not {samples}")


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
    """Return new parts of a batch, or None to keep them.

    New parts shorten the predicted step of the slowest rank by more than WORTH. If there are none, and the present parts are not
    USEFUL, the new parts are equal ones."""
    found = divide(sum(parts), costs, least, most)
    equal = equal_parts(sum(parts), len(parts), least, most)
    now_s, found_s, equal_s = (slowest_s(each, costs) for each in (parts, found, equal))
    if found_s < (1 - WORTH) * now_s:
        return found
    return equal if list(parts) != equal and now_s > (1 - USEFUL) * equal_s else None


def equal_parts(samples: int, ranks: int, least: int = 1, most: int | None = None) -> list[int]:
    """Return the parts of a batch among ranks that are equally fast."""
    return divide(samples, [Cost(0.0, 1.0)] * ranks, least, most)


def slowest_s(parts: Sequence[int], costs: Sequence[Cost]) -> float:
    """Return the seconds of a step of the slowest rank."""
    return max(map(Cost.seconds, costs, parts))


def change_text(parts: Sequence[int], found: Sequence[int], costs: Sequence[Cost]) -> str:
    """Return from which parts of a batch to which better() changes them, and why."""
    now_s, then_s = slowest_s(parts, costs), slowest_s(found, costs)
    why = "" if then_s < (1 - WORTH) * now_s else "different parts do not help, and with equal ones "
    why += f"a step of the slowest rank is predicted to take {1e3 * then_s:.3g} ms instead of {1e3 * now_s:.3g} ms"
    return f"from {parts} to {found} samples ({why})"


class Speed:
    """Predicts the time of a rank's step from measured ones."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # by the number of samples, the last measured ones last
        self._shape = Cost(0.0, 1.0)  # a multiple of this is the Cost of a rank with one measurement

    @property
    def cost(self) -> Cost | None:
        """Return the rank's Cost; None before its first measurement.

        With sufficiently different numbers of samples, it is a least-squares line. If that would fall, more samples take
        no longer. If it would be negative for no samples, steps are proportional to the samples. The step with the last measured
        number of samples has its measured time then. Otherwise, steps are proportional to the samples at first, and after a
        change of the rank's speed to the steps before."""
        if not self._seconds:
            return None
        if (line := self._line()) is not None:
            return line
        return self._scaled(self._shape)

    def measured(self, seconds: Mapping[int, float]) -> None:
        """Add the measured seconds of steps, by their number of samples. If the rank has changed since it was measured with as
        many samples, forget that measurement and the older ones."""
        for samples, taken in seconds.items():
            former = self._seconds.get(samples)
            if former is not None and abs(taken - former) > _CHANGED * former:
                self._shape = self._line() or self._shape
                while samples in self._seconds:
                    self._seconds.pop(next(iter(self._seconds)))
            self._seconds.pop(samples, None)
            self._seconds[samples] = taken
        while len(self._seconds) > _KEPT:
            self._seconds.pop(next(iter(self._seconds)))

    def _line(self) -> Cost | None:
        """Return the Cost by measurements of sufficiently different numbers of samples; None without them."""
        if not self._seconds or max(self._seconds) < _SPREAD * min(self._seconds):
            return None
        mean_samples = sum(self._seconds) / len(self._seconds)
        mean_s = sum(self._seconds.values()) / len(self._seconds)
        spread = sum((samples - mean_samples) ** 2 for samples in self._seconds)
        slope = sum((samples - mean_samples) * (taken - mean_s) for samples, taken in self._seconds.items()) / spread
        fixed = mean_s - slope * mean_samples
        if slope <= 0:
            return self._scaled(Cost(1.0, _FLAT))
        return Cost(fixed, slope) if fixed >= 0 else self._scaled(Cost(0.0, 1.0))

    def _scaled(self, shape: Cost) -> Cost:
        """Return the multiple of a Cost that is right for the last measured step."""
        samples, taken = next(reversed(self._seconds.items()))
        factor = taken / shape.seconds(samples)
        return Cost(shape.fixed * factor, shape.per_sample * factor)
