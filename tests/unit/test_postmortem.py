"""From what is known of the ranks after a failure to the error that names the cause, the same on every survivor."""

import json
import threading
from dataclasses import replace
from typing import Any

import pytest

from gradwire.collectives.diagnostics.mismatch import Agreement
from gradwire.collectives.diagnostics.postmortem import GRACE_S, Findings, Report, difference_of, inquire, verdict
from gradwire.collectives.errors import CollectiveError, CollectiveTimeout, Mismatch, PeerLost
from tests.unit.test_monitor import channels, end_abruptly

CALL = "allreduce(float32[8], sum, ring)"
OTHER = "allreduce(float32[9], sum, ring)"
SECONDS = 3.0


def stopped(*waiting_for: int, sequence: int = 4, gave_up: bool = False, waited_s: float = SECONDS) -> Report:
    return Report(sequence, CALL, waiting_for, gave_up, waited_s, SECONDS, before=((sequence - 1, CALL),))


def message(*waiting_for: int, gave_up: bool = False) -> Report:
    call = f"recv(float32[8], src={waiting_for[0]}, tag=0)"
    return Report(5, call, waiting_for, gave_up, SECONDS, SECONDS, before=((4, CALL),), is_message=True)


WHY = "raised ValueError: no such file at train.py:31, load"
WHERE = {1: "is at train.py:31, load", 2: "is at train.py:40, train"}
LATE = {0: stopped(1, 2, gave_up=True), 1: stopped(0, 2), 2: stopped(waited_s=0.01)}
FINISHED_ALONE = {0: stopped(1, sequence=5, gave_up=True), 1: stopped(0, waited_s=0.01)}
MUTE = {0: stopped(1), 2: stopped(0), 3: stopped(2)}
BROKEN = {0: stopped(1), 1: stopped(0)}


def losing(report: Report) -> Report:
    """Of rank 0, what it sends to rank 1 not being acknowledged."""
    return replace(report, lossy=((1, "large from 0 to 1"),))


