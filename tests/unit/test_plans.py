"""The choice of a plan by steps that take what the test says: without processes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gradwire.trainer.reducer import steps
from gradwire.trainer.reducer.plans import ALL, USUAL, Plan, PlanTrials, rivals
from gradwire.trainer.reducer.steps import WINDOW

AT_END = Plan(ALL, at_end=True)


class Alone:
    """What trials ask of a Communicator. others: the medians of more ranks."""

    rank = 0

    def __init__(self, *others: list[float]) -> None:
        self.others = others

    def allgather_record(self, record: Any) -> list[Any]:
        return [record, *self.others]


def tried(
    trials: PlanTrials, monkeypatch: pytest.MonkeyPatch, step_s: Callable[[Plan, int], float], count: int = 100
) -> list[Plan]:
    """Return the plans of some steps, which take the seconds of their plan and number."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(steps, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    seen: list[Plan] = []
    layout: object = object()
    for step in range(count):
        seen.append(trials.plan)
        clock.now += step_s(trials.plan, step)
        if trials.follow(layout, step):
            layout = object()
    return seen


@pytest.mark.parametrize("nbytes", [5 << 20, 50 << 20])
def test_the_plan_with_the_fastest_steps_stays(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    plans = rivals(nbytes)
    assert AT_END in plans
    for best in plans:
        trials = PlanTrials(Alone(), plans)  # type: ignore[arg-type]
        seen = tried(trials, monkeypatch, lambda plan, _, best=best: 0.8 if plan == best else 1.0)  # type: ignore[misc]
        assert trials.settled
        assert set(seen) == {USUAL, *plans}
        assert set(seen[(len(plans) + 2) * (WINDOW + 1) :]) == {best}


def test_noise_and_one_slow_step_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual plan takes other times at the begin and the end, and a step of another plan is short."""

    def step_s(plan: Plan, step: int) -> float:
        return {True: 1.2 if step < WINDOW else 1.0, False: 0.1 if step % WINDOW == 5 else 0.9}[plan == USUAL]

    trials = PlanTrials(Alone(), rivals(50 << 20))  # type: ignore[arg-type]
    assert set(tried(trials, monkeypatch, step_s)[-10:]) == {USUAL}


def test_the_slowest_rank_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = PlanTrials(Alone([2.0, 0.0]), rivals(50 << 20))  # type: ignore[arg-type]
    seen = tried(trials, monkeypatch, lambda plan, _: 0.1 if plan == AT_END else 1.0)
    assert set(seen[-10:]) == {USUAL}


def test_a_small_model_has_nothing_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = PlanTrials(Alone(), rivals(1 << 20))  # type: ignore[arg-type]
    assert set(tried(trials, monkeypatch, lambda plan, step: 1.0)) == {USUAL}
