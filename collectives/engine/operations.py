"""The operations of one Communicator, one at a time: their order, numbers and deadlines."""

from __future__ import annotations

import math
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import NoReturn, TypeVar

from gradwire.collectives.control.channel import Channel
from gradwire.collectives.diagnostics import whereabouts
from gradwire.collectives.diagnostics.mismatch import ANY_CALL, Call
from gradwire.collectives.engine.queue import WorkQueue
from gradwire.collectives.engine.supervision import (
    COMPARED_CALLS,
    LAST_WORDS_S,
    InVainError,
    OverdueError,
    Supervision,
    weakly,
)
from gradwire.collectives.engine.work import DONE, Work
from gradwire.collectives.errors import CollectiveError, LinkError, Mismatch, PeerJoined
from gradwire.collectives.transports.base import Transport

_ENDED = "the wait was ended, because another rank no longer takes part"

#: The factor of a multiplicative hash (Knuth 1973, 6.4): successive numbers get tags that are far apart.
_SPREAD = 0x9E3779B1


def digest(call: str) -> int:
    """Return a hash of a call's text."""
    return zlib.crc32(call.encode())


_First = TypeVar("_First")
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


class Operations(Supervision):
    """Runs operations in the order of issue. watch: ClosableOperations closes it. timeout_s: seconds that each operation may
    take from its start, unless submit() is given another limit; the attribute can be changed. stall_warning_s: see
    Stalls."""

    def __init__(
        self, transport: Transport, watch: Channel, timeout_s: float, stall_warning_s: float | None = None
    ) -> None:
        super().__init__(transport, watch, stall_warning_s)
        self.timeout_s = timeout_s
        self._queue = WorkQueue("gradwire", weakly(self._last_begun) if transport.capabilities.interruptible else None)
        self._known = self._agreement.known

    @property
    def usable(self) -> bool:
        """Return whether an operation can still run."""
        return self._failure is None and not self._queue.sealed

    @property
    def issued(self) -> int:
        """Return how many operations this rank has issued."""
        return self._queue.issued

    def fail(self) -> None:
        """Raise the failure that other ranks have reported. A joined rank needs this, since it calls no operation that would
        raise the failure."""

        def in_vain(turn: Turn) -> None:
            raise InVainError

        self._agreement.take(ANY_CALL)
        self.submit(ANY_CALL, in_vain, async_op=False)

    def settle(self) -> None:
        """Wait until all issued operations have ended, with or without an error."""
        self._enqueue("join", lambda: None, async_op=False, counted=False)

    def submit(
        self,
        call: str,
        body: Callable[[Turn], None],
        *,
        async_op: bool,
        signature: str | None = None,
        timeout_s: float | None = None,
    ) -> Work:
        """Run `body` in its turn. Return its Work, which is done unless async_op is True. Turns are numbered in the order of
        issue, which is arbitrary for calls from several threads. signature: the part of `call` that decides whether the call
        is known; None means all of it. timeout_s: seconds that this operation may take from its start; None: the attribute
        timeout_s."""
        if self._failure is not None:
            self._refuse(self._failure, call)
        signature = signature or call
        if not async_op:
            turn = (get_ident(),)
            try:
                if self._queue.enter(turn):
                    self._take_turn(call, signature, body, timeout_s, turn[0])
                    return DONE
            finally:
                self._queue.leave(turn, self._sequence)
        place = whereabouts.of_call(sys._getframe())
        turn_of_queue = partial(self._take_turn, call, signature, body, timeout_s, place)
        return self._enqueue(call, turn_of_queue, async_op=async_op, timeout_s=timeout_s)

    def _enqueue(
        self,
        call: str,
        run: Callable[[], None],
        *,
        async_op: bool,
        counted: bool = True,
        timeout_s: float | None = None,
    ) -> Work:
        """Run a work on the queue's thread, and return it; with async_op=False, when it is done."""
        if not async_op:
            self._queue.check_may_wait(self._rank, call)
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        work = Work(self._rank, call, run, counted=counted, timeout_s=timeout_s)
        try:
            self._queue.submit(work)
        except CollectiveError:
            if self._failure is None and self._queue.calls_here():  # later operations would get the number of this one
                self._break(call, "the end of its Communicator", self._queue.number + 1)
            raise
        if not async_op:
            work.wait()
        return work

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
        if self._failure is not None:
            self._refuse(self._failure, call)
        if at_once and self.try_message(call, peers, body):
            return None
        turn_of_queue = partial(self._take_message_turn, call, peers, body)
        return self._enqueue(call, turn_of_queue, async_op=async_op, counted=False)

    def try_message(self, call: str, peers: frozenset[int], body: Callable[[float], None]) -> bool:
        """Run body(deadline) if no other turn runs or waits; else return False, with nothing done."""
        turn = (get_ident(),)
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
        turn = (get_ident(),)
        try:
            if self._failure is not None or not self._queue.enter(turn) or call not in self._known:
                return False
            timeout_s = self.timeout_s
            deadline = time.monotonic() + timeout_s
            try:
                sequence = self._queue.number  # as in _take_turn(), but inlined
                self._where = turn[0]
                self._calls[sequence % COMPARED_CALLS] = (sequence, call)
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

    def _refuse(self, failure: CollectiveError, call: str, *, was_queued: bool = False) -> NoReturn:
        """Raise a CollectiveError of the same kind as the failure that has broken the Communicator."""
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
        if self._failure is not None:
            self._refuse(self._failure, call, was_queued=True)
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        try:
            self._call = call
            is_new = signature not in self._known
            if is_new and self._transport.size == 1:
                self._agreement.take(signature)
                is_new = False
            sequence = self._queue.number
            self._where = where
            if not is_new:
                self._calls[sequence % COMPARED_CALLS] = (sequence, call)
            self._running = self._sequence = sequence
            if self._queue.overdue:
                raise OverdueError
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
        if self._failure is not None:
            self._refuse(self._failure, call, was_queued=True)
        timeout_s = self.timeout_s
        deadline = time.monotonic() + timeout_s
        try:
            self._vain_since = math.inf
            self._message = (call, peers)
            end = deadline
            if self._queue.overdue:
                raise OverdueError
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

    def _agree(self, call: str, signature: str, deadline: float) -> None:
        """Compare a new call with the calls of the other ranks, before any of its data moves."""
        sequence = self._sequence

        def progress() -> bool:  # other ranks may wait for these messages before they make this call
            return bool(self._transport.progress())

        def in_vain() -> bool:
            over = self._interrupted or self._exiting or self._failure is not None or bool(self._watch.failure)
            return over or self._absent(sequence)

        self._agreement.agree(Call(sequence, call, self._place()), deadline, progress, in_vain)
        self._agreement.take(signature)
        self._calls[sequence % COMPARED_CALLS] = (sequence, call)

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
