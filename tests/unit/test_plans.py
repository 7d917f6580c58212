"""The choice of a plan by steps that take what the test says, and its file: without processes."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gradwire.trainer.reducer import steps
from gradwire.trainer.reducer.plans import USUAL, ExchangePlan, check_plan, rivals
from gradwire.trainer.reducer.trials import PlanFile, PlanTrials

AT_END, SMALL = ExchangePlan(None, at_end=True), ExchangePlan(1 << 20)
PLANS = [AT_END, SMALL]
HUNDRED = 100
"""The steps within which plans are chosen."""


class Alone:
    """What trials ask of a Communicator. others: the records of more ranks."""

    rank = 0

    def __init__(self, *others: Any) -> None:
        self.others = others

    def allgather_record(self, record: Any) -> list[Any]:
        return [record, *self.others]


def tried(
    monkeypatch: pytest.MonkeyPatch,
    step_s: Callable[[ExchangePlan, int], float],
    *others: Any,
    hidden_s: float = 0.0,
    count: int = HUNDRED,
) -> list[ExchangePlan]:
    """Return the plans of some steps, which take the seconds of their plan and number."""
    trials = PlanTrials(Alone(*others), USUAL, PLANS, after=[AT_END])  # type: ignore[arg-type]
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(steps, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    seen: list[ExchangePlan] = []
    layout: object = object()
    for step in range(count):
        seen.append(trials.plan)
        clock.now += step_s(trials.plan, step)
        if trials.follow(layout, step, hidden_s):
            layout = object()
        trials.follow(layout, step, 1e9)  # a second look after the same step counts for nothing
    assert trials.settled
    return seen


@pytest.mark.parametrize("best", [USUAL, *PLANS])
def test_the_plan_with_the_fastest_steps_stays(monkeypatch: pytest.MonkeyPatch, best: ExchangePlan) -> None:
    for seed in range(20):
        noise = random.Random(seed)
        seen = tried(monkeypatch, lambda plan, _: noise.gauss(0.92 if plan == best else 1.0, 0.02))  # noqa: B023
        assert set(seen) == {USUAL, *PLANS}
        assert set(seen[-10:]) == {best}


@pytest.mark.parametrize("deviation", [0.0, 0.02, 0.05, 0.2])
def test_chance_seldom_replaces_a_plan_by_one_that_is_as_fast(
    monkeypatch: pytest.MonkeyPatch, deviation: float
) -> None:
    wrong = 0
    for seed in range(100):
        noise = random.Random(seed)
        wrong += tried(monkeypatch, lambda *_: max(0.1, noise.gauss(1.0, deviation)))[-1] != USUAL  # noqa: B023
    assert wrong <= (0 if deviation == 0 else 20)  # of two plans, each in one of 16


@pytest.mark.parametrize("growth", [0.998, 1.002, 1.01])
def test_steps_that_become_longer_or_shorter_favor_no_plan(monkeypatch: pytest.MonkeyPatch, growth: float) -> None:
    assert tried(monkeypatch, lambda _, step: growth**step)[-1] == USUAL


def test_single_steps_of_another_length_and_a_machine_that_speeds_up_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for speeds_up in range(10, 80):
        seen = tried(monkeypatch, lambda _, step: 0.2 if step % 20 == 19 else 1.3 if step < speeds_up else 1.0)  # noqa: B023
        assert seen[-1] == USUAL


def test_exchanges_without_a_step_of_the_optimizer_count_by_their_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closure exchanges several times a step, and GradScaler leaves out a step now and then."""
    for between in (20, 3):
        trials = PlanTrials(Alone(), USUAL, PLANS, after=[AT_END])  # type: ignore[arg-type]
        clock = SimpleNamespace(now=0.0)
        monkeypatch.setattr(steps, "time", SimpleNamespace(perf_counter=lambda clock=clock: clock.now))
        layout: object = object()
        for step in range(0, 3000, between):
            clock.now += between * (0.8 if trials.plan == SMALL else 1.0)
            if trials.follow(layout, step):
                layout = object()
        assert trials.settled
        assert trials.plan == SMALL


def test_the_slowest_rank_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = tried(monkeypatch, lambda plan, _: 0.1 if plan == AT_END else 1.0, [[2.0] * 4, [0.0] * 4], [])
    assert set(seen[-10:]) == {USUAL}


def test_an_exchange_after_backward_is_not_tried_if_it_would_make_steps_much_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert AT_END in tried(monkeypatch, lambda *_: 1.0, hidden_s=0.4)
    assert set(tried(monkeypatch, lambda *_: 1.0, hidden_s=0.6)) == {USUAL, SMALL}


def test_the_log_has_the_times(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "gradwire"):
        tried(monkeypatch, lambda plan, _: 0.5 if plan == AT_END else 1.0)
    (message,) = caplog.messages
    assert all(part in message for part in (str(AT_END), f"500 ms {AT_END}", str(USUAL), str(SMALL)))


def test_what_is_tried_depends_on_the_size_of_a_model() -> None:
    assert rivals(1 << 20) == []  # one bucket in any case
    assert rivals(1 << 22) == PLANS
    assert rivals(1 << 30) == [AT_END, ExchangePlan(25 << 20)]


def test_arguments() -> None:
    for given in ((None, None, None), (SMALL, None, None), (None, 1 << 20, None), (None, None, 1 << 20)):
        assert check_plan(*given) == (None if given == (None, None, None) else SMALL)
    assert check_plan(SMALL, None, 7) == SMALL
    assert check_plan(None, 1 << 20, 7) == SMALL
    assert check_plan("plan.json", None, 7) == Path("plan.json")
    for wrong, error in (((SMALL, 7, None), ValueError), ((None, 0, None), ValueError), ((3, None, None), TypeError)):
        with pytest.raises(error):
            check_plan(*wrong)
    for bad in ({"bucket_bytes": 0}, {"bucket_bytes": True}, {"bucket_bytes": 1.5}, {"at_end": 1}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            ExchangePlan(**bad)


def file_at(path: Path, nbytes: int = 7, hosts: Any = ((0, 1),), rank: int = 0) -> PlanFile:
    communicator = Alone([vars(SMALL), ""])
    communicator.rank, communicator.topology = rank, SimpleNamespace(hosts=hosts)  # type: ignore[attr-defined]
    if rank:
        communicator.allgather_record = lambda record: [*communicator.others, record]  # type: ignore[method-assign]
    return PlanFile(communicator, path, nbytes)  # type: ignore[arg-type]


def test_a_file_keeps_a_plan_for_the_same_gradients_and_hosts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "plan.json"
    assert file_at(path).read() is None
    file_at(path).write(AT_END)
    assert file_at(path).read() == AT_END
    assert file_at(path, hosts=((0,), (1,))).read() is None  # as after a rank was lost: plans are tried anew
    with pytest.raises(ValueError, match="8"):
        file_at(path, nbytes=8).read()
    (tmp_path / "bad.json").write_text("{")
    for bad in ("bad.json", "absent/plan.json"):
        with pytest.raises(ValueError, match=bad):
            file_at(tmp_path / bad).read()
    file_at(tmp_path / "absent" / "plan.json").write(AT_END)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert {each.name for each in tmp_path.iterdir()} == {"plan.json", "bad.json"}


def test_only_rank_0_touches_the_file(tmp_path: Path) -> None:
    file = file_at(tmp_path / "plan.json", rank=1)
    file.write(AT_END)
    assert not list(tmp_path.iterdir())
    assert file.read() == SMALL
