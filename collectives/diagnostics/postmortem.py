"""After a failure: compare what every rank saw, and name the cause on every survivor.

A dead rank breaks its own connections only, so most survivors see a neighbour fail, not the culprit. The rule that finds it:
a rank writes down what it saw *before* it breaks its own connections, and reads what the others wrote before it blames
anyone. So a rank whose connections are broken and who wrote nothing is dead; one that others wait for and who wrote nothing
does not answer; and when everybody wrote, the calls written down differ.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Set
from dataclasses import asdict, dataclass

from torch.distributed.distributed_c10d import Store

from collectives.errors import CollectiveError, CollectiveTimeout, LinkError, Mismatch, PeerLost

#: How long survivors wait for each other's reports: a few round trips of a slow network, and a wake-up of a busy machine.
GRACE_S = 1.5
_POLL_S = 0.01


@dataclass(frozen=True)
class Report:
    """What one rank saw: its operation (number and call), which peers are gone, which it was waiting for."""

    sequence: int
    call: str
    gone: tuple[int, ...] = ()
    waiting_for: tuple[int, ...] = ()

    @classmethod
    def of(cls, error: LinkError, sequence: int, call: str, peers: Iterable[int], lost: Iterable[int]) -> Report:
        """peers: all other ranks; lost: those whose connections are broken, which means nothing after a timeout of our own."""
        if error.timed_out:
            return cls(sequence, call, waiting_for=tuple(error.awaited or peers))
        known = () if error.peer is None else (error.peer,)
        return cls(sequence, call, gone=tuple({*known, *lost}))


class Board:
    """Where the ranks of one Communicator leave their reports: the store of torch.distributed, under a prefix."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size

    def exchange(self, report: Report, ended: Set[int], after_writing: Callable[[], None]) -> dict[int, Report]:
        """Write this rank's report, call `after_writing`, and return all reports that arrive within the grace time.

        ended: ranks whose process is known to have ended; nobody waits for what they have not written. The store may be as dead
        as the peer that hosted it, so it is spoken to on a thread of its own.
        """
        reports = {self._rank: report}
        written = threading.Event()

        def speak() -> None:
            missing = set(range(self._size)) - {self._rank}
            try:
                self._store.set(f"report/{self._rank}", json.dumps(asdict(report)))
                written.set()
                until = time.monotonic() + GRACE_S
                while True:
                    for rank in [r for r in missing if self._store.check([f"report/{r}"])]:
                        fields = json.loads(self._store.get(f"report/{rank}"))
                        reports[rank] = Report(
                            fields["sequence"], fields["call"], tuple(fields["gone"]), tuple(fields["waiting_for"])
                        )
                        missing.discard(rank)
                    if missing <= ended or time.monotonic() > until:
                        return
                    time.sleep(_POLL_S)
            except RuntimeError:
                return  # the store's host is gone: what this rank saw itself must do
            finally:
                written.set()

        speaker = threading.Thread(target=speak, name="gradwire-postmortem", daemon=True)
        speaker.start()
        written.wait(GRACE_S)
        after_writing()
        speaker.join(GRACE_S + 0.5)
        return dict(reports)


def verdict(reports: dict[int, Report], rank: int, seconds: float, detail: str) -> CollectiveError:
    """The error that this rank raises, from all reports. seconds: the deadline that operations have."""
    mine = reports[rank]
    same_turn = {r: report.call for r, report in reports.items() if report.sequence == mine.sequence}
    if len(set(same_turn.values())) > 1:
        return Mismatch(same_turn, rank=rank, operation=mine.call)
    gone = {peer for report in reports.values() for peer in report.gone} - reports.keys()
    if gone:
        return PeerLost(gone, rank=rank, operation=mine.call, detail=detail)
    if not any(report.waiting_for for report in reports.values()):
        return CollectiveError(f"a connection to a living rank broke: {detail}", rank=rank, operation=mine.call)
    waited = {peer for report in reports.values() for peer in report.waiting_for}
    silent = waited - reports.keys()
    if not silent and len({report.sequence for report in reports.values()}) > 1:
        calls = {r: f"{report.call} as operation {report.sequence}" for r, report in reports.items()}
        return Mismatch(calls, rank=rank, operation=mine.call)
    return CollectiveTimeout(seconds, silent or waited, rank=rank, operation=mine.call)
