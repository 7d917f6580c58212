"""The choice of an exchange's plan by the time of training steps, and the file that stores it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, Generic, TypeVar

from torch import Tensor

from gradwire.collectives import Communicator
from gradwire.trainer.reducer.compression import Cast, Encoding
from gradwire.trainer.reducer.plans import USUAL, ExchangePlan, rivals
from gradwire.trainer.reducer.setup import Setup
from gradwire.trainer.reducer.steps import StepTimer

_COUNTED, _ROUNDS = 4, 4
"""The number of timed steps of a turn, and of rounds, in each of which every plan has a turn."""

_LEAST_GAIN = 0.01
"""A plan replaces the usual one if its steps take less time by more than this share, and less time in every round."""

_HOPELESS = 0.5
"""An exchange after backward() is not tried if that is predicted to make steps longer by more than this share."""

_log = logging.getLogger("gradwire")

_Plan = TypeVar("_Plan")


class PlanTrials(Generic[_Plan]):
    """Tries plans in turns of a few steps, and keeps the one with the fastest steps, the same on all ranks.

    Overlap with backward() pays where the wire is slow, and costs where the ranks fill the cores of their host: which of both
    it is depends on the model, the machine and what else runs there. In every second round the order of the plans is reversed,
    so that steps which grow longer or shorter by the time do not favor a plan.

    usual: the plan of the first steps, which stays unless another one is better in every round: of plans that are as fast, chance
    lets one in 16 seem better. others: the plans to try. after: those of the others that exchange after backward(). ended: is
    called with the plan that stays.

    Attribute plan: the plan of the next steps. settled: whether it stays.
    """

    def __init__(
        self,
        communicator: Communicator,
        usual: _Plan,
        others: Sequence[_Plan] = (),
        after: Sequence[_Plan] = (),
        ended: Callable[[_Plan], None] = lambda plan: None,
    ) -> None:
        self.plan = self._usual = usual
        self.settled = not others
        self._communicator = communicator
        self._others, self._after, self._ended = list(others), after, ended
        self._waiting: list[_Plan] = []  # the plans of the next turns, the last one first
        self._timer = StepTimer(communicator, _COUNTED)
        self._layout: object = None
        self._taken: dict[_Plan, list[list[float]]] = {}  # by plan and turn, the seconds of steps

    def follow(self, layout: object, step: int, hidden_s: float = 0.0, *, counts: bool = True) -> bool:
        """Record a step, and return whether the plan has changed. Collective in the steps that end a turn.

        layout: what the gradients of the step were exchanged in; a turn begins anew with another one. step: the number of earlier
        exchanges. hidden_s: the seconds by which the step would be longer, as far as this rank knows, if the exchange came after
        backward(). counts: False on a rank that has joined, whose steps are not measured."""
        if self.settled or step == self._timer.step:
            return False
        if layout is not self._layout or step < self._timer.step:
            self._layout = layout
            self._timer.restart(step)
        if (found := self._timer.record(step, hidden_s, counts=counts)) is None:
            return False
        if not self._taken:
            if found.part > _HOPELESS * median(found.steps):
                self._others = [plan for plan in self._others if plan not in self._after]
            self._waiting = self._turns()[:0:-1]
        self._taken.setdefault(self.plan, []).append(found.steps)
        before = self.plan
        self.plan = self._waiting.pop() if self._waiting else self._end()
        self._timer.restart(step)  # now, since a rank that has joined is called again only at the end of the turn
        return self.plan != before

    def _turns(self) -> list[_Plan]:
        """Return the plans of all turns, in order."""
        plans = [self._usual, *self._others]
        return [plan for number in range(_ROUNDS) for plan in (plans[::-1] if number % 2 else plans)]

    def _end(self) -> _Plan:
        """End the trials. Return the plan that stays, and log the times."""
        self.settled = True
        gains = {plan: _gain(self._taken[self._usual], turns) for plan, turns in self._taken.items()}
        best = max(gains, key=lambda plan: gains[plan])
        if self._communicator.rank == 0:
            steps = {plan: median(chain.from_iterable(turns)) for plan, turns in self._taken.items()}
            times = "; ".join(f"{1e3 * seconds:.3g} ms {plan}" for plan, seconds in steps.items())
            rest = f"which saved {gains[best]:.0%}" if gains[best] else "since no other plan was faster in every round"
            _log.info("gradwire: gradients are exchanged %s from now on, %s: a step took %s", best, rest, times)
        self._ended(best)
        return best


def _gain(usual: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    """Return the share of a step that another plan saves, from the steps of each turn; 0.0 if it is not faster in every round."""
    gains = [1 - median(theirs) / median(ours) for ours, theirs in zip(usual, other, strict=True)]
    return median(gains) if min(gains) > 0 and median(gains) > _LEAST_GAIN else 0.0


class PlanFile:
    """The file of a plan, which rank 0 alone reads and writes. nbytes: of all gradients. The file also describes the hosts: for
    other ones, plans are tried anew, and the file is replaced."""

    def __init__(self, communicator: Communicator, path: Path, nbytes: int) -> None:
        self._communicator, self._path = communicator, path
        self._nbytes, self._hosts = nbytes, [list(host) for host in communicator.topology.hosts]

    def read(self) -> ExchangePlan | None:
        """Return the plan in the file, the same on all ranks; None if there is none for these hosts. Collective. Raises
        ValueError on all ranks for a file of another model, or one that cannot be used."""
        found, fault = None, ""
        if self._communicator.rank == 0:
            try:
                found = self._load()
            except (OSError, ValueError, TypeError, KeyError) as error:
                fault = f"the file {self._path} of exchange_plan cannot be used: {error}"
        (found, fault), *_ = self._communicator.allgather_record((found, fault))
        if fault:
            raise ValueError(fault)
        return None if found is None else ExchangePlan(**found)

    def _load(self) -> dict[str, Any] | None:
        if not self._path.exists():
            if not os.access(self._path.parent, os.W_OK):
                raise ValueError("its folder does not exist, or cannot be written")
            return None
        saved = json.loads(self._path.read_text())
        plan = ExchangePlan(**saved["plan"])
        if saved["gradient_bytes"] != self._nbytes:
            raise ValueError(
                f"it is for {saved['gradient_bytes']} bytes of gradients, not {self._nbytes}: delete it, or give another file"
            )
        return asdict(plan) if saved["hosts"] == self._hosts else None

    def write(self, plan: ExchangePlan) -> None:
        """Write the plan, on rank 0. Logs an error of the file system, since training can go on."""
        if self._communicator.rank != 0:
            return
        text = json.dumps({"plan": asdict(plan), "gradient_bytes": self._nbytes, "hosts": self._hosts}, indent=1)
        unfinished = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            unfinished.write_text(text + "\n")
            unfinished.replace(self._path)
        except OSError as error:
            _log.warning("gradwire: the exchange plan cannot be saved: %s", error)


def begin_trials(
    setup: Setup, parameters: Sequence[Tensor], encodings: Sequence[Cast | Encoding]
) -> PlanTrials[ExchangePlan] | None:
    """Return trials of plans for the parameters that this rank holds, with their encodings; None if the user or the rule has
    chosen, or if plans are not tried. Collective. Raises ValueError on all ranks if a file is to store the plan, and cannot."""
    communicator = setup.communicator
    if isinstance(setup.plan, ExchangePlan) or not parameters:
        return None
    is_dense = all(each.is_cpu for each in parameters) and all(isinstance(each, Cast) for each in encodings)
    if not is_dense or setup.in_shares or setup.policy.auto is not None or setup.groups:
        if setup.plan is None:
            return None
        raise ValueError(
            f"exchange_plan={str(setup.plan)!r}: plans are tried only if all gradients are on the CPU, without codecs other than "
            "fp16 and bf16, and without rules.Sharded and groups: give an ExchangePlan, or no exchange_plan"
        )
    nbytes = sum(each.nbytes for each in parameters)
    others = rivals(nbytes) if communicator.size > 1 else []
    after = [plan for plan in others if plan.at_end]
    if setup.plan is None or communicator.size == 1:  # a late process of an elastic job is alone at first
        return PlanTrials(communicator, USUAL, others, after)
    file = PlanFile(communicator, setup.plan, nbytes)
    if (found := file.read()) is not None:
        return PlanTrials(communicator, found)
    trials = PlanTrials(communicator, USUAL, others, after, file.write)
    if trials.settled:
        file.write(USUAL)
    return trials
