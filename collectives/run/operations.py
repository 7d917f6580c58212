"""The operations of one Communicator, one at a time: their order, numbers, deadlines and failures."""

from __future__ import annotations

import math
import sys
import time
import weakref
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from threading import get_ident, main_thread
from typing import TypeVar

from gradwire.collectives.diagnostics import whereabouts
from gradwire.collectives.diagnostics.mismatch import ANY_CALL, Agreement, Call
from gradwire.collectives.diagnostics.postmortem import Report, inquire, verdict
from gradwire.collectives.diagnostics.stall import Position, Stalls
from gradwire.collectives.errors import CollectiveError, LinkError, Mismatch, PeerJoined
from gradwire.collectives.link.base import Transport
from gradwire.collectives.link.watch import Watch
from gradwire.collectives.reduction import DTYPES
from gradwire.collectives.run.joined import Joined
from gradwire.collectives.run.work import Work, WorkQueue

_ENDED = "the wait was ended, because another rank no longer takes part"

#: How long an operation may continue after a peer's process has ended: the peer's last messages may have arrived already.
LAST_WORDS_S = 0.5

#: How many of the last operations are compared with those of other ranks, and listed in a report. The root of a broadcast can
#: be further ahead; most ranks are one apart.
_REMEMBERED = 16

#: How often compare_calls() checks the running operation, and how long one must have run before it is posted.
_POLL_S, _LONG_S = 0.25, 0.2

#: The factor of a multiplicative hash (Knuth 1973, 6.4): successive numbers get tags that are far apart.
_SPREAD = 0x9E3779B1


def digest(call: str) -> int:
    """Return a hash of a call's text."""
    return zlib.crc32(call.encode())


_First = TypeVar("_First")
_Result = TypeVar("_Result")
_Second = TypeVar("_Second")


@dataclass(frozen=True, slots=True)
class Turn:
    """One operation's turn: its number, the text of its call (the same on all ranks), its deadline (time.monotonic()), and the
    tag of its messages.

    Ranks that call different operations use different tags, so that no rank receives a message of another shape. Segment i of a
    buffer uses the tag plus i, within 31 bits.
    """

    sequence: int
    call: str
    deadline: float
    tag: int


class _InVainError(LinkError):
    """An operation was not begun, because it could not have finished."""

    def __init__(self, why: str = "known before it began") -> None:
        super().__init__(None, timed_out=False, detail=why)


