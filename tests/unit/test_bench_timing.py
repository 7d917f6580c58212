"""The protocol that turns are taken by."""

import numpy as np
import pytest
import torch

from gradwire.bench.timing import Protocol, median_and_p99, meeting, take_turns


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

    def take_turns(self, protocol: Protocol) -> tuple[np.ndarray, list[int]]:
        wrong = [lambda count=count: count for count in (2, 3, 4)]
        names = {"a": 1.0, "b": 10.0, "c": 100.0}
        competitors = [lambda n=name, s=seconds: self.competitor(n, s) for name, seconds in names.items()]
        return take_turns(competitors, self.timer, protocol, lambda: self.events.append("reset"), *wrong)

    @property
    def order(self) -> str:
        return "".join(event for event in self.events if len(event) == 1)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def test_each_round_has_every_competitor_once(recorder: Recorder) -> None:
    recorder.take_turns(Protocol(iters=6, warmup_iters=2, check_iters=1))
    rounds = [recorder.order[start : start + 3] for start in range(0, len(recorder.order), 3)]
    assert len(rounds) == 6 + 2 + 1
    assert all(sorted(a_round) == ["a", "b", "c"] for a_round in rounds)
    assert len(set(rounds)) > 1


def test_orders_are_the_same_on_every_rank(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Recorder(monkeypatch)
    recorder.take_turns(Protocol())
    other.take_turns(Protocol())
    assert recorder.order == other.order


def test_buffers_are_filled_and_ranks_meet_outside_the_clock(recorder: Recorder) -> None:
    recorder.take_turns(Protocol(iters=1, warmup_iters=0, check_iters=0))
    assert recorder.events[:3] == ["reset", "barrier", recorder.order[0]]


def test_times_belong_to_their_competitor(recorder: Recorder) -> None:
    seconds, _ = recorder.take_turns(Protocol(iters=4))
    assert np.array_equal(seconds, np.array([[1.0], [10.0], [100.0]]) * np.ones((1, 4)))


@pytest.mark.parametrize(("check_iters", "wrong"), [(0, 0), (1, 4), (3, 8)])
def test_checked_turns_and_the_last_timed_one_are_counted(recorder: Recorder, check_iters: int, wrong: int) -> None:
    _, counted = recorder.take_turns(Protocol(iters=5, check_iters=check_iters))
    assert counted == [wrong, 1.5 * wrong, 2 * wrong]


def test_p99_is_a_turn_that_happened() -> None:
    assert median_and_p99(np.arange(1.0, 21.0)) == (10.5, 20.0)
    assert median_and_p99(np.arange(1.0, 1002.0)) == (501.0, 991.0)
