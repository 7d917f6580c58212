"""The cause of a failure, which every surviving rank finds from the reports of all ranks.

The end of a process breaks only its own connections, so most survivors see a neighbour fail, and not the cause. So
every rank sends a report to all others *before* it breaks its own connections, and waits for their reports before it
names a cause (the Monitor carries them). The cause is a rank whose process has ended without a report, or a rank that
has left. A rank that others wait for, and that does not report, does not answer. If all ranks have reported, their
calls differ, or messages are lost between two of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from typing import Any

from gradwire.collectives.control.channel import Channel
from gradwire.collectives.diagnostics.mismatch import Agreement, Call, first_difference, mismatch
from gradwire.collectives.errors import (
    CollectiveError,
    CollectiveTimeout,
    ForgedMessage,
    Mismatch,
    PeerLost,
    ranks_text,
)

#: How long survivors wait for each other's reports: a few round trips of a slow network, and a wake-up of a busy machine.
GRACE_S = 1.5

#: How long to wait for the ends of further processes, since those of one host end together, and for the reply of a rank
#: that lives although a connection to it has ended.
_TOGETHER_S = 0.2


@dataclass(frozen=True)
class Report:
    """Holds one rank's report of a failure.

    sequence, call: the number and the text of the operation that failed. waiting_for: the ranks for which this rank waited.
    gave_up: whether its own deadline has passed. waited_s: the seconds since the operation began, of the timeout_s that it may
    take. before: number and call of the last operations before it. is_message: whether the call is a message, which only some
    ranks know; sequence is then the number of the first operation in which this rank takes no part. place: of the call in the
    user's code, as 'file:line'. sent: the call that sent another message than this rank's recv expects; empty if none did.
    forged: the rank whose message was changed on the way to this one, or none. lossy: each rank whose host acknowledges nothing
    that this rank sends it, with an error text.
    """

    sequence: int
    call: str
    waiting_for: tuple[int, ...] = ()
    gave_up: bool = False
    waited_s: float = 0.0
    timeout_s: float = 0.0
    before: tuple[tuple[int, str], ...] = ()
    is_message: bool = False
    place: str = ""
    sent: str = ""
    forged: tuple[int, ...] = ()
    lossy: tuple[tuple[int, str], ...] = ()

    def to_news(self) -> dict[str, Any]:
        """Return the report as numbers, strings and lists, for from_news()."""
        return asdict(self)

    @classmethod
    def from_news(cls, news: Mapping[str, Any]) -> Report:
        """Return the report from which to_news() made news."""
        pairs = {name: tuple(map(tuple, news[name])) for name in ("before", "lossy")}
        ranks = {name: tuple(news[name]) for name in ("waiting_for", "forged")}
        return cls(**{**news, **ranks, **pairs})

    def calls(self) -> list[Call]:
        """Return the operations in the report, as Calls. A message is not one of them."""
        calls = [Call(sequence, call) for sequence, call in self.before]
        return calls if self.is_message else [*calls, Call(self.sequence, self.call, self.place)]


@dataclass(frozen=True)
class Findings:
    """Holds everything that a rank knows when it must name a cause.

    reports: by rank, this rank's own among them. lost: the ranks whose process has ended without an announcement, or
    whose host does not answer. left: the ranks that close the Communicator, with the number of the first operation in
    which each takes no part, in the order of their announcements. cut: pairs of ranks that live but are not connected
    any more. difference: each rank's call in the first operation whose calls differ. reasons: the exceptions with which
    ranks left. whereabouts: by rank, where it is, or that it does not answer.
    """

    reports: Mapping[int, Report]
    lost: Set[int] = frozenset()
    left: Mapping[int, int] = field(default_factory=dict)
    cut: Set[tuple[int, int]] = frozenset()
    difference: Mapping[int, Call] = field(default_factory=dict)
    reasons: Mapping[int, str] = field(default_factory=dict)
    whereabouts: Mapping[int, str] = field(default_factory=dict)

    def gone(self, sequence: int) -> set[int]:
        """Return the ranks that make an operation fail because they take no part in it: the lost ranks, else the rank
        that left before the earliest operation, or the first of several. sequence: the number of the operation.

        A rank that reported a failure before it ended is not the cause. A rank that left because of another one has
        issued as many operations or more. Their announcements arrive in any order.
        """
        leavers = [r for r, first in self.left.items() if first <= sequence and r not in self.reports]
        return set(self.lost - self.reports.keys() or sorted(leavers, key=self.left.__getitem__)[:1])


def inquire(channel: Channel, report: Report, agreement: Agreement) -> Findings:
    """Wait until the cause is known, and return the findings. The wait for the reports of all ranks takes at most
    GRACE_S seconds. report: this rank's own."""

    def reports() -> dict[int, Report]:
        news = {rank: Report.from_news(news) for rank, news in list(channel.reports.items())}
        return news | {channel.rank: report}

    def difference() -> dict[int, Call]:
        return difference_of(reports(), agreement.posted(), agreement.settled)

    def known() -> bool:
        reported = channel.reports.keys() | {channel.rank}
        concerned = frozenset(report.waiting_for) if report.is_message else channel.others
        left = (r for r, first in channel.left.items() if first <= report.sequence and r in concerned)
        return any(r not in reported for r in (*channel.lost, *left)) or channel.others <= reported | channel.done

    report_by = time.monotonic() + GRACE_S
    channel.wait_for(lambda: known() or bool(difference()), GRACE_S)
    if difference():
        channel.wait_for(lambda: known() or len(difference()) == channel.size, agreement.patience_s())
        return Findings(reports(), difference=difference())
    if not channel.lost:
        channel.report_unreachable(report_by - time.monotonic())
    if channel.lost:
        channel.wait_for(lambda: False, _TOGETHER_S)
    lost, left, cut = frozenset(channel.lost), dict(channel.left), frozenset(channel.cut)
    return Findings(reports(), lost, left, cut, difference(), dict(channel.reasons))


