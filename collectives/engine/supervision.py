"""Supervises the running operation: ends it if it cannot finish any more, and explains its failure."""

from __future__ import annotations

import math
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from threading import get_ident
from typing import TypeVar

from gradwire.collectives.control.channel import Channel
from gradwire.collectives.diagnostics import whereabouts
from gradwire.collectives.diagnostics.mismatch import Agreement, Call
from gradwire.collectives.diagnostics.postmortem import Report, inquire, verdict
from gradwire.collectives.diagnostics.stall import Position, Stalls
from gradwire.collectives.engine.join import Joined
from gradwire.collectives.errors import CollectiveError, LinkError
from gradwire.collectives.reduction import MOVED
from gradwire.collectives.transports.base import Transport

#: How long an operation may continue after a peer's process has ended: the peer's last messages may have arrived already.
LAST_WORDS_S = 0.5

#: How many of the last operations are compared with those of other ranks, and listed in a report. The root of a broadcast can
#: be further ahead; most ranks are one apart.
COMPARED_CALLS = 16

#: How often compare_calls() checks the running operation, and how long one must have run before it is posted.
_POLL_S, _LONG_S = 0.25, 0.2

_Result = TypeVar("_Result")


class InVainError(LinkError):
    """An operation was not begun, because it could not have finished."""

    def __init__(self, why: str = "known before it began") -> None:
        super().__init__(None, timed_out=False, detail=why)


class OverdueError(LinkError):
    """The time of an operation passed before its turn came."""

    def __init__(self) -> None:
        why = "a function that was to be called after an earlier operation has not returned"
        super().__init__(None, timed_out=True, detail=why)


