"""From what is known of the ranks after a failure to the error that names the cause, the same on every survivor."""

import json
import threading
from typing import Any

import pytest

from gradwire.collectives.diagnostics.mismatch import Agreement
from gradwire.collectives.diagnostics.postmortem import GRACE_S, Findings, Report, difference_of, inquire, verdict
from gradwire.collectives.errors import CollectiveError, CollectiveTimeout, Mismatch, PeerLost
from tests.unit.test_watch import end_abruptly, watches

CALL = "allreduce(float32[8], sum, ring)"
OTHER = "allreduce(float32[9], sum, ring)"
SECONDS = 3.0


def stopped(*waiting_for: int, sequence: int = 4, gave_up: bool = False, waited_s: float = SECONDS) -> Report:
    return Report(sequence, CALL, waiting_for, gave_up, waited_s, SECONDS, before=((sequence - 1, CALL),))


def judged(rank: int, reports: dict[int, Report], kind: type[CollectiveError] = CollectiveError, **known: Any) -> Any:
    """Return the error of a rank, once it is seen to be of this kind."""
    error = verdict(Findings(reports, difference=difference_of(reports), **known), rank, detail="closed")
    assert isinstance(error, kind)
    return error


def message(*waiting_for: int, gave_up: bool = False) -> Report:
    call = f"recv(float32[8], src={waiting_for[0]}, tag=0)"
    return Report(5, call, waiting_for, gave_up, SECONDS, SECONDS, before=((4, CALL),), is_message=True)


def test_the_dead_rank_is_named_by_all_not_the_neighbour_that_broke_its_connections() -> None:
    reports = {0: stopped(1), 1: stopped(2), 3: stopped(2)}
    for rank in reports:
        error = judged(rank, reports, PeerLost, lost={2})
        assert (error.ranks, error.rank, error.operation) == ((2,), rank, CALL)
        assert "lost rank 2: its process was ended" in str(error)


def test_what_a_rank_raised_is_told() -> None:
    why = "raised ValueError: no such file at train.py:31, load"
    error = judged(0, {0: stopped(1)}, left={2: 4}, reasons={2: why, 1: "raised PeerLost"})
    assert str(error) == f"rank 0: {CALL}: lost rank 2: rank 2 {why}"
    error = judged(0, {0: message(1)}, left={1: 3}, reasons={1: why})
    assert str(error).endswith(f"lost rank 1: rank 1 {why}")


def test_where_a_rank_is_that_is_waited_for_is_told() -> None:
    where = {1: "is at train.py:31, load", 2: "is at train.py:40, train"}
    error = judged(0, {0: stopped(1, gave_up=True), 2: stopped(1)}, CollectiveTimeout, whereabouts=where)
    assert str(error).endswith("not done after 3 s waiting for rank 1: rank 1 is at train.py:31, load")
    error = judged(0, {0: message(1, gave_up=True)}, whereabouts=where)
    assert str(error).endswith("waiting for rank 1: rank 1 is at train.py:31, load")


@pytest.mark.parametrize(
    ("reports", "known", "lost", "said"),
    [
        ({0: stopped(1), 1: stopped(2)}, {"lost": {1, 2}}, 2, "its process was ended"),  # rank 1 has reported before
        ({0: stopped(1)}, {"left": {2: 4, 1: 4}}, 2, "lost rank 2: left at or before this operation"),  # as the first
        ({0: stopped(1)}, {"left": {1: 4}, "lost": {2}}, 2, "its process was ended"),  # before one that leaves
        ({0: message(1)}, {"left": {2: 0}, "lost": {1}}, 1, "its process was ended"),  # a message is of its ranks alone
        ({0: message(1)}, {"left": {2: 0, 1: 3}}, 1, "left at or before this"),
        ({0: message(1), 1: stopped(2, sequence=5)}, {"lost": {2}}, 2, "its process was ended"),  # for which it waits
    ],
)
def test_of_ranks_that_have_gone_the_one_to_blame_is_named(
    reports: dict[int, Report], known: dict[str, Any], lost: int, said: str
) -> None:
    error = judged(0, reports, PeerLost, **known)
    assert error.ranks == (lost,)
    assert said in str(error)