def verdict(findings: Findings, rank: int, detail: str) -> CollectiveError:
    """Return the error that this rank raises. detail: the text of the link's own error."""
    mine = findings.reports[rank]
    if forged := next(((peer, r) for r, report in sorted(findings.reports.items()) for peer in report.forged), None):
        return CollectiveError(str(ForgedMessage(*forged)), rank=rank, operation=mine.call, ranks=forged)
    if mine.is_message:
        return _of_message(findings, rank, detail)
    if findings.difference:
        return mismatch(findings.difference, rank, mine.call)
    if gone := findings.gone(mine.sequence):
        return _lost(findings, gone, rank, has_left=not gone & findings.lost)
    messages = {r: report for r, report in findings.reports.items() if report.is_message}
    if not any(report.gave_up for r, report in findings.reports.items() if r not in messages):
        # While a rank ends by an exception, its messages in flight may fail, which it reports too.
        if (first := next((r for r in findings.left if r in findings.reasons and r != rank), None)) is not None:
            return _lost(findings, {first}, rank, has_left=True)
        if messages:
            if (differs := _other_message(messages, rank, mine.call)) is not None:
                return differs
            return CollectiveError("; ".join(_failed_in(messages)), rank=rank, operation=mine.call)
        reported = findings.reports.keys() | findings.left.keys()  # other ranks that are awaited cannot be reached
        waits = [(r, peer) for r, each in findings.reports.items() for peer in each.waiting_for if peer not in reported]
        pairs = set(findings.cut) or {(min(pair), max(pair)) for pair in waits}
        there = {one if other == rank else other for one, other in pairs if rank in (one, other)}
        broke = f"a connection {_pairs_text(pairs) or 'to a living rank'} broke: {detail}"
        return CollectiveError(broke, rank=rank, operation=mine.call, ranks=there)
    waiting_for, why = _unanswered(findings.reports, rank, findings.cut)
    return _timeout(findings, waiting_for, rank, [why or ("" if waiting_for else detail)])


def _lost(findings: Findings, gone: Set[int], rank: int, *, has_left: bool) -> PeerLost:
    reasons = {r: findings.reasons[r] for r in sorted(gone & findings.reasons.keys())}
    return PeerLost(gone, rank=rank, operation=findings.reports[rank].call, has_left=has_left, reasons=reasons)


def _timeout(findings: Findings, waiting_for: Set[int], rank: int, reasons: Sequence[str]) -> CollectiveTimeout:
    mine = findings.reports[rank]
    where = [f"rank {r} {findings.whereabouts[r]}" for r in sorted(waiting_for & findings.whereabouts.keys())]
    detail = "; ".join(filter(None, [*reasons, *where]))
    return CollectiveTimeout(mine.timeout_s, waiting_for, rank=rank, operation=mine.call, detail=detail)


