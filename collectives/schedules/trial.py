"""Try other choices after a wrong prediction, in calls that training makes anyway."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

#: The number of first calls that are not timed, since they touch new memory and make plans, and the number of calls that are
#: timed.
SKIPPED, COUNTED = 2, 7

#: A short call is repeated in a row of so many predicted seconds, with at most so many repetitions, and the mean of the row
#: counts. A single short call takes mostly wake-ups, which differ from call to call and hide how algorithms differ.
_ROW_S, REPETITIONS = 0.004, 16

#: A prediction with a relative error of at most this is not corrected, unless a rival's prediction exceeds the measured time by
#: no more than this share.
CLOSE = 0.1

#: The maximum number of rivals, of long and of short calls, and the maximum of a rival's predicted time, as a multiple of the
#: choice's measured time.
_RIVALS, _SHORT_RIVALS, HOPELESS = 2, 4, 2.0

#: A rival replaces the choice if its calls take less than this share of the choice's time, so that the selection among nearly
#: equal choices does not change from run to run.
_BETTER = 0.95

#: Short calls of two choices take nearly equally long if their times differ by less than this factor. The times of short calls
#: vary so much that the fastest of several nearly equal choices may only have been lucky.
_NEAR = 1.25


class Trial:
    """Tries choices for calls of one size, the same on all ranks.

    If the calls of the first choice take as long as predicted, and each rival is predicted to take longer, the first choice
    stays. Otherwise the next calls alternate between it and the rivals with the best predictions, since other load on a network
    or a host changes with time. A rival replaces the first choice if it is faster. For short calls, if others were nearly as
    fast as this rival, the first choice and all of these are tried once more before.

    ranked: the choices with their predicted seconds, the fastest first. choice: the one that the next call uses. call: the name
    of these calls in the log, such as "allreduce of 4096 bytes". settled: whether the choice is final. repetitions: how many
    times a call is repeated to be timed; 0 if the call itself is timed. All ranks make the same calls, so they proceed after
    the same call.
    """

    def __init__(self, ranked: Sequence[tuple[float, str]], choice: str, call: str = "") -> None:
        self.choice = choice
        self._call = call
        self.settled = len(ranked) < 2
        repetitions = min(REPETITIONS, int(_ROW_S / max(1e-9, ranked[0][0])))
        self.repetitions = repetitions if repetitions > 1 else 0
        self._ranked = ranked
        self._tried = [choice]
        self._is_repeated = False
        self._calls: list[float] = []

    def note(self, seconds: float) -> list[float] | None:
        """Record the seconds of a call on this rank. After the last call of a measurement, return the median of each choice
        that was tried, for judge()."""
        if self.settled:
            return None
        self._calls.append(seconds)
        number = len(self._tried)
        self.choice = self._tried[self._place(len(self._calls))]
        if len(self._calls) < (SKIPPED + COUNTED) * number:
            return None
        taken: list[list[float]] = [[] for _ in self._tried]
        for call, each in enumerate(self._calls):
            if call >= SKIPPED * number:
                taken[self._place(call)].append(each)
        self._calls = []
        return [*map(median, taken)]

    def _place(self, call: int) -> int:
        """Return the index of the choice that a call uses. Each round of calls begins with the next choice. Otherwise all calls
        for one bucket, which overlap with the same computation in each step, could use the same choice."""
        return (call + call // len(self._tried)) % len(self._tried)

    def stop(self) -> None:
        """Keep the first choice if the trial is not settled."""
        if not self.settled:
            self.choice, self.settled = self._tried[0], True

    def judge(self, seconds: Sequence[float]) -> str:
        """Proceed after a measurement, and return its result as a text for the log.

        seconds: for each choice that was tried, the largest of the ranks' medians.
        """
        first, first_s = self._tried[0], seconds[0]
        predicted = {name: expected for expected, name in self._ranked}
        taken = dict(zip(self._tried, seconds, strict=True))
        said = f"{self._call}: " + ", ".join(
            f"{name} takes {1e3 * each:.3g} ms ({1e3 * predicted[name]:.3g} predicted)" for name, each in taken.items()
        )
        if len(taken) == 1:
            is_close = abs(first_s - predicted[first]) <= CLOSE * predicted[first]
            most_s = (1 + CLOSE if is_close else HOPELESS) * first_s
            rivals = [name for expected, name in self._ranked if expected <= most_s and name != first]
            if rivals:
                self._tried += rivals[: _SHORT_RIVALS if self.repetitions else _RIVALS]
                return f"{said}; now in turns: {', '.join(self._tried)}"
        least_s, fastest = min((each, name) for name, each in taken.items())
        near = [name for name, each in taken.items() if each < _NEAR * least_s]
        is_replaced = least_s < _BETTER * first_s
        if is_replaced and self.repetitions and len(near) > 1 and not self._is_repeated:
            self._is_repeated = True
            self._tried = [first, *(name for name in near if name != first)]
            self.choice = first
            return f"{said}; again in turns: {', '.join(self._tried)}"
        self.choice = fastest if is_replaced else first
        self.settled = True
        return f"{said}; {self.choice} stays"