#: (who is named, the reports, what else is known, the error, whom it names on some ranks, and what it says; $ is its end)
VERDICTS: list[tuple[str, dict[int, Report], dict[str, Any], type[CollectiveError], dict[int, tuple[int, ...]], str]] = [
    ("the dead by all, not the neighbour that broke its connections", {0: stopped(1), 1: stopped(2), 3: stopped(2)},
     {"lost": {2}}, PeerLost, {0: (2,), 1: (2,), 3: (2,)}, f": {CALL}: lost rank 2: its process was ended"),
    ("who had not reported before it ended", {0: stopped(1), 1: stopped(2)},
     {"lost": {1, 2}}, PeerLost, {0: (2,)}, "its process was ended"),
    ("who left first", {0: stopped(1)},
     {"left": {2: 4, 1: 4}}, PeerLost, {0: (2,)}, "lost rank 2: left at or before this operation"),
    ("who left before the others' last operations, in whatever order that is known", {0: stopped(1)},
     {"left": {1: 4, 2: 3}}, PeerLost, {0: (2,)}, "lost rank 2: left at or before this operation"),
    ("who ended, before one that leaves", {0: stopped(1)},
     {"left": {1: 4}, "lost": {2}}, PeerLost, {0: (2,)}, "its process was ended"),
    ("nobody who leaves after the operation", {0: stopped(1, gave_up=True)},
     {"left": {2: 5}}, CollectiveTimeout, {0: (1,)}, "waiting for rank 1"),
    ("who left, with what it raised", {0: stopped(1)},
     {"left": {2: 4}, "reasons": {2: WHY, 1: "raised PeerLost"}}, PeerLost, {0: (2,)},
     f"rank 0: {CALL}: lost rank 2: rank 2 {WHY}$"),
    ("who is waited for, with where it is", {0: stopped(1, gave_up=True), 2: stopped(1)},
     {"whereabouts": WHERE}, CollectiveTimeout, {0: (1,)},
     "not done after 3 s waiting for rank 1: rank 1 is at train.py:31, load$"),
    ("both ends of a message that was changed on the way",
     {0: stopped(1), 1: replace(stopped(0), forged=(0,)), 2: stopped(1)}, {"lost": {0}}, CollectiveError,
     {0: (0, 1), 1: (0, 1), 2: (0, 1)}, "what rank 0 has sent to rank 1 was changed on the way$"),
    ("of a message, its rank that ended", {0: message(1)},
     {"left": {2: 0}, "lost": {1}}, PeerLost, {0: (1,)}, "its process was ended"),
    ("of a message, its rank that left", {0: message(1)},
     {"left": {2: 0, 1: 3}}, PeerLost, {0: (1,)}, "left at or before this"),
    ("of a message, its rank that left, with what it raised", {0: message(1)},
     {"left": {1: 3}, "reasons": {1: WHY}}, PeerLost, {0: (1,)}, f"lost rank 1: rank 1 {WHY}$"),
    ("of a message, who has ended that its rank waits for", {0: message(1), 1: stopped(2, sequence=5)},
     {"lost": {2}}, PeerLost, {0: (2,)}, "its process was ended"),
    ("of a message, its rank with where it is", {0: message(1, gave_up=True)},
     {"whereabouts": WHERE}, CollectiveTimeout, {0: (1,)}, "waiting for rank 1: rank 1 is at train.py:31, load$"),
    ("of a message, its rank that failed otherwise", {0: message(1), 1: stopped(0, sequence=5)},
     {"lost": {1}, "left": {2: 0}}, CollectiveError, {0: ()}, "rank 1 failed in allreduce"),
    ("of a message, nobody else who ended or left", {0: message(1, gave_up=True)},
     {"lost": {3}, "left": {2: 0}}, CollectiveTimeout, {0: (1,)}, "waiting for rank 1"),
    ("nobody for a message that others know nothing of", {0: message(2, gave_up=True), 1: stopped(0, sequence=5)},
     {}, CollectiveError, {1: ()}, "rank 0 failed in recv("),
    ("the silent, not those that wait in vain for each other", {0: stopped(3, gave_up=True), 3: stopped(2), 1: stopped(0)},
     {}, CollectiveTimeout, {0: (2,), 3: (2,), 1: (2,)}, "not done after 3 s waiting for rank 2"),
    ("who came late", LATE, {}, CollectiveTimeout, {0: (2,), 1: (2,)}, "waiting for rank 2"),
    ("nobody on the rank that came late", LATE,
     {}, CollectiveTimeout, {2: ()}, "rank 0 gave up waiting for this rank, which arrived later"),
    ("who came late to one that finished alone", FINISHED_ALONE,  # a broadcast; the root gave up in the operation after it
     {}, CollectiveTimeout, {0: (1,)}, "waiting for rank 1"),
    ("nobody on the rank that came late to one that finished alone", FINISHED_ALONE,
     {}, CollectiveTimeout, {1: ()}, "gave up waiting for this rank"),
    ("nobody as waiting for itself", {rank: stopped(*{0, 1, 2} - {rank}, gave_up=True) for rank in range(3)},
     {}, CollectiveTimeout, {0: (1, 2), 1: (0, 2), 2: (0, 1)}, "not done after 3 s"),
    ("who called something else", {0: stopped(1, gave_up=True), 1: Report(4, OTHER, (0,)), 2: stopped(0)},
     {}, Mismatch, {2: ()}, f"ranks 0, 2 called {CALL}; rank 1 called {OTHER}; they differ in shape$"),
    ("who called something else and could finish it alone",
     {0: stopped(1, gave_up=True), 1: Report(5, CALL, (0,), gave_up=True, before=((4, OTHER),))},
     {}, Mismatch, {0: ()}, f"rank 0 called {CALL}; rank 1 called {OTHER}; they differ in shape$"),
    ("neither end of messages that do not arrive",  # rank 1 has finished what rank 0 waits for: all that it sent is lost
     {0: stopped(1, gave_up=True), 1: stopped(0, sequence=5, gave_up=True)},
     {}, CollectiveTimeout, {0: (), 1: ()}, "no message of rank 1 reaches rank 0"),
    ("nobody for a connection between the living", BROKEN,
     {}, CollectiveError, {0: ()}, "a connection to a living rank broke"),
    ("the other end of a connection that is known to have broken", BROKEN,
     {"cut": {(0, 1)}}, CollectiveError, {0: (1,)}, "a connection between ranks 0 and 1 broke"),
    ("the ends of a connection to a rank that says nothing", MUTE,  # as where nothing that it sends arrives
     {}, CollectiveError, {0: (1,), 3: ()}, "a connection between ranks 0 and 1 broke"),
    ("nobody for a connection to a rank that leaves later", MUTE,
     {"left": {1: 9}}, CollectiveError, {0: ()}, "to a living rank"),
    ("the pair whose large packets are lost, also on a third rank",
     {0: losing(stopped(1, gave_up=True)), 1: stopped(2, gave_up=True), 2: stopped(0)},
     {}, CollectiveTimeout, {0: (), 1: (), 2: ()}, "large from 0 to 1$"),
    ("who does not report, though what it is sent is lost too",
     {0: losing(stopped(1, gave_up=True)), 2: stopped(1, gave_up=True)},
     {}, CollectiveTimeout, {0: (1,), 2: (1,)}, "waiting for rank 1"),
    ("a connection over which nothing arrives, large or small",
     {0: losing(stopped(1, gave_up=True)), 1: stopped(0, gave_up=True)},
     {"cut": {(0, 1)}}, CollectiveTimeout, {0: (), 1: ()}, "messages are lost between ranks 0 and 1$"),
    ("the pair whose large packets are lost by a message",
     {0: losing(message(1, gave_up=True)), 1: message(0, gave_up=True)},
     {}, CollectiveTimeout, {0: (), 1: ()}, "large from 0 to 1$"),
    ("the link that loses messages, not ranks that wait in a circle",  # rank 2 hears nothing that it is sent, and is heard
     {rank: stopped((rank + 2) % 3, gave_up=True) for rank in range(3)},
     {"cut": {(0, 2), (1, 2)}}, CollectiveTimeout, {0: (), 1: ()},
     "messages are lost between ranks 0 and 2, between ranks 1 and 2"),
    ("who is waited for, on a rank that did not wait itself", {0: Report(4, CALL), 1: stopped(2, gave_up=True)},
     {}, CollectiveTimeout, {0: (2,)}, "rank 1 gave up"),
    ("nobody as late by the patience of others than who gave up",
     {0: stopped(1, gave_up=True), 1: Report(4, CALL, (0,), False, SECONDS, timeout_s=300.0)},
     {}, CollectiveTimeout, {1: (0,)}, "not done after 300 s waiting for rank 0: rank 0 gave up$"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("reports", "known", "kind", "named", "said"), [pytest.param(*row, id=name) for name, *row in VERDICTS]
)
def test_the_cause_is_named(
    reports: dict[int, Report],
    known: dict[str, Any],
    kind: type[CollectiveError],
    named: dict[int, tuple[int, ...]],
    said: str,
) -> None:
    for rank, culprits in named.items():
        findings = Findings(reports, difference=difference_of(reports), **known)
        error = verdict(findings, rank, detail="closed")
        assert (type(error), error.rank, error.ranks) == (kind, rank, culprits), str(error)
        assert said in f"{error}$"


def test_a_report_survives_its_way() -> None:
    report = stopped(1, 2, gave_up=True)
    for each in (report, losing(report)):
        assert Report.from_news(json.loads(json.dumps(each.to_news()))) == each


def test_an_inquiry_ends_when_the_dead_are_known() -> None:
    with channels(3) as (first, second, third):
        end_abruptly(third)
        second.report_failure(stopped(2).to_news())
        assert first.wait_for(lambda: bool(first.lost) and 1 in first.reports, 20)
        assert inquire(first, stopped(2), Agreement(first)) == Findings(
            {0: stopped(2), 1: stopped(2)}, frozenset({2}), {}
        )


def test_an_inquiry_of_a_message_waits_for_news_of_its_sender_not_of_a_rank_that_has_left() -> None:
    with channels(3) as (first, second, third):
        third.report_leaving(0)
        third.report_done()
        assert first.wait_for(lambda: bool(first.left), 20)
        ending = threading.Timer(GRACE_S / 4, end_abruptly, [second])
        ending.start()
        assert inquire(first, message(1), Agreement(first)).lost == {1}
        ending.join()


def test_an_inquiry_finds_who_speaks_but_does_not_hear(monkeypatch: pytest.MonkeyPatch) -> None:
    with channels(3) as (first, second, third):
        monkeypatch.setattr(first._monitor._neighbours[2], "is_unconfirmed", lambda: True)
        for channel in (second, third):
            channel.report_failure(stopped(0).to_news())
        assert inquire(first, stopped(2), Agreement(first)).cut == {(0, 2)}


def test_an_inquiry_ends_when_everyone_has_spoken() -> None:
    with channels(3) as (first, second, third):
        second.report_failure(stopped(0).to_news())
        third.report_leaving(9)
        third.report_done()
        assert inquire(first, stopped(1), Agreement(first)) == Findings(
            {0: stopped(1), 1: stopped(0)}, frozenset(), {2: 9}
        )
