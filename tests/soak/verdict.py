"""Judge what the ranks of a world reported: every way to fall short, counted by its kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from tests.harness import Outcome
from tests.soak.faults import CLOSES, DISAGREES, HARMLESS, SILENT, STOPPED, Fault, FaultOfOne
from tests.soak.meetings import MeetingFault
from tests.soak.ranks import Report, Witness
from tests.soak.rules import TrainingFault

LATE_S = 10.0  # longer than any busy machine delays what takes no time
TEXT_CHARACTERS = 3000


class Kind(Enum):
    """The columns of the table."""

    HANG = "hangs"
    ABORT = "aborts"
    WRONG = "wrong"
    REPLICAS = "replicas differ"
    INNOCENT = "innocents blamed"
    NO_CULPRIT = "culprit not named"
    LATE = "late news"


@dataclass(frozen=True)
class Finding:
    """One way in which a world fell short."""

    kind: Kind
    text: str


def judge_session(members: Sequence[int], outcomes: Sequence[Outcome]) -> list[Finding]:
    """What was wrong with a session, in which nobody was to fail. members: the ranks that took part."""
    found = [finding for outcome in outcomes for finding in _of_outcome(outcome, expected_exit=None)]
    reports = {outcome.rank: outcome.value for outcome in outcomes if isinstance(outcome.value, Report)}
    for rank, report in reports.items():
        found += [Finding(Kind.WRONG, f"rank {rank}: {text}") for text in report.wrong]
    found += compare_replicas({rank: report for rank, report in reports.items() if rank in members})
    guilty = {outcome.rank for outcome in outcomes if outcome.status != "returned"}
    guilty |= {
        r for r, report in reports.items() if report.witness is not None and not _tells_of_others(report.witness)
    }
    for rank, report in reports.items():
        if report.witness is None:
            continue
        accused = set(report.witness.blamed) - guilty
        kind = Kind.INNOCENT if accused or (report.witness.calls and not guilty) else Kind.WRONG
        if rank in guilty or not guilty or accused:
            found.append(Finding(kind, _said(rank, report)))
    return found


def judge_fault(
    fault: Fault | TrainingFault, outcomes: Sequence[Outcome], reports: Mapping[int, Report], failed_at: float | None
) -> list[Finding]:
    """What was wrong with a world in which one rank failed. reports: of those that wrote one; failed_at: time.monotonic()."""
    found = _of_outcomes(fault, outcomes, failed_at)
    affected = _affected(fault)
    found += compare_replicas({rank: report for rank, report in reports.items() if rank in affected})
    for rank, report in reports.items():
        found += [Finding(Kind.WRONG, f"rank {rank}: {text}") for text in report.wrong]
    witnesses = _witnesses(reports)
    if failed_at is None:
        found += [Finding(Kind.WRONG, f"before the fault: {_said(rank, reports[rank])}") for rank in witnesses]
        return found or [Finding(Kind.WRONG, "the world ended before the fault")]
    if fault.is_outlived:
        for rank, witness in witnesses.items():
            blames = fault.kind in HARMLESS and _tells_of_others(witness)
            found.append(Finding(Kind.INNOCENT if blames else Kind.WRONG, _said(rank, reports[rank])))
        return found
    for rank in affected:
        if rank in reports:
            found += _of_testimony(fault, rank, reports[rank], failed_at)
    return found


def judge_meeting(
    fault: MeetingFault,
    outcomes: Sequence[Outcome],
    reports: Mapping[int, Report],
    failed_at: float | None,
    arrived: bool,
) -> list[Finding]:
    """What was wrong with a world in which one rank failed while the ranks met. arrived: whether it had arrived by then, so that
    the others could know of its end at once. reports, failed_at: as of judge_fault()."""
    found = _of_outcomes(fault, outcomes, failed_at)
    for rank, report in reports.items():
        witness = report.witness
        if witness is None or failed_at is None:
            found.append(Finding(Kind.WRONG, f"rank {rank} reports {report}, and no fault"))
            continue
        said = _said(rank, report)
        if set(witness.blamed) - {fault.victim}:
            found.append(Finding(Kind.INNOCENT, said))
        if fault.victim not in witness.blamed:
            found.append(Finding(Kind.NO_CULPRIT, said))
        patience_s = LATE_S if arrived and fault.kind != STOPPED else LATE_S + fault.timeout_s
        if witness.raised - failed_at > patience_s:
            found.append(Finding(Kind.LATE, f"after {witness.raised - failed_at:.1f} s: {said}"))
    return found


def compare_replicas(reports: Mapping[int, Report]) -> list[Finding]:
    """Results that must be the same on all ranks, where several had them."""
    found = []
    for position in sorted({position for report in reports.values() for position in report.digests}):
        digests = {rank: r.digests[position] for rank, r in reports.items() if position in r.digests}
        if len(set(digests.values())) > 1:
            found.append(Finding(Kind.REPLICAS, f"operation {position}: digests by rank {digests}"))
    return found


def _affected(fault: FaultOfOne) -> tuple[int, ...]:
    """The ranks that live on, and that a fault is to be told of."""
    return fault.reporting if fault.kind != CLOSES else fault.survivors


def _witnesses(reports: Mapping[int, Report]) -> dict[int, Witness]:
    return {rank: report.witness for rank, report in reports.items() if report.witness is not None}


def _of_outcomes(fault: FaultOfOne, outcomes: Sequence[Outcome], failed_at: float | None) -> list[Finding]:
    """Judge how ranks ended; one that was stopped does not."""
    found: list[Finding] = []
    for outcome in outcomes:
        failed = outcome.rank == fault.victim and failed_at is not None
        if not (failed and fault.kind == STOPPED):
            found += _of_outcome(outcome, fault.exit_code if failed else 0)
    return found


def _of_outcome(outcome: Outcome, expected_exit: int | None) -> Iterable[Finding]:
    """expected_exit: the code with which a rank was to leave; None where it was to stay."""
    if outcome.status == "hung":
        yield Finding(Kind.HANG, _stacks(outcome)[:TEXT_CHARACTERS])
    elif outcome.status == "raised":
        yield Finding(Kind.WRONG, f"{outcome}"[-TEXT_CHARACTERS:])
    elif outcome.status == "died" and outcome.exit_code != expected_exit:
        yield Finding(Kind.ABORT, _stacks(outcome)[:TEXT_CHARACTERS])


def _stacks(outcome: Outcome) -> str:
    return "\n".join(line for line in str(outcome).splitlines() if not line.startswith("Extension modules"))


def _of_testimony(fault: Fault | TrainingFault, rank: int, report: Report, failed_at: float) -> Iterable[Finding]:
    witness = report.witness
    if witness is None:
        yield Finding(Kind.NO_CULPRIT, f"rank {rank}: {report.done} operations ended as if nothing had happened")
        return
    said = _said(rank, report)
    culprits = fault.culprits(rank)
    across = [(one in culprits) != (other in culprits) for one, other in witness.apart if fault.kind in SILENT]
    if not _tells_of_others(witness) and not across:
        yield Finding(Kind.NO_CULPRIT, said)
        return
    alive = fault.kind in (STOPPED, DISAGREES)
    innocents = set(witness.blamed) - culprits or not all(across)
    if innocents or (alive and witness.kind == "PeerLost") or (witness.calls and fault.kind not in (DISAGREES, CLOSES)):
        yield Finding(Kind.INNOCENT, said)
    if not culprits & {*witness.blamed, *witness.calls} and not any(across):
        yield Finding(Kind.NO_CULPRIT, said)
    elif fault.kind == DISAGREES and not witness.calls:
        yield Finding(Kind.NO_CULPRIT, f"{said} (a Mismatch was to be told)")
    since = max(witness.waited_since, failed_at)
    if witness.raised - since > LATE_S + fault.silence_s:
        yield Finding(Kind.LATE, f"after {witness.raised - since:.1f} s: {said}")


def news_s(fault: FaultOfOne, reports: Mapping[int, Report], failed_at: float | None) -> float | None:
    """Return how long the slowest rank took to hear of a fault; None where one that was to hear of it did not."""
    witnesses = _witnesses(reports)
    affected = _affected(fault)
    if failed_at is None or not witnesses.keys() >= set(affected):
        return None
    return max(witnesses[rank].raised - max(witnesses[rank].waited_since, failed_at) for rank in affected)


def _tells_of_others(witness: Witness) -> bool:
    """Whether it says who is to blame, and is no failure of this rank's own."""
    return witness.kind in ("PeerLost", "QuorumLost", "CollectiveTimeout", "Mismatch")


def _said(rank: int, report: Report) -> str:
    assert report.witness is not None
    return f"rank {rank}: {report.witness.kind}: {report.witness.text[-TEXT_CHARACTERS:]} [during {report.during}]"