def _of_message(findings: Findings, rank: int, detail: str) -> CollectiveError:
    """Return the error of a message, whose cause is usually one of the ranks at its other end."""
    mine = findings.reports[rank]
    peers = set(mine.waiting_for)
    if (differs := _other_message(findings.reports, rank, mine.call)) is not None:
        return differs
    ended = findings.lost - findings.reports.keys()
    if gone := (peers & ended) or (ended if not mine.gave_up else set()):
        return _lost(findings, gone, rank, has_left=False)
    if gone := (peers & findings.left.keys()) - findings.reports.keys():
        return _lost(findings, gone, rank, has_left=True)
    failed = _failed_in({peer: findings.reports[peer] for peer in peers & findings.reports.keys()})
    if not mine.gave_up or mine.waited_s < mine.timeout_s / 2:  # the wait was ended before its deadline
        return CollectiveError("; ".join([*failed, detail]), rank=rank, operation=mine.call)
    if lossy := _lossy(findings.reports, findings.cut):
        return _timeout(findings, set(), rank, lossy)
    return _timeout(findings, peers, rank, failed if peers else [detail])


def _other_message(reports: Mapping[int, Report], rank: int, operation: str) -> Mismatch | None:
    """Return the error of a message that is not the one that its receiver expects; None if there is no such message."""
    for receiver, report in sorted(reports.items()):
        if report.sent:
            (sender,) = report.waiting_for
            return Mismatch({receiver: report.call, sender: report.sent}, rank=rank, operation=operation)
    return None


def _failed_in(reports: Mapping[int, Report]) -> list[str]:
    return [f"rank {rank} failed in {report.call}" for rank, report in sorted(reports.items())]


def difference_of(
    reports: Mapping[int, Report], posted: Iterable[tuple[int, Call]] = (), after: int = -1
) -> dict[int, Call]:
    """Return each rank's call in the first operation after number `after` whose calls differ; empty if there is none.
    posted: the calls that ranks posted before they failed, as pairs (rank, call)."""
    reported = ((rank, call) for rank, report in reports.items() for call in report.calls())
    return first_difference([*posted, *reported], after)


def _pairs_text(pairs: Set[tuple[int, int]]) -> str:
    return ", ".join(f"between ranks {a} and {b}" for a, b in sorted(pairs))


def _lossy(reports: Mapping[int, Report], cut: Set[tuple[int, int]]) -> list[str]:
    """Return the error texts of connections over which nothing arrives that one rank sends, although the report of the other one
    has arrived."""
    lossy = {(min(r, peer), max(r, peer)): text for r, report in reports.items() for peer, text in report.lossy}
    return [text for pair, text in sorted(lossy.items()) if pair not in cut and reports.keys() >= set(pair)]


def _unanswered(reports: Mapping[int, Report], rank: int, cut: Set[tuple[int, int]]) -> tuple[set[int], str]:
    """Return the ranks that did not answer before a deadline, and more detail as text. No rank is gone, and the calls
    are equal."""
    gave_up = {r for r, report in reports.items() if report.gave_up and not report.is_message}
    who = "" if rank in gave_up else f"{ranks_text(gave_up)} gave up"
    waited = {peer for report in reports.values() for peer in report.waiting_for}
    if silent := waited - reports.keys():
        return silent, who
    if lossy := _lossy(reports, cut):
        return set(), "; ".join(lossy)
    if unbegun := {r for r in gave_up if not reports[r].waiting_for}:  # its deadline passed before its turn came
        return unbegun - {rank}, who
    first = min(report.sequence for report in reports.values())
    unreached = sorted(
        (peer, r)
        for r, report in reports.items()
        for peer in report.waiting_for
        # A rank that has finished has sent everything, and one that gave up was ready to receive it.
        if report.gave_up and report.sequence == first and reports[peer].sequence > first
    )
    if unreached:
        return set(), "; ".join(f"no message of rank {sender} reaches rank {r}" for sender, r in unreached)
    patience_s = min(reports[r].timeout_s for r in gave_up)
    late = {r for r in waited - gave_up if reports[r].waited_s < patience_s / 2}
    if rank in late:
        return set(), f"{who} waiting for this rank, which arrived later"
    if cut and not late:
        return set(), f"messages are lost {_pairs_text(cut)}"
    return late or set(reports[rank].waiting_for) - {rank} or waited - {rank}, who