class Operations:
    """Runs operations in the order of issue. watch: ClosableOperations closes it. timeout_s: seconds that each operation may
    take from its start, unless submit() is given another limit; the attribute can be changed. stall_warning_s: see
    Stalls."""

    def __init__(
        self, transport: Transport, watch: Watch, timeout_s: float, stall_warning_s: float | None = None
    ) -> None:
        self._transport = transport
        self._rank = transport.rank
        self.timeout_s = timeout_s
        self._watch = watch
        self.joined = Joined(watch)
        self._sequence = -1  # of the last turn that began
        self._queue = WorkQueue("gradwire", weakly(self._last_begun) if transport.interruptible else None)
        self._agreement = Agreement(watch)
        self._known = self._agreement.known
        self._calls: list[tuple[int, str]] = [(-1, "")] * _REMEMBERED  # the last calls that are agreed upon or known
        self._running = -1
        self._seen = (-1, 0.0)  # the operation that ran at the last check, and when a check first saw it
        self._where: str | int = ""  # place of the running call in the user's code, or its thread
        self._call = ""  # the last call that run_now did not run
        self._message: tuple[str, frozenset[int]] | None = None  # the running message, and its other ranks
        self._vain_since = math.inf
        self._interrupted = False
        self._beside_work = False
        self._failure: CollectiveError | None = None
        self._exiting = False  # ClosableOperations.exit() sets it
        watch.on_news(weakly(self.on_news))
        if transport.size > 1:
            watch.on_news(weakly(self.compare_calls))
        self._stalls = Stalls(watch, stall_warning_s, weakly(self.position))
        _all.add(self)

    @property
    def usable(self) -> bool:
        """Whether an operation can still run."""
        return self._failure is None and not self._queue.sealed

    @property
    def has_failed(self) -> bool:
        """Whether an operation has failed, after which no other can run."""
        return self._failure is not None

    @property
    def issued(self) -> int:
        """How many operations this rank has issued."""
        return self._queue.issued

    def fail(self) -> None:
        """Raise the failure that other ranks have reported. A joined rank needs this, since it calls no operation that would
        raise the failure."""

        def in_vain(turn: Turn) -> None:
            raise _InVainError

        self._agreement.take(ANY_CALL)
        self.submit(ANY_CALL, in_vain, async_op=False)

    def settle(self) -> None:
        """Wait until all issued operations have ended, with or without an error."""
        self._enqueue(Work(self._rank, "join", lambda: None, counted=False), False)

    def _last_begun(self) -> int:
        return self._sequence

    @property
    def _unfinished(self) -> int:
        """The number of the first operation that this rank has not finished."""
        return self._running if self._running >= 0 else self._sequence + 1

    def submit(
        self,
        call: str,
        body: Callable[[Turn], None],
        *,
        async_op: bool,
        signature: str | None = None,
        timeout_s: float | None = None,
    ) -> Work | None:
        """Run `body` in its turn; with async_op, return its Work at once. Turns are numbered in the order of issue, which is
        arbitrary for calls from several threads. signature: the part of `call` that decides whether the call is known; None
        means all of it. timeout_s: seconds that this operation may take from its start; None: the attribute
        timeout_s."""
        self._check(call)
        signature = signature or call
        if not async_op:
            turn = object()
            try:
                if self._queue.enter(turn):
                    self._take_turn(call, signature, body, timeout_s, get_ident())
                    return None
            finally:
                self._queue.leave(turn, self._sequence)
        place = whereabouts.of_call(sys._getframe())
        turn_of_queue = partial(self._take_turn, call, signature, body, timeout_s, place)
        return self._enqueue(Work(self._rank, call, turn_of_queue), async_op)

    def _enqueue(self, work: Work, async_op: bool) -> Work | None:
        """Run a work on the queue's thread; return it, or with async_op=False wait until it is done."""
        self._queue.submit(work)
        if async_op:
            return work
        work.wait()
        return None

    def submit_message(
        self,
        call: str,
        peers: frozenset[int],
        body: Callable[[float], None],
        *,
        async_op: bool,
        at_once: bool = True,
    ) -> Work | None:
        """Run body(deadline), a part of a message's transfer, in its turn. With async_op, return its Work, or None if the body
        has run at once, which at_once=False prevents. The turn has no number, since only `peers` take part in it."""
        self._check(call)
        if at_once and self.try_message(call, peers, body):
            return None
        turn_of_queue = partial(self._take_message_turn, call, peers, body)
        return self._enqueue(Work(self._rank, call, turn_of_queue, counted=False), async_op)

    def try_message(self, call: str, peers: frozenset[int], body: Callable[[float], None]) -> bool:
        """Run body(deadline) if no other turn runs or waits; else return False, with nothing done."""
        turn = object()
        try:
            if self._failure is not None or not self._queue.enter(turn, counted=False):
                return False
            self._take_message_turn(call, peers, body)
            return True
        finally:
            self._queue.leave(turn, self._sequence)

    def run_now(
        self,
        call: str,
        call_digest: int,
        body: Callable[[_First, _Second, int, float], None],
        first: _First,
        second: _Second,
    ) -> bool:
        """Run body(first, second, tag, deadline) in the calling thread, with the least overhead. Return False, with nothing
        done, if another operation runs or waits, the Communicator is broken, or the call is new. call_digest: digest(call)."""
        turn = object()
        try:
            if self._failure is not None or not self._queue.enter(turn) or call not in self._known:
                return False
            timeout_s = self.timeout_s
            deadline = time.monotonic() + timeout_s
            try:
                sequence = self._queue.number  # as in _take_turn(), but inlined
                if self._beside_work:
                    self._beside_work = False
                    self._transport.wait_beside_work(False)
                self._where = get_ident()
                self._calls[sequence % _REMEMBERED] = (sequence, call)
                self._running = self._sequence = sequence
                if self._watch.has_news:
                    self._check_news(sequence)
                body(first, second, (call_digest + sequence * _SPREAD) % 2**30, deadline)
                if self._interrupted:
                    raise LinkError(None, timed_out=False, detail=_ENDED)
                if self.joined.refused == sequence:
                    raise PeerJoined(self.joined.absent, rank=self._rank, operation=call)
            except BaseException as error:
                raise self._failed(error, call, timeout_s, deadline) from None
            finally:
                self._running = -1
        finally:
            self._queue.leave(turn, self._sequence)
        return True

    def _check(self, call: str, *, was_queued: bool = False) -> None:
        """Raise a CollectiveError of the same kind as the failure if the Communicator is broken."""
        failure = self._failure
        if failure is not None:
            message = f"the Communicator is broken since an earlier failure ({failure}); make a new one"
            if was_queued:
                message = f"not run, the Communicator broke before ({failure})"
            raise failure.again(message, call) from failure

    def _take_turn(
        self,
        call: str,
        signature: str,
        body: Callable[[Turn], None],
        timeout_s: float | None,
        where: str | int,
    ) -> None:
        """Run an operation in its turn. where: the place of the call in the user's code, or the thread that makes it. The other
        arguments: see submit()."""
        self._check(call, was_queued=True)
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        try:
            self._call = call
            is_new = signature not in self._known
            if is_new and self._transport.size == 1:
                self._agreement.take(signature)
                is_new = False
            sequence = self._queue.number
            self.wait_beside_work(_is_beside_work())
            self._where = where
            if not is_new:
                self._calls[sequence % _REMEMBERED] = (sequence, call)
            self._running = self._sequence = sequence
            if self._watch.has_news:
                self._check_news(sequence)
            if is_new:
                self._agree(call, signature, deadline)
            body(Turn(sequence, call, deadline, (digest(call) + sequence * _SPREAD) % 2**30))
            if self._interrupted:  # a backend's wait may end without an error then, as NCCL's does
                raise LinkError(None, timed_out=False, detail=_ENDED)
            if self.joined.refused == sequence:
                raise PeerJoined(self.joined.absent, rank=self._rank, operation=call)
        except BaseException as error:
            raise self._failed(error, call, timeout_s, deadline) from None
        finally:
            self._running = -1

    def _take_message_turn(self, call: str, peers: frozenset[int], body: Callable[[float], None]) -> None:
        self._check(call, was_queued=True)
        timeout_s = self.timeout_s
        deadline = time.monotonic() + timeout_s
        try:
            self.wait_beside_work(_is_beside_work())
            self._vain_since = math.inf
            self._message = (call, peers)
            end = deadline
            if self._watch.has_news:
                if self._watch.failure:
                    self._check_news(self._sequence)
                if self.all_gone(peers):  # but their last messages may have arrived
                    end = min(deadline, time.monotonic() + LAST_WORDS_S)
            body(end)
            if self._interrupted:
                raise LinkError(None, timed_out=False, detail=_ENDED, awaited=peers)
        except BaseException as error:
            raise self._failed(error, call, timeout_s, deadline, peers) from None
        finally:
            self._message = None

    def wait_beside_work(self, beside_work: bool) -> None:
        """Set whether waits of the current turn leave the cores to other threads, or poll. Each turn sets this again. A thread
        that waits for the operation needs no core."""
        if beside_work is not self._beside_work:
            self._beside_work = beside_work
            self._transport.wait_beside_work(beside_work)

    def _agree(self, call: str, signature: str, deadline: float) -> None:
        """Compare a new call with the calls of the other ranks, before any of its data moves."""
        sequence = self._sequence

        def progress() -> bool:  # other ranks may wait for these messages before they make this call
            if is_busy := self._transport.is_busy():
                self._transport.progress()
            return is_busy

        def in_vain() -> bool:
            over = self._interrupted or self._exiting or self._failure is not None or bool(self._watch.failure)
            return over or self._absent(sequence)

        self._agreement.agree(Call(sequence, call, self._place()), deadline, progress, in_vain)
        self._agreement.take(signature)
        self._calls[sequence % _REMEMBERED] = (sequence, call)

    def _place(self) -> str:
        """Return the place of the running call in the user's code; empty if it is not known any more."""
        where = self._where
        if isinstance(where, str):
            return where
        return whereabouts.of_call(sys._getframe() if where == get_ident() else whereabouts.frame_of(where))

    def places(self, turn: Turn) -> dict[int, str]:
        """Return by rank the place in the user's code of a call that runs on all ranks, for the ranks that post theirs in
        time."""
        return self._agreement.places(Call(turn.sequence, turn.call, self._place()))

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
            raise _InVainError(f"this rank receives no news of the others: {watch.failure}")
        if watch.lost or self._absent(sequence):
            raise _InVainError
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

    def _failed(
        self, error: BaseException, call: str, timeout_s: float, deadline: float, peers: frozenset[int] = frozenset()
    ) -> BaseException:
        """Return the error to raise for an error inside a turn. Every error but Mismatch and PeerJoined breaks the
        Communicator: all ranks raise these two alike, with no message in flight. timeout_s: the seconds from the start of
        the turn to the deadline. peers: the other ranks of a message."""
        if self._sequence < self._queue.number:
            return error  # interrupted before the turn began
        if isinstance(error, LinkError):
            self._failure = self._explain(error, call, timeout_s, deadline, peers)
            return self._failure
        if not isinstance(error, (Mismatch, PeerJoined)):
            self._break(call, repr(error), self._sequence + bool(peers), whereabouts.of_exception(error))
        return error

    def _break(self, call: str, why: str, sequence: int, reason: str = "") -> None:
        """Break the Communicator, and report that this rank takes no part in operations from `sequence` on. reason: the text of
        the exception that caused this."""
        self._failure = CollectiveError(f"interrupted by {why}", rank=self._rank, operation=call)
        self._watch.report_leaving(sequence, reason)
        self._transport.abort()

    def _explain(
        self, error: LinkError, call: str, timeout_s: float, deadline: float, peers: frozenset[int]
    ) -> CollectiveError:
        if self._exiting:
            return CollectiveError("this process is exiting", rank=self._rank, operation=call)
        others = self._watch.others if not isinstance(error, _InVainError) else frozenset()
        awaited = error.awaited or peers or others
        sequence = self._sequence + bool(peers)  # after a message this rank takes no part in the next operation
        report = Report(
            sequence,
            call,
            is_message=bool(peers),
            waiting_for=tuple(sorted(awaited - {self._rank})),
            gave_up=error.timed_out,
            waited_s=timeout_s - (deadline - time.monotonic()),
            timeout_s=timeout_s,
            before=tuple(sorted(done for done in self._calls if 0 <= done[0] < sequence)),
            place="" if peers else self._place(),
            sent=_sent(error) if peers else "",
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
    dtype = DTYPES[kind - 1]
    return f"send({str(dtype).removeprefix('torch.')}[{nbytes // dtype.itemsize}])"


def _is_beside_work() -> bool:
    """Return whether a thread other than the main one calls: the main thread may compute meanwhile."""
    return get_ident() != main_thread().ident


def weakly(method: Callable[[], _Result]) -> Callable[[], _Result | None]:
    """Return a function that calls a method while its object lives, and does not keep the object alive."""
    weak = weakref.WeakMethod(method)

    def call() -> _Result | None:
        alive = weak()
        return None if alive is None else alive()

    return call


#: Those of this process. A report of a stall names the waits of all of them.
_all: weakref.WeakSet[Operations] = weakref.WeakSet()