class Supervision:
    """Compares what this rank runs with the news of the other ranks.

    Operations, which derives from this class, writes what runs to its attributes. The Monitor's thread reads them, from
    construction on. watch: the news of the other ranks. stall_warning_s: see Stalls."""

    def __init__(self, transport: Transport, watch: Channel, stall_warning_s: float | None) -> None:
        self._transport = transport
        self._rank = transport.rank
        self._watch = watch
        self.joined = Joined(watch)
        self._agreement = Agreement(watch)
        self._sequence = -1  # of the last turn that began
        self._running = -1
        self._seen = (-1, 0.0)  # the operation that ran at the last check, and when a check first saw it
        self._calls: list[tuple[int, str]] = [(-1, "")] * COMPARED_CALLS  # the last calls that are agreed upon or known
        self._where: str | int = ""  # place of the running call in the user's code, or its thread
        self._call = ""  # the last call that run_now() did not run
        self._message: tuple[str, frozenset[int]] | None = None  # the running message, and its other ranks
        self._vain_since = math.inf
        self._interrupted = False
        self._failure: CollectiveError | None = None
        self._exiting = False  # whether the process ends
        watch.on_news(weakly(self.on_news))
        if transport.size > 1:
            watch.on_news(weakly(self.compare_calls))
        self._stalls = Stalls(watch, stall_warning_s, weakly(self.position))
        _all.add(self)

    @property
    def has_failed(self) -> bool:
        """Return whether an operation has failed, after which no other can run."""
        return self._failure is not None

    @property
    def _unfinished(self) -> int:
        """Return the number of the first operation that this rank has not finished."""
        return self._running if self._running >= 0 else self._sequence + 1

    def _last_begun(self) -> int:
        """Return the number of the last turn in which an operation began."""
        return self._sequence

    def _place(self) -> str:
        """Return the place of the running call in the user's code; empty if it is not known any more."""
        where = self._where
        if isinstance(where, str):
            return where
        return whereabouts.of_call(sys._getframe() if where == get_ident() else whereabouts.frame_of(where))

    def running_places(self) -> tuple[str, dict[int, str]]:
        """Return the running call, which runs on all ranks, and by rank its place in the user's code, for the ranks that post
        theirs in time."""
        call = self._recent_calls()[self._running]
        return call, self._agreement.places(Call(self._running, call, self._place()))

    def position(self) -> Position:
        """Return this rank's current Position, with the waits of its other Communicators. Any thread may call this."""
        elsewhere: tuple[str, ...] = ()
        with suppress(RuntimeError):  # while another thread makes a Communicator
            elsewhere = tuple(text for each in _all if each is not self and (text := each._position().waits_in))
        return replace(self._position(), elsewhere=elsewhere)

    def _position(self) -> Position:
        running = self._running
        is_running = running >= 0
        return Position(running if is_running else self._sequence, is_running, self._recent_calls(), self._message)

    def _recent_calls(self) -> dict[int, str]:
        """Return the last calls, by number, with the running one even if it is not agreed upon yet."""
        running, calls = self._running, dict(self._calls)
        if running >= 0:
            calls.setdefault(running, self._call)
        return calls

    def _absent(self, sequence: int) -> bool:
        """Return whether some rank takes no part in an operation, because it left before, or failed there or earlier."""
        watch = self._watch
        return any(first <= sequence for first in list(watch.left.values())) or any(
            report["sequence"] <= sequence for rank, report in list(watch.reports.items()) if rank != self._rank
        )

    def all_gone(self, peers: frozenset[int]) -> bool:
        """Return whether none of these ranks will send another message."""
        watch = self._watch
        return peers <= {*list(watch.lost), *list(watch.done), *list(watch.reports)}

    def _check_news(self, sequence: int) -> None:
        """Raise LinkError if news already shows that an operation cannot finish. Else announce it to ranks that have joined."""
        watch = self._watch
        if watch.failure:
            raise InVainError(f"this rank receives no news of the others: {watch.failure}")
        if watch.lost or self._absent(sequence):
            raise InVainError
        self.joined.announce(sequence, self._recent_calls().items())

    def on_news(self) -> float | None:
        """End the wait of the running operation if it cannot succeed. Return in how many seconds to check again, or None."""
        running, message = self._running, self._message
        peers = frozenset() if message is None else message[1]
        self.joined.note_news()
        if running >= 0:
            self.joined.announce(running, self._recent_calls().items())
        if self._interrupted:
            return None
        now, vain_since = time.monotonic(), math.inf
        if peers and self.all_gone(peers):
            vain_since = self._vain_since = min(self._vain_since, now)
        elif running >= 0 and self._absent(running):
            vain_since = -math.inf
        elif running >= 0:
            vain_since = min([*self._watch.lost.values(), math.inf])
        left_s = vain_since + LAST_WORDS_S - now
        if left_s <= 0:
            self._interrupt()
        return left_s if 0 < left_s < math.inf else None

    def compare_calls(self) -> float | None:
        """Post the running call if it takes long, and end it if some rank made another call under a number that this rank
        remembers. Return in how many seconds to check again, or None."""
        if self._failure is not None or self._interrupted:
            return None
        running = self._running
        calls = {sequence: call for sequence, call in self._calls if sequence >= 0}

        def call_of(sequence: int) -> Call:
            return Call(sequence, calls[sequence], self._place() if sequence == self._running else "", moved=True)

        now = time.monotonic()
        if running != self._seen[0]:
            self._seen = (running, now)
        elif running in calls and now - self._seen[1] >= _LONG_S:
            self._agreement.post(call_of(running))
        if self._agreement.differs_from(calls, call_of):
            self._interrupt()
        return _POLL_S

    def _interrupt(self) -> None:
        self._interrupted = True
        self._transport.abort()

    def _break(self, call: str, why: str, sequence: int, reason: str = "") -> None:
        """Break the Communicator, and report that this rank takes no part in operations from `sequence` on. reason: the text of
        the exception that caused this."""
        self._failure = CollectiveError(f"interrupted by {why}", rank=self._rank, operation=call)
        self._watch.report_leaving(sequence, reason)
        self._transport.abort()

    def _explain(
        self, error: LinkError, call: str, timeout_s: float, deadline: float, peers: frozenset[int]
    ) -> CollectiveError:
        """Report a failed operation to the other ranks, and return the error that says which rank caused it. The arguments: see
        Operations._failed()."""
        if self._exiting:
            return CollectiveError("this process is exiting", rank=self._rank, operation=call)
        is_overdue = isinstance(error, OverdueError)
        others = self._watch.others if not isinstance(error, InVainError) else frozenset()
        awaited = frozenset() if is_overdue else error.awaited or peers or others
        sequence = self._sequence + bool(peers)  # after a message this rank takes no part in the next operation
        report = Report(
            sequence,
            call,
            is_message=bool(peers),
            waiting_for=tuple(sorted(awaited - {self._rank})),
            gave_up=error.timed_out,
            waited_s=timeout_s if is_overdue else timeout_s - (deadline - time.monotonic()),
            timeout_s=timeout_s,
            before=tuple(sorted(done for done in self._calls if 0 <= done[0] < sequence)),
            place="" if peers else self._place(),
            sent=_sent(error) if peers else "",
            lossy=tuple(self._transport.lossy_paths().items()),
        )
        self._watch.report_failure(report.to_news())
        self._transport.abort()
        asked_at = self._stalls.ask()
        findings = inquire(self._watch, report, self._agreement)
        where = self._stalls.answers(asked_at, findings.reports.keys())
        return verdict(replace(findings, whereabouts=where), self._rank, str(error))


def _sent(error: LinkError) -> str:
    """Return the call of a rank that sent a message of another kind or length; empty for any other error."""
    kind, nbytes = error.found
    if kind == 0:
        return ""
    dtype = MOVED[kind - 1]
    return f"send({str(dtype).removeprefix('torch.')}[{nbytes // dtype.itemsize}])"


def weakly(method: Callable[[], _Result]) -> Callable[[], _Result | None]:
    """Return a function that calls a method while its object lives, and does not keep the object alive."""
    weak = weakref.WeakMethod(method)

    def call() -> _Result | None:
        alive = weak()
        return None if alive is None else alive()

    return call


#: Those of this process. A report of a stall names the waits of all of them.
_all: weakref.WeakSet[Supervision] = weakref.WeakSet()
