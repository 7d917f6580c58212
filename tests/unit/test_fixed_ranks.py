"""What `gradwire run` decides for a job with a fixed number of ranks. Clocks and events are the test's own."""

from __future__ import annotations

import pytest

from gradwire.trainer.launcher.fixed import FixedRanks
from gradwire.trainer.launcher.options import parse_job
from gradwire.trainer.launcher.workers import End, Start


@pytest.fixture
def ranks() -> FixedRanks:
    """Three ranks of two hosts, of which none is this one."""
    return FixedRanks(parse_job(["-H", "127.0.0.2:1,127.0.0.3:2", "train.py"]), {})


def begin(ranks: FixedRanks) -> None:
    for host in ranks.workers.hosts.values():
        assert ranks.decide(0.0) == []
        host.is_ready = True
    started = [Start(0, 0, 0), Start(1, 1, 0), Start(2, 1, 1)]
    assert ranks.decide(0.0) == started
    assert ranks.decide(0.0) == []


def test_variables(ranks: FixedRanks) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    assert [ranks.variables(2)[name] for name in names] == ["2", "3", "1", "2", "1", "127.0.0.2", "29500"]


def test_all_ranks_finish(ranks: FixedRanks) -> None:
    begin(ranks)
    for rank in range(3):
        assert ranks.decide(1.0) == []
        ranks.exited(rank, 0, 1.0)
    assert ranks.decide(1.0) == [End((), "")]


@pytest.mark.parametrize("by", ["an exit code", "the loss of a host"])
def test_the_first_failure_ends_the_job_after_the_others_had_time(ranks: FixedRanks, by: str) -> None:
    begin(ranks)
    if by == "an exit code":
        ranks.exited(1, 3, 10.0)
        ranks.exited(2, 0, 10.0)
    else:
        ranks.host_lost(1, "its agent has ended", 10.0)
    assert ranks.decide(12.0) == []
    ended = (1,) if by == "an exit code" else (1, 2)
    assert ranks.decide(15.0) == [End(ended, "")]
    ranks.exited(0, -15, 16.0)
    assert ranks.failed == [*ended, 0]


def test_a_host_that_cannot_be_reached_ends_the_job_before_ranks_start(ranks: FixedRanks) -> None:
    assert ranks.decide(0.0) == []
    ranks.host_lost(1, "by ssh: no route", 1.0)
    assert ranks.decide(1.0) == [End((1, 2), "")]


def test_a_signal_ends_the_job(ranks: FixedRanks) -> None:
    assert ranks.decide(0.0, is_interrupted=True) == [End((), "")]
