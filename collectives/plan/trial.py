"""A trial of other choices, in calls that training makes anyway, after a wrong prediction."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

#: Calls after a change that are not timed, since they touch memory and make plans, and calls that are timed.
SKIPPED, COUNTED = 2, 7

#: A prediction with a relative error of at most this is not corrected.
_CLOSE = 0.1

#: How many rivals are tried; a rival's predicted time may be at most this multiple of the choice's measured time.
_RIVALS, _HOPELESS = 2, 2.0

#: A rival replaces the choice if its calls take less than this share of the choice's time: near equals must not change from run
#: to run.
_BETTER = 0.95


class Trial:
    """Tries choices for calls of one size, the same on all ranks.

    If the calls of the first choice take as long as predicted, it stays. Otherwise the rivals with the best predictions are tried
    for some calls each, and the fastest stays.

    ranked: the choices with their predicted seconds, the fastest first. choice: what the next call uses; one of them. call: the
    name of these calls in the log, such as "allreduce of 4096 bytes". settled: whether the choice stays. All ranks make the
    same calls, so each goes on after the same call.
    """

    def __init__(self, ranked: Sequence[tuple[float, str]], choice: str, call: str = "") -> None:
        self.choice = choice
        self._call = call
        self.settled = len(ranked) < 2
        self._ranked = ranked
        self._rivals: list[str] | None = None  # None before the first choice was measured
        self._calls: list[float] = []
        self._taken: list[tuple[float, str]] = []

    def note(self, seconds: float) -> float | None:
        """Note the seconds of a call on this rank. After the last call of a measurement, return their median, for judge()."""
        if self.settled:
            return None
        self._calls.append(seconds)
        if len(self._calls) < SKIPPED + COUNTED:
            return None
        taken, self._calls = median(self._calls[SKIPPED:]), []
        return taken

    def judge(self, seconds: float) -> str:
        """Go on after a measurement, and return the outcome as text.

        seconds: the least of the ranks' medians. The rank that begins last waits for no other, so its time is that of the
        exchange alone.
        """
        self._taken.append((seconds, self.choice))
        if self._rivals is None:
            predicted = next(expected for expected, name in self._ranked if name == self.choice)
            is_off = abs(seconds - predicted) > _CLOSE * predicted
            others = [
                name for expected, name in self._ranked if expected <= _HOPELESS * seconds and name != self.choice
            ]
            self._rivals = others[:_RIVALS] if is_off else []
        if self._rivals:
            self.choice = self._rivals.pop(0)
            return f"{self._outcome()}; {self.choice} is tried"
        (first_s, first), (least_s, fastest) = self._taken[0], min(self._taken)
        self.choice = fastest if least_s < _BETTER * first_s else first
        self.settled = True
        return f"{self._outcome()}; {self.choice} stays"

    def _outcome(self) -> str:
        predicted = {name: seconds for seconds, name in self._ranked}
        taken = (f"{name} takes {1e3 * s:.3g} ms ({1e3 * predicted[name]:.3g} predicted)" for s, name in self._taken)
        return f"{self._call}: {', '.join(taken)}"
