"""The time of a rank's own computing in each step, without its waits for other ranks, by the number of samples."""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median

from gradwire.trainer.reducer.times import ExchangeTimes

_SKIPPED = 3
"""The number of first steps that are not measured, since they compile kernels and touch new memory."""

_COUNTED = 3
"""How many measured steps with the same number of samples are needed for their median to count."""

_MOST_EXCHANGES = 32
"""How many exchanges of gradients a step can have for its time to be known."""


class OwnTimes:
    """Measures this rank's steps, each from the end of one exchange of gradients until its gradients are ready for the next. A
    step with several exchanges counts as their sum. times: those of the exchanges."""

    def __init__(self, times: ExchangeTimes) -> None:
        times.keep(_MOST_EXCHANGES)
        self._times = times
        self._exchanges = times.count
        self._steps = 0
        # The exchanges of each step whose time is not known yet: the first, and the one after the last; and its samples.
        self._pending: deque[tuple[int, int, int]] = deque()
        self._seconds: dict[int, list[float]] = defaultdict(list)

    def record(self, samples: int) -> None:
        """Record that a step has ended. samples: those of each of its batches; 0 if unknown."""
        self._steps += 1
        begin, self._exchanges = self._exchanges, self._times.count
        self._pending.append((begin, self._exchanges, samples if self._steps > _SKIPPED else 0))
        own_ns = {each.number: each.step_ns - each.waited_ns for each in self._times.last}
        while self._pending and own_ns and self._pending[0][1] <= max(own_ns) + 1:  # a GPU measures them later
            begin, end, counted = self._pending.popleft()
            numbers = range(begin, end)
            if counted and numbers and all(number in own_ns for number in numbers):
                self._seconds[counted].append(max(1e-9, 1e-9 * sum(own_ns[number] for number in numbers)))

    def medians(self) -> dict[int, float]:
        """Return the median seconds of the steps since the last call that returned any, by the number of samples."""
        found = {samples: median(each) for samples, each in self._seconds.items() if len(each) >= _COUNTED}
        if found:
            self._seconds.clear()
        return found
