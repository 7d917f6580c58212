"""From what the ranks report after a failure to the error that names the cause, the same on every survivor."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from collectives.diagnostics.postmortem import Board, Report, verdict
from collectives.errors import CollectiveTimeout, LinkError, Mismatch, PeerLost

CALL = "allreduce(float32[8], sum, ring)"


def judged(reports: dict[int, Report], rank: int) -> Exception:
    return verdict(reports, rank, seconds=3.0, detail="closed")


def test_the_dead_rank_is_named_by_all_not_the_neighbour_that_gave_up() -> None:
    reports = {
        0: Report(4, CALL, gone=(1,)),  # saw its neighbour 1 give up
        1: Report(4, CALL, gone=(2,)),  # saw 2 die
        3: Report(4, CALL, gone=(2,)),
    }
    for rank in reports:
        error = judged(reports, rank)
        assert isinstance(error, PeerLost)
        assert error.ranks == (2,)
        assert error.rank == rank
        assert error.operation == CALL


def test_the_silent_rank_is_named_not_those_that_wait_in_vain_for_each_other() -> None:
    reports = {
        0: Report(4, CALL, waiting_for=(3,)),
        3: Report(4, CALL, waiting_for=(2,)),
        1: Report(4, CALL, gone=(0,)),
    }
    for rank in reports:
        error = judged(reports, rank)
        assert isinstance(error, CollectiveTimeout)
        assert (error.waiting_for, error.seconds) == ((2,), 3.0)


def test_different_calls_in_one_turn_are_a_mismatch() -> None:
    other = "allreduce(float32[9], sum, ring)"
    reports = {
        0: Report(4, CALL, waiting_for=(1,)),
        1: Report(4, other, waiting_for=(0,)),
        2: Report(4, CALL, gone=(0,)),
    }
    error = judged(reports, 2)
    assert isinstance(error, Mismatch)
    assert error.calls == {0: CALL, 1: other, 2: CALL}
    assert "ranks 0, 2 called allreduce(float32[8], sum, ring); rank 1 called allreduce(float32[9]" in str(error)


def test_ranks_at_different_turns_that_wait_for_each_other_are_a_mismatch() -> None:
    reports = {0: Report(4, CALL, waiting_for=(1,)), 1: Report(5, CALL, waiting_for=(0,))}
    error = judged(reports, 0)
    assert isinstance(error, Mismatch)
    assert "as operation 4" in str(error)
    assert "as operation 5" in str(error)


@pytest.mark.parametrize("timed_out", [True, False])
def test_a_report_keeps_closed_connections_apart_from_slow_ones(timed_out: bool) -> None:
    report = Report.of(LinkError(2, timed_out=timed_out, detail="x"), 7, CALL, peers={0, 2, 5}, lost={5})
    assert report.waiting_for == ((2,) if timed_out else ())
    assert set(report.gone) == (set() if timed_out else {2, 5})


def test_a_timeout_of_the_backend_itself_waits_for_everyone() -> None:
    report = Report.of(LinkError(None, timed_out=True, detail="x"), 7, CALL, peers={0, 2}, lost={0, 2})
    assert (set(report.waiting_for), report.gone) == ({0, 2}, ())


def test_a_report_is_written_before_connections_are_broken_and_the_others_are_read() -> None:
    store = dist.HashStore()
    theirs = Report(4, CALL, gone=(2,))
    Board(store, 1, 3).exchange(theirs, set(), after_writing=lambda: None)
    seen: list[bool] = []
    mine = Report(4, CALL, gone=(1,))
    reports = Board(store, 0, 3).exchange(mine, set(), after_writing=lambda: seen.append(store.check(["report/0"])))
    assert seen == [True]
    assert reports == {0: mine, 1: theirs}


class _CountingStore(dist.HashStore):
    """A store that notes what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def check(self, keys: list[str]) -> bool:
        self.asked += keys
        return super().check(keys)


def test_nobody_waits_for_the_report_of_a_process_that_has_ended_but_what_it_wrote_is_read() -> None:
    store = _CountingStore()
    theirs = Report(4, CALL, gone=(2,))
    Board(store, 1, 3).exchange(theirs, {0, 2}, after_writing=lambda: None)
    mine = Report(4, CALL, gone=(1,))
    store.asked.clear()
    assert Board(store, 0, 3).exchange(mine, {1, 2}, after_writing=lambda: None) == {0: mine, 1: theirs}
    assert store.asked == ["report/1", "report/2"]


class _DeadStore(dist.Store):
    """A store whose host is gone."""


def test_a_dead_store_leaves_what_this_rank_saw() -> None:
    mine = Report(4, CALL, gone=(0,))
    reports = Board(_DeadStore(), 1, 2).exchange(mine, set(), after_writing=lambda: None)
    assert reports == {1: mine}
    assert isinstance(judged(reports, 1), PeerLost)
