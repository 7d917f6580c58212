"""Reports of stragglers: which rank makes the others wait.

With a synchronous exchange, a step takes as long on every rank as on the slowest one, so no rank's own time identifies
that rank. But the exchange ends at the same time on all ranks. So the rank with the shortest wait, from its last
gradient to that end, is the one that the others waited for, and the difference of two ranks' waits is that of their
arrivals. Each rank measures its wait by its own clock, so clocks need not agree. The error is the difference between
the times at which two ranks see the end: the time of the exchange's last messages. With GPUs, their events measure the waits,
since the CPU runs ahead of its device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gradwire.collectives import Communicator
from gradwire.trainer.reducer.times import ExchangeTimes

_log = logging.getLogger("gradwire")

_TOPIC = "waits"

_WORTH_SHARE, _WORTH_S = 0.1, 0.005
"""A mean wait is logged if it is more than this share of a step and these seconds: schedulers cause shorter waits."""

_SLOWER = 1.5
"""A rank is clearly the slowest if the others wait for it more than this many times as long as for any other rank."""

_IN_A_ROW = 3
"""How many consecutive windows must agree before a change is logged: in single windows, the slowest rank is random."""

_MARGIN = 8
"""How many more exchanges each rank reports than are compared, since ranks report at slightly different times."""

_MOST_POSTED = 1000
"""How many exchanges a rank reports at most: a report is one message."""


@dataclass(frozen=True)
class Stragglers:
    """Holds how long ranks waited for each other in `steps` exchanges of gradients, up to exchange number `last`.

    A rank is ready for an exchange when it has all of its gradients. Its delay is the time from the moment when half of the
    ranks are ready to the moment when it is ready, or 0 if it is ready earlier.

    step_s: the mean seconds from one exchange to the next. cost_s, worst_s: for each rank, the mean and the maximum of its
    delay, in seconds. waited_s: for each rank i, a tuple with the mean seconds by which rank i was ready before each rank r.
    batch_shares: for each rank, the share of a batch with which all ranks would compute equally long, if they have equal shares
    now, and their own computing takes time in proportion to the samples. Their sum is 1. None if weigh() is used, since the
    ranks' batches may differ then.
    """

    steps: int
    last: int
    step_s: float
    cost_s: tuple[float, ...]
    worst_s: tuple[float, ...]
    waited_s: tuple[tuple[float, ...], ...]
    batch_shares: tuple[float, ...] | None

    @property
    def slowest(self) -> int:
        """Return the rank with the largest mean delay."""
        return max(range(len(self.cost_s)), key=self.cost_s.__getitem__)

    @property
    def is_clear(self) -> bool:
        """Return whether `matters` is True, and the others waited for the slowest rank more than 1.5 times as long as for
        any other rank."""
        return self.matters and self.cost_s[self.slowest] > _SLOWER * self.next_cost_s

    @property
    def next_cost_s(self) -> float:
        """Return the second largest mean delay."""
        return sorted(self.cost_s)[-2]

    @property
    def matters(self) -> bool:
        """Return whether the others waited for the slowest rank, on average, for more than a tenth of a step and
        more than 5 ms."""
        return self.cost_s[self.slowest] > max(_WORTH_SHARE * self.step_s, _WORTH_S)

    @property
    def share(self) -> float:
        """Return the share of a step for which the others waited for the slowest rank."""
        return self.cost_s[self.slowest] / self.step_s if self.step_s else 0.0

    def __str__(self) -> str:
        rank, advice = self.slowest, ""
        if self.batch_shares is not None:
            advice = (
                f". If all ranks have equal parts of a batch, a share of {self.batch_shares[rank]:.2f} instead of "
                f"{1 / len(self.batch_shares):.2f} makes rank {rank} equal (hvd.BatchShares)"
            )
        return (
            f"the others waited {self.cost_s[rank]:.3f} s a step for rank {rank} ({self.share:.0%} of {self.step_s:.3f} s; "
            f"at most {self.worst_s[rank]:.3f} s) in {self.steps} steps, up to exchange {self.last} of gradients{advice}"
        )


class StragglerWatch:
    """Posts this rank's waits in windows of `every` exchanges. Rank 0 logs when the same rank has delayed the others in
    several windows in a row, and when that ends. weighs: returns whether weigh() is used."""

    def __init__(
        self, communicator: Communicator, times: ExchangeTimes, every: int, weighs: Callable[[], bool]
    ) -> None:
        self._communicator = communicator
        self._times = times
        self._every = every
        self._weighs = weighs
        self._posted: int | None = None  # the number of exchanges at the last post
        self._judged = self._first = 0
        self._last: int | None = None  # the rank that delayed the others in the last window
        self._in_a_row = 0  # for how many windows in a row
        self._logged: int | None = None  # the rank that is logged as delaying the others
        self._reported: dict[int, Any] = {}  # the posts of all ranks, of which the report was made
        self._report: Stragglers | None = None
        times.keep(min(every, _MOST_POSTED) + _MARGIN)

    def after_step(self) -> None:
        """Post this rank's waits if that is due; rank 0 logs stragglers. Does not wait for other ranks."""
        if not self._times.last:
            return
        count = self._times.last[-1].number + 1
        if self._posted is None:  # the first exchange compiles kernels, and is left out
            self._posted = self._judged = self._first = count
        elif count // self._every > self._posted // self._every:
            self._posted = count
            self._communicator.post(_TOPIC, self._to_post())
        if self._communicator.rank == 0 and self._judged < self._posted:
            self._judge(self._posted)

    def report(self) -> Stragglers | None:
        """Return the report of the last exchanges that all ranks have posted; None before. It is computed once for each post."""
        posted = self._communicator.posted(_TOPIC)
        if posted != self._reported:
            self._reported, self._report = posted, self._report_of(posted)
        return self._report

    def _judge(self, count: int) -> None:
        """Judge the last window once all ranks have posted it, and log whether a rank has begun or ceased to delay the
        others. count: the number of exchanges at its end."""
        report = self.report()
        if report is None or report.last + 1 < count:
            return
        self._judged = count
        slow = report.slowest if report.matters else None
        self._in_a_row = self._in_a_row + 1 if slow == self._last else 1
        self._last = slow
        if self._in_a_row < _IN_A_ROW or slow == self._logged:
            return
        if slow is not None:
            _log.warning("gradwire: %s", report)
        else:
            _log.warning("gradwire: the others no longer wait for rank %d, as of exchange %d", self._logged, count - 1)
        self._logged = slow

    def _to_post(self) -> dict[str, Any]:
        """Return the numbers of exchanges, and for each, this rank's wait and the duration of the step in microseconds."""
        times = [each for each in self._times.last if each.number >= self._first][-_MOST_POSTED:]
        return {
            "numbers": [each.number for each in times],
            "waited": [each.waited_ns // 1000 for each in times],
            "step": [each.step_ns // 1000 for each in times],
        }

    def _report_of(self, posted: dict[int, Any]) -> Stragglers | None:
        """Return the report of the last exchanges that all ranks have posted; None without one."""
        if len(posted) < self._communicator.size:
            return None
        numbers = set.intersection(*(set(body["numbers"]) for body in posted.values()))
        compared = sorted(numbers)[-self._every :]
        if not compared:
            return None
        found = []
        for key in ("waited", "step"):
            by_number = [dict(zip(posted[rank]["numbers"], posted[rank][key], strict=True)) for rank in sorted(posted)]
            found.append(np.array([[values[number] for number in compared] for values in by_number]) / 1e6)
        report = stragglers_of(compared[-1], found[0], found[1])
        return replace(report, batch_shares=None) if self._weighs() else report


def stragglers_of(last: int, waited: npt.NDArray[np.float64], step: npt.NDArray[np.float64]) -> Stragglers:
    """Return the report of exchanges up to number `last`. waited: the seconds that each rank waited, (ranks,
    exchanges). step: the seconds between exchanges, of any shape."""
    ahead = np.clip(waited[:, None, :] - waited[None, :, :], 0, None).mean(axis=2)
    late = lateness(waited)
    speeds = 1 / np.maximum(step.mean() - waited.mean(axis=1), 1e-9)  # steps last equally long on all ranks
    return Stragglers(
        steps=waited.shape[1],
        last=last,
        step_s=float(step.mean()),
        cost_s=tuple(late.mean(axis=1).tolist()),
        worst_s=tuple(late.max(axis=1).tolist()),
        waited_s=tuple(tuple(row) for row in ahead.tolist()),
        batch_shares=tuple((speeds / speeds.sum()).tolist()),
    )


def lateness(waited: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return by how many seconds each rank was later than the first half of the ranks, (ranks, exchanges)."""
    half = np.sort(waited, axis=0)[waited.shape[0] // 2]
    late: npt.NDArray[np.float64] = np.clip(half - waited, 0, None)
    return late
