"""Plans of an exchange without codecs: how large buckets are, and when they are exchanged; and the choice among them by measured
steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.collectives import Communicator
from gradwire.trainer.reducer.layout import LARGE_BUCKET_BYTES, SMALL_BUCKET_BYTES
from gradwire.trainer.reducer.steps import StepTimer

ALL = 1 << 62
"""The maximum bytes of a bucket that holds all gradients of its kind."""

_LEAST_GAIN = 0.01
"""A plan replaces the usual one if steps take less time by more than this share, and by more than two measurements of the usual
one differ."""

_log = logging.getLogger("gradwire")


@dataclass(frozen=True)
class Plan:
    """How gradients on the CPU that no codec encodes are exchanged.

    bucket_bytes: the maximum size of a bucket. at_end: whether all buckets are exchanged when backward() has ended, in the thread
    that called it. Otherwise each one is exchanged as soon as it is full, beside backward().
    """

    bucket_bytes: int = SMALL_BUCKET_BYTES
    at_end: bool = False

    def __str__(self) -> str:
        size = "one bucket" if self.bucket_bytes == ALL else f"buckets of {self.bucket_bytes / (1 << 20):.3g} MB"
        return f"{size} {'after' if self.at_end else 'beside'} backward()"


USUAL = Plan()


def rivals(nbytes: int) -> list[Plan]:
    """Return the plans that may be better than the usual one for gradients of so many bytes in sum."""
    if nbytes <= SMALL_BUCKET_BYTES // 4:  # one bucket
        return []
    plans = [Plan(ALL, at_end=True), Plan(SMALL_BUCKET_BYTES // 4)]
    if nbytes > SMALL_BUCKET_BYTES:
        plans.append(Plan(SMALL_BUCKET_BYTES, at_end=True))
    if nbytes > LARGE_BUCKET_BYTES:
        plans.append(Plan(LARGE_BUCKET_BYTES))
    return plans


class PlanTrials:
    """Tries plans for ten steps each (steps.WINDOW), and keeps the one with the fastest steps, the same on all ranks.

    Overlap with backward() pays where the wire is slow, and costs where the ranks fill the cores of their host: which of both
    it is depends on the model, the machine and what else runs there. The usual plan is measured before and after the others, so
    that noise does not choose.

    Attribute plan: the plan of the next steps. settled: whether it stays.
    """

    def __init__(self, communicator: Communicator, plans: Sequence[Plan]) -> None:
        self.plan = USUAL
        self.settled = not plans
        self._communicator = communicator
        self._waiting = [*plans, USUAL]
        self._timer = StepTimer(communicator)
        self._layout: object = None
        self._taken: list[tuple[Plan, float]] = []

    def follow(self, layout: object, step: int, *, counts: bool = True) -> bool:
        """Record a step, and return whether the plan has changed, so that buckets must be laid out anew. Collective in the steps
        that end a measurement. layout: in which the gradients of the step were exchanged. step: the number of earlier exchanges.
        counts: False on a rank that has joined, whose steps are not measured."""
        if self.settled or step == self._timer.step:
            return False
        if layout is not self._layout:
            self._layout = layout
            self._timer.restart(step)
        if (found := self._timer.record(step, counts=counts)) is None:
            return False
        self._taken.append((self.plan, found[0]))
        before, self._layout = self.plan, None
        self.plan = self._waiting.pop(0) if self._waiting else self._best()
        return self.plan != before

    def _best(self) -> Plan:
        """End the trials. Return the plan that stays, and log the times."""
        self.settled = True
        usual = [seconds for plan, seconds in self._taken if plan == USUAL]
        noise_s = max(_LEAST_GAIN * min(usual), max(usual) - min(usual))
        plan, seconds = min(self._taken, key=lambda taken: taken[1])
        best = plan if seconds < min(usual) - noise_s else USUAL
        if self._communicator.rank == 0:
            taken = "; ".join(f"{1e3 * seconds:.3g} ms with {plan}" for plan, seconds in self._taken)
            _log.info("gradwire: gradients are exchanged in %s from now on: a step takes %s", best, taken)
        return best