def test_a_message_fails_by_its_own_ranks_alone() -> None:
    """Others may leave, and be in other operations, as they like."""
    error = judged(0, {0: message(1), 1: stopped(0, sequence=5)}, lost={1}, left={2: 0})
    assert "rank 1 failed in allreduce" in str(error)
    error = judged(0, {0: message(1, gave_up=True)}, CollectiveTimeout, lost={3}, left={2: 0})
    assert error.waiting_for == (1,)
    error = judged(1, {0: message(2, gave_up=True), 1: stopped(0, sequence=5)})
    assert not isinstance(error, Mismatch), "it is no part of what ranks agree on"


def test_a_rank_that_leaves_after_the_operation_is_not_to_blame() -> None:
    judged(0, {0: stopped(1, gave_up=True)}, CollectiveTimeout, left={2: 5})


def test_the_silent_rank_is_named_not_those_that_wait_in_vain_for_each_other() -> None:
    reports = {0: stopped(3, gave_up=True), 3: stopped(2), 1: stopped(0)}
    for rank in reports:
        error = judged(rank, reports, CollectiveTimeout)
        assert (error.waiting_for, error.seconds) == ((2,), SECONDS)


def test_a_rank_that_came_late_is_named_and_told_so() -> None:
    reports = {0: stopped(1, 2, gave_up=True), 1: stopped(0, 2), 2: stopped(waited_s=0.01)}
    errors = [judged(rank, reports, CollectiveTimeout) for rank in range(3)]
    assert [error.waiting_for for error in errors] == [(2,), (2,), ()]
    assert "rank 0 gave up waiting for this rank, which arrived later" in str(errors[2])


def test_nobody_is_said_to_wait_for_itself() -> None:
    reports = {rank: stopped(*{0, 1, 2} - {rank}, gave_up=True) for rank in range(3)}
    for rank in reports:
        assert rank not in judged(rank, reports, CollectiveTimeout).waiting_for


def test_different_calls_in_one_turn_are_a_mismatch() -> None:
    error = judged(2, {0: stopped(1, gave_up=True), 1: Report(4, OTHER, (0,)), 2: stopped(0)}, Mismatch)
    assert error.calls == {0: CALL, 1: OTHER, 2: CALL}
    assert "ranks 0, 2 called allreduce(float32[8], sum, ring); rank 1 called allreduce(float32[9]" in str(error)


def test_a_different_call_that_one_rank_could_finish_alone_is_a_mismatch() -> None:
    reports = {0: stopped(1, gave_up=True), 1: Report(5, CALL, (0,), gave_up=True, before=((4, OTHER),))}
    assert judged(0, reports, Mismatch).calls == {0: CALL, 1: OTHER}


def test_messages_that_do_not_arrive_are_no_mismatch_and_blame_neither_end() -> None:
    """Rank 1 has finished what rank 0 still waits for: all that it sent is lost."""
    reports = {0: stopped(1, gave_up=True), 1: stopped(0, sequence=5, gave_up=True)}
    for rank in reports:
        error = judged(rank, reports, CollectiveTimeout)
        assert error.waiting_for == ()
        assert "no message of rank 1 reaches rank 0" in str(error)


def test_a_connection_that_broke_between_the_living_is_called_that() -> None:
    error = judged(0, {0: stopped(1), 1: stopped(0)})
    assert type(error) is CollectiveError
    assert "a connection to a living rank broke" in str(error)
    error = judged(0, {0: stopped(1), 1: stopped(0)}, cut={(0, 1)})
    assert "a connection between ranks 0 and 1 broke" in str(error)


