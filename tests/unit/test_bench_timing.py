"""The protocol that turns are taken by, and what is made of their times."""

import numpy as np
import pytest
import torch

from gradwire.bench.timing import Protocol, median_and_p99, meeting, speedup_interval, take_turns


class Recorder:
    """Is a world of one that notes what happens; `time.perf_counter` moves only when a competitor runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.now = 0.0
        monkeypatch.setattr("gradwire.bench.timing.time.perf_counter", lambda: self.now)
        self.timer = meeting(torch.device("cpu"), lambda: self.events.append("barrier"))

    def competitor(self, name: str, seconds: float) -> None:
        self.events.append(name)
        self.now += seconds

    def take_turns(self, **settings: int) -> tuple[np.ndarray, list[int]]:
        wrong = [lambda count=count: count for count in (2, 3, 4)]
        names = {"a": 1.0, "b": 10.0, "c": 100.0}
        competitors = [lambda n=name, s=seconds: self.competitor(n, s) for name, seconds in names.items()]
        return take_turns(competitors, self.timer, Protocol(**settings), lambda: self.events.append("reset"), *wrong)

    @property
    def order(self) -> str:
        return "".join(event for event in self.events if len(event) == 1)


def test_each_round_has_every_competitor_once_in_the_same_order_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, other = Recorder(monkeypatch), Recorder(monkeypatch)
    recorder.take_turns(iters=6, warmup_iters=2, check_iters=1)
    rounds = [recorder.order[start : start + 3] for start in range(0, len(recorder.order), 3)]
    assert [sorted(each) for each in rounds] == [["a", "b", "c"]] * (6 + 2 + 1)
    assert len(set(rounds)) > 1
    other.take_turns(iters=6, warmup_iters=2, check_iters=1)
    assert recorder.order == other.order


def test_times_belong_to_their_competitor_and_begin_when_ranks_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    seconds, _ = recorder.take_turns(iters=4, warmup_iters=0, check_iters=0)
    assert recorder.events[:3] == ["reset", "barrier", recorder.order[0]]
    assert np.array_equal(seconds, np.array([[1.0], [10.0], [100.0]]) * np.ones((1, 4)))


@pytest.mark.parametrize(("check_iters", "turns"), [(0, 0), (1, 2), (3, 4)])
def test_checked_turns_and_the_last_timed_one_are_counted(
    monkeypatch: pytest.MonkeyPatch, check_iters: int, turns: int
) -> None:
    _, counted = Recorder(monkeypatch).take_turns(iters=5, check_iters=check_iters)
    assert counted == [2 * turns, 3 * turns, 4 * turns]


def test_p99_is_a_turn_that_happened() -> None:
    assert median_and_p99(np.arange(1.0, 21.0)) == (10.5, 20.0)
    assert median_and_p99(np.arange(1.0, 1002.0)) == (501.0, 991.0)


def test_interval_holds_the_speedup_and_narrows_with_the_scatter() -> None:
    scatter = np.random.default_rng(1).normal(size=(2, 40))
    low, high = speedup_interval(1.0 + 0.1 * scatter[0], 2.0 + 0.2 * scatter[1])
    assert low < 2 < high
    calm_low, calm_high = speedup_interval(1.0 + 0.001 * scatter[0], 2.0 + 0.002 * scatter[1])
    assert calm_high - calm_low < 0.1 * (high - low)
    assert speedup_interval(np.ones(7), np.ones(7)) is None  # too few turns
    assert speedup_interval(np.ones(8), np.ones(8)) == (1.0, 1.0)
