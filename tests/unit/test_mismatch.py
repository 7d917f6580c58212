"""What ranks call, compared over their channels, all in this process."""

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from gradwire.collectives.diagnostics import mismatch, whereabouts
from gradwire.collectives.diagnostics.mismatch import Agreement, Call, differing, first_difference
from gradwire.collectives.errors import LinkError, Mismatch
from tests.unit.test_monitor import DEADLINE_S, channels, end_abruptly


def outcome(agreement: Agreement, call: Call, patience_s: float = DEADLINE_S) -> Exception | None:
    try:
        agreement.agree(call, time.monotonic() + patience_s, lambda: False)
    except (LinkError, Mismatch) as error:
        return error
    return None


def outcomes(agreements: list[Agreement], calls: list[Call]) -> list[Exception | None]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, agreements, calls))


def test_ranks_that_call_the_same_agree_and_those_that_differ_are_all_told() -> None:
    with channels(3) as all_watches:
        agreements = [Agreement(channel) for channel in all_watches]
        assert outcomes(agreements, [Call(0, "sum")] * 3) == [None] * 3
        told = outcomes(agreements, [Call(1, "sum", "a.py:1"), Call(1, "max", "b.py:2"), Call(1, "sum", "a.py:1")])
        for error in told:
            assert isinstance(error, Mismatch)
            assert error.calls == {0: "sum", 1: "max", 2: "sum"}
            assert "ranks 0, 2 called sum at a.py:1; rank 1 called max at b.py:2" in str(error)
        assert outcomes(agreements, [Call(2, "sum")] * 3) == [None] * 3  # the old difference is settled
        assert not any(agreement.differs_from({2: "sum"}, -1, Call) for agreement in agreements)


def test_a_rank_that_has_moved_data_makes_it_worse_for_all() -> None:
    with channels(2) as all_watches:
        agreements = [Agreement(channel) for channel in all_watches]
        agreements[1].post(Call(5, "max", "b.py:2", moved=True))
        assert isinstance(outcome(agreements[0], Call(5, "sum")), LinkError)


def test_a_rank_that_runs_something_else_answers() -> None:
    with channels(2) as all_watches:
        agreements = [Agreement(channel) for channel in all_watches]
        agreements[0].post(Call(7, "sum"))
        assert all_watches[1].wait_for(lambda: bool(all_watches[1].posts), DEADLINE_S)
        moved = lambda number, text: Call(number, text, moved=True)  # noqa: E731
        assert not agreements[1].differs_from({6: "max"}, -1, moved)
        assert agreements[1].differs_from({6: "max", 7: "max"}, -1, moved)
        assert all_watches[0].wait_for(lambda: len(agreements[0].posted()) == 2, DEADLINE_S)
        assert (1, Call(7, "max", moved=True)) in agreements[0].posted()


def test_who_waits_for_a_rank_that_ends_or_does_not_come_is_told_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mismatch, "GRACE_S", 0.1)
    with channels(3) as all_watches:
        agreements = [Agreement(channel) for channel in all_watches]
        late = outcome(agreements[0], Call(0, "sum"), patience_s=0.1)
        assert isinstance(late, LinkError)
        assert late.timed_out
        assert late.awaited == {1, 2}
        agreements[1].post(Call(1, "max"))
        differs = outcome(agreements[0], Call(1, "sum"))  # which rank 2 never says anything of
        assert isinstance(differs, LinkError)
        assert not differs.timed_out
        end_abruptly(all_watches[2])
        gone = outcome(agreements[0], Call(2, "sum"))
        assert isinstance(gone, LinkError)
        assert not gone.timed_out


def test_what_is_known_is_forgotten_when_it_is_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mismatch, "_MOST_KNOWN", 2)
    with channels(1) as (channel,):
        agreement = Agreement(channel)
        for signature in "abc":
            agreement.take(signature)
        assert agreement.known == {"c"}


def test_the_first_difference_is_told_with_places() -> None:
    calls = [(0, Call(3, "a")), (1, Call(3, "a")), (0, Call(4, "a")), (0, Call(4, "a", "x.py:1")), (1, Call(4, "b"))]
    assert first_difference(calls) == {0: Call(4, "a", "x.py:1"), 1: Call(4, "b")}
    assert first_difference(calls, after=4) == {}


def test_the_place_is_that_of_the_caller_not_of_the_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    def called(ours: Callable[[], str]) -> str:
        return ours()

    here = sys._getframe().f_lineno + 1
    assert called(lambda: whereabouts.of_call(sys._getframe())) == f"{__file__}:{here}"
    monkeypatch.setattr(whereabouts, "_is_users", lambda *code: False)
    assert whereabouts.of_call(sys._getframe()) == ""


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        (("allreduce(float32[6], sum, ring)", "allreduce(float64[6], sum, rsag)"), ["dtype"]),
        (("allreduce(float32[2, 3], sum, ring)", "allreduce(int8[6], sum, ring)"), ["dtype", "shape"]),
        (("allreduce(float32[6], sum, ring)", "allreduce(float32[6], max, ring)"), ["op"]),
        (("allreduce(float32[6], sum, ring)", "allreduce(float32[6], sum, rsag)"), ["algorithm"]),
        (("allreduce(float32[6], float32[2], sum, ring)", "allreduce(float32[2], float32[6], sum, ring)"), ["shape"]),
        (
            ("allreduce(float32[6], sum, ring)", "allreduce(float32[6], sum, prescale=2.0, postscale=1.0, ring)"),
            ["prescale", "postscale"],
        ),
        (
            ("allreduce(float32[6], sum, ring)", "allreduce(float32[6], sum, direct, int8(block=256, seed=[1, 2]))"),
            ["codec"],
        ),
        (
            (
                "allreduce(float32[6], sum, direct, fp16())",
                "allreduce(float32[6], sum, direct, fp16(), error feedback)",
            ),
            ["error feedback"],
        ),
        (("broadcast(float32[6], src=0, tree)", "broadcast(float32[6], src=1, tree)"), ["src"]),
        (("alltoall(float32, splits, direct)", "alltoall(float64, splits, direct)"), ["dtype"]),
        (("alltoall(float32, splits, direct)", "alltoall(float32, float32[12], direct)"), ["dtype", "shape"]),
        (
            ("allgather(float32[2, 2], ring)", "allgather(float32[2, 3], ring)", "allgather(float32[2, 2], ring)"),
            ["shape"],
        ),
        (("allgather(float32[2, 2], ring)", "barrier(tree)"), ["the verb"]),
    ],
)
def test_what_calls_differ_in_is_said_in_words(calls: tuple[str, ...], said: list[str]) -> None:
    assert sorted(differing(calls)) == sorted(said)


def test_a_mismatch_says_in_words_what_differs() -> None:
    calls = {0: Call(3, "reduce(float32[6], dst=0, sum, tree)"), 1: Call(3, "reduce(int8[2], dst=1, sum, tree)")}
    assert str(mismatch.mismatch(calls, 0, calls[0].text)).endswith(
        "rank 1 called reduce(int8[2], dst=1, sum, tree); they differ in dtype, shape and dst"
    )
    assert str(Mismatch({0: "a", 1: "b"}, rank=0, operation="a")).endswith("rank 1 called b")
