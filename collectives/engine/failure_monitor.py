"""The monitor of failures: it ends the running operation if that cannot finish any more, and explains why it failed."""

from __future__ import annotations

import math
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from threading import get_ident
from typing import TypeVar

from gradwire.collectives.control.channel import Channel
from gradwire.collectives.diagnostics import whereabouts
from gradwire.collectives.diagnostics.mismatch import Agreement, Call, Maximum, is_equal_everywhere
from gradwire.collectives.diagnostics.postmortem import Report, inquire, verdict
from gradwire.collectives.diagnostics.stall import Position, Stalls
from gradwire.collectives.engine.join import Joined
from gradwire.collectives.errors import CollectiveError, ForgedMessage, LinkError
from gradwire.collectives.reduction import MOVED
from gradwire.collectives.transports.base import Transport

#: How long an operation may continue after a peer's process has ended: the peer's last messages may have arrived already.
LAST_WORDS_S = 0.5

#: How many of the last operations are compared with those of other ranks, and listed in a report. The root of a broadcast can
#: be further ahead; most ranks are one apart.
COMPARED_CALLS = 16

#: How often the running operation is checked, and how long one must have run before its call is posted.
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


class FailureMonitor:
    """Compares what this rank runs with the news of the other ranks. channel: the news. stall_warning_s: see Stalls.

    Attributes that a turn writes, and the Monitor's thread reads: sequence, the number of the last operation that began; running,
    its number while it runs, else -1; calls, the last operations by number modulo COMPARED_CALLS, as number and text; unagreed,
    the number of an operation while ranks still compare its call, else -1; where, the place of the running call in the user's
    code, or its thread; message, the running message and its other ranks. in_flight returns the number and the call of the
    first operation that was given to GPUs and is not done there, or None.

    Attributes for reading: failure, the error that has broken the Communicator; interrupted, whether the running operation was
    ended; joined, the ranks that have joined; agreement, which knows the calls on which all ranks have agreed. exiting: whether
    the process ends.
    """

    def __init__(self, transport: Transport, channel: Channel, stall_warning_s: float | None) -> None:
        self.sequence = self.running = self.unagreed = -1
        self.calls: list[tuple[int, str]] = [(-1, "")] * COMPARED_CALLS
        self.where: str | int = ""
        self.message: tuple[str, frozenset[int]] | None = None
        self.failure: CollectiveError | None = None
        self.interrupted = self.exiting = False
        self.joined = Joined(channel)
        self.agreement = Agreement(channel)
        self.in_flight: Callable[[], tuple[int, str] | None] = lambda: None
        self._transport = transport
        self._rank = transport.rank
        self._channel = channel
        self._explaining, self._is_explaining = threading.RLock(), False
        self._seen = (-1, 0.0)  # the operation that ran at the last check, and when a check first saw it
        self._vain_since = math.inf
        channel.on_news(weakly(self.on_news))
        self._stalls = Stalls(channel, stall_warning_s, weakly(self.position))
        _all.add(self)

    @property
    def unfinished(self) -> int:
        """The number of the first operation that this rank has not finished."""
        first, _ = self._first()
        return first if first >= 0 else self.sequence + 1

    def _first(self) -> tuple[int, dict[int, str]]:
        """Return the number of the first operation that runs, on GPUs or in this process, or -1; and the last calls by number,
        with that operation's."""
        calls = {sequence: text for sequence, text in self.calls if sequence >= 0}
        first = self.in_flight()
        if first is None:
            return self.running, calls
        return first[0], calls | dict([first])

    @property
    def is_broken(self) -> bool:
        """Return whether operations end without their results."""
        return self.interrupted or self.exiting or self.failure is not None

    @property
    def is_hopeless(self) -> bool:
        """Return whether the next operation cannot finish, as far as it is known."""
        channel = self._channel
        return self.is_broken or bool(channel.reports or channel.lost or channel.failure)

    def last_begun(self) -> int:
        """Return the number of the last turn in which an operation began."""
        return self.sequence

    def place(self) -> str:
        """Return the place of the running call in the user's code; empty if it is not known any more."""
        where = self.where
        if isinstance(where, str):
            return where
        return whereabouts.of_call(sys._getframe() if where == get_ident() else whereabouts.frame_of(where))

    def running_places(self) -> tuple[str, dict[int, str]]:
        """Return the running call, which runs on all ranks, and by rank its place in the user's code, for the ranks that post
        theirs in time."""
        text = dict(self.calls)[self.running]
        return text, self.agreement.places(self._call(self.running, text))

    def position(self) -> Position:
        """Return this rank's current Position, with the waits of its other Communicators. Any thread may call this."""
        elsewhere: tuple[str, ...] = ()
        with suppress(RuntimeError):  # while another thread makes a Communicator
            elsewhere = tuple(text for each in _all if each is not self and (text := each._position().waits_in))
        return replace(self._position(), elsewhere=elsewhere)

    def _position(self) -> Position:
        running, calls = self._first()
        is_running = running >= 0
        return Position(running if is_running else self.sequence, is_running, calls, self.message)

    def _call(self, sequence: int, text: str) -> Call:
        """Return one of the last calls, with its place if it runs."""
        return Call(sequence, text, self.place() if sequence == self.running else "", sequence != self.unagreed)

    def _absent(self, sequence: int) -> bool:
        """Return whether some rank takes no part in an operation, because it left before, or failed there or earlier."""
        channel = self._channel
        return any(first <= sequence for first in list(channel.left.values())) or any(
            report["sequence"] <= sequence for rank, report in list(channel.reports.items()) if rank != self._rank
        )

    def all_gone(self, peers: frozenset[int]) -> bool:
        """Return whether none of these ranks will send another message."""
        channel = self._channel
        return peers <= {*list(channel.lost), *list(channel.done), *list(channel.reports)}

    # What a turn calls before its operation

    def check_news(self) -> None:
        """Raise LinkError if news already shows that the operation cannot finish. Else announce it to ranks that have joined."""
        channel = self._channel
        if channel.failure:
            raise InVainError(f"this rank receives no news of the others: {channel.failure}")
        if channel.lost or self._absent(self.running):
            raise InVainError
        self.joined.announce(self.running, self.calls)

    def begin_message(self, call: str, peers: frozenset[int], deadline: float) -> float:
        """Note the message that is about to run, and its other ranks. Return its deadline (time.monotonic() seconds), which is
        soon if they are gone: their last messages may have arrived. Raises LinkError if it cannot finish."""
        self._vain_since = math.inf
        self.message = (call, peers)
        if not self._channel.has_news:
            return deadline
        if self._channel.failure:
            raise InVainError(f"this rank receives no news of the others: {self._channel.failure}")
        return min(deadline, time.monotonic() + LAST_WORDS_S) if self.all_gone(peers) else deadline

    def agree(self, signature: str, maximum: Maximum | None, deadline: float) -> None:
        """Compare the running call, which is new, with the calls of the other ranks, before any of its data moves. maximum: takes
        the maximum over all ranks, by the connections that carry data; None if these cannot tell it from the data of another
        call: then ranks post their calls. Raises as Agreement.agree()."""
        sequence, text = self.running, dict(self.calls)[self.running]

        def in_vain() -> bool:
            over = self.interrupted or self.exiting or self.failure is not None or bool(self._channel.failure)
            return over or self._absent(sequence)

        if maximum is None or not is_equal_everywhere(text, maximum):
            self.agreement.agree(self._call(sequence, text), deadline, in_vain, differs=maximum is not None)
        self.agreement.take(signature)
        self.unagreed = -1

    # What the Monitor's thread calls

    def on_news(self) -> float | None:
        """End the wait of the running operation if it cannot succeed, or if some rank made another call under its number.
        Return in how many seconds to check again, or None."""
        (running, calls), message = self._first(), self.message
        peers = frozenset() if message is None else message[1]
        self.joined.note_news()
        if running >= 0:
            self.joined.announce(running, self.calls)
        if self.interrupted or self.failure is not None:
            return None
        now, vain_since = time.monotonic(), math.inf
        if peers and self.all_gone(peers):
            vain_since = self._vain_since = min(self._vain_since, now)
        elif running >= 0 and self._absent(running):
            vain_since = -math.inf
        elif running >= 0:
            vain_since = min([*self._channel.lost.values(), math.inf])
        left_s = vain_since + LAST_WORDS_S - now
        if left_s <= 0 or self._differs(running, calls, now):
            self._interrupt()
            return None
        return min(left_s, _POLL_S)

    def _differs(self, running: int, calls: dict[int, str], now: float) -> bool:
        """Post the running call if it takes long. Return whether some rank made another call under a number that this rank
        remembers, and the operation cannot tell by itself."""
        if running != self._seen[0]:
            self._seen = (running, now)
        elif running in calls and now - self._seen[1] >= _LONG_S:
            self.agreement.post(self._call(running, calls[running]))
        return self.agreement.differs_from(calls, self.unagreed, self._call)

    def _interrupt(self) -> None:
        self.interrupted = True
        self._transport.abort()

    # How a Communicator breaks

    def break_off(self, call: str, why: str, sequence: int, reason: str = "") -> None:
        """Break the Communicator, and report that this rank takes no part in operations from `sequence` on. reason: the text of
        the exception that caused this."""
        self.failure = CollectiveError(f"interrupted by {why}", rank=self._rank, operation=call)
        self._channel.report_leaving(sequence, reason)
        self._transport.abort()

    def explain(
        self,
        error: LinkError,
        call: str,
        timeout_s: float,
        deadline: float,
        peers: frozenset[int] = frozenset(),
        sequence: int | None = None,
    ) -> CollectiveError:
        """Break the Communicator, report the failed operation to the other ranks, and return the error that says which rank
        caused it. timeout_s: the seconds from the start of the turn to the deadline. peers: the other ranks of a message.
        sequence: the number of an operation on GPUs, whose turn has ended; None: the last one that began."""
        with self._explaining:  # the watchdog and a turn may find the same failure
            if self.failure is not None:
                return self.failure.again(f"the Communicator broke in an earlier operation ({self.failure})", call)
            if self._is_explaining:  # a signal handler has interrupted this thread
                return CollectiveError(
                    "the Communicator breaks in an earlier operation", rank=self._rank, operation=call
                )
            if self.exiting:
                self.failure = CollectiveError("this process is exiting", rank=self._rank, operation=call)
                return self.failure
            self._is_explaining = True
            try:
                return self._explain(error, call, timeout_s, deadline, peers, sequence)
            finally:
                self._is_explaining = False

    def _explain(
        self,
        error: LinkError,
        call: str,
        timeout_s: float,
        deadline: float,
        peers: frozenset[int],
        sequence: int | None,
    ) -> CollectiveError:
        is_overdue = isinstance(error, OverdueError)
        others = self._channel.others if not isinstance(error, InVainError) else frozenset()
        awaited = frozenset() if is_overdue else error.awaited or peers or others
        if sequence is None:
            sequence = self.sequence + bool(peers)  # after a message this rank takes no part in the next operation
        report = Report(
            sequence,
            call,
            is_message=bool(peers),
            waiting_for=tuple(sorted(awaited - {self._rank})),
            gave_up=error.timed_out,
            waited_s=timeout_s if is_overdue else timeout_s - (deadline - time.monotonic()),
            timeout_s=timeout_s,
            before=tuple(sorted(done for done in self.calls if 0 <= done[0] < sequence)),
            place="" if peers else self.place(),
            sent=_sent(error) if peers else "",
            forged=() if not isinstance(error, ForgedMessage) or error.peer is None else (error.peer,),
            lossy=tuple(self._transport.lossy_paths().items()),
        )
        self._channel.report_failure(report.to_news())
        self.interrupted = True  # before what is aborted ends
        self._transport.abort()
        asked_at = self._stalls.ask()
        findings = inquire(self._channel, report, self.agreement)
        where = self._stalls.answers(asked_at, findings.reports.keys())
        self.failure = verdict(replace(findings, whereabouts=where), self._rank, str(error))
        return self.failure


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
_all: weakref.WeakSet[FailureMonitor] = weakref.WeakSet()