def test_a_connection_to_a_rank_that_says_nothing_is_named_by_its_ends() -> None:
    """As where nothing arrives that one of them sends, its report neither."""
    reports = {0: stopped(1), 2: stopped(0), 3: stopped(2)}
    for rank, named in ((0, (1,)), (3, ())):
        error = judged(rank, reports)
        assert "a connection between ranks 0 and 1 broke" in str(error)
        assert error.ranks == named
    assert "to a living rank" in str(judged(0, reports, left={1: 9}))


def test_ranks_that_wait_in_a_circle_blame_the_link_that_loses_messages_and_nobody() -> None:
    """Rank 2 hears nothing that it is sent, and is heard."""
    reports = {rank: stopped((rank + 2) % 3, gave_up=True) for rank in range(3)}
    for rank in (0, 1):
        error = judged(rank, reports, CollectiveTimeout, cut={(0, 2), (1, 2)})
        assert error.waiting_for == ()
        assert "messages are lost between ranks 0 and 2, between ranks 1 and 2" in str(error)


def test_a_rank_that_comes_late_to_one_that_finished_alone_is_told_so() -> None:
    """Rank 0 was the root of a broadcast that it could finish, and has given up in the operation after it."""
    reports = {0: stopped(1, sequence=5, gave_up=True), 1: stopped(0, waited_s=0.01)}
    assert "gave up waiting for this rank" in str(judged(1, reports))
    assert judged(0, reports, CollectiveTimeout).waiting_for == (1,)


def test_a_rank_that_did_not_wait_itself_accuses_nobody() -> None:
    error = judged(0, {0: Report(4, CALL), 1: stopped(2, gave_up=True)}, CollectiveTimeout)
    assert error.waiting_for == (2,)
    assert "rank 1 gave up" in str(error)


def test_patience_is_that_of_who_gave_up() -> None:
    reports = {0: stopped(1, gave_up=True), 1: Report(4, CALL, (0,), False, SECONDS, timeout_s=300.0)}
    assert "arrived later" not in str(judged(1, reports))


def test_a_report_survives_its_way() -> None:
    report = stopped(1, 2, gave_up=True)
    assert Report.from_news(json.loads(json.dumps(report.to_news()))) == report


def test_an_inquiry_ends_when_the_dead_are_known() -> None:
    with watches(3) as (first, second, third):
        end_abruptly(third)
        second.say_report(stopped(2).to_news())
        assert first.wait_for(lambda: bool(first.lost) and 1 in first.reports, 20)
        assert inquire(first, stopped(2), Agreement(first)) == Findings(
            {0: stopped(2), 1: stopped(2)}, frozenset({2}), {}
        )


def test_an_inquiry_of_a_message_waits_for_news_of_its_sender_not_of_a_rank_that_has_left() -> None:
    with watches(3) as (first, second, third):
        third.say_leaving(0)
        third.say_done()
        assert first.wait_for(lambda: bool(first.left), 20)
        ending = threading.Timer(GRACE_S / 4, end_abruptly, [second])
        ending.start()
        assert inquire(first, message(1), Agreement(first)).lost == {1}
        ending.join()


def test_an_inquiry_finds_who_speaks_but_does_not_hear(monkeypatch: pytest.MonkeyPatch) -> None:
    with watches(3) as (first, second, third):
        monkeypatch.setattr(first._neighbours[2], "is_unconfirmed", lambda: True)
        for watch in (second, third):
            watch.say_report(stopped(0).to_news())
        assert inquire(first, stopped(2), Agreement(first)).cut == {(0, 2)}


def test_an_inquiry_ends_when_everyone_has_spoken() -> None:
    with watches(3) as (first, second, third):
        second.say_report(stopped(0).to_news())
        third.say_leaving(9)
        third.say_done()
        assert inquire(first, stopped(1), Agreement(first)) == Findings(
            {0: stopped(1), 1: stopped(0)}, frozenset(), {2: 9}
        )
