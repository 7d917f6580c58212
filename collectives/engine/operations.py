"""The operations of one Communicator, one at a time: their order, numbers and deadlines."""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any, NoReturn

from gradwire.collectives.control.channel import Channel
from gradwire.collectives.diagnostics import whereabouts
from gradwire.collectives.diagnostics.mismatch import ANY_CALL
from gradwire.collectives.engine.failure_monitor import (
    COMPARED_CALLS,
    FailureMonitor,
    InVainError,
    OverdueError,
    weakly,
)
from gradwire.collectives.engine.in_flight import ENDED, InFlight
from gradwire.collectives.engine.prepared import PreparedCall
from gradwire.collectives.engine.queue import WorkQueue
from gradwire.collectives.engine.streams import DeviceOperation
from gradwire.collectives.engine.work import DONE, Work
from gradwire.collectives.errors import CollectiveError, LinkError, Mismatch, PeerJoined
from gradwire.collectives.transports.base import Run, Transport

#: The factor of a multiplicative hash (Knuth 1973, 6.4): successive numbers get tags that are far apart.
_SPREAD = 0x9E3779B1

#: The digest of the messages by which ranks compare a new call.
_COMPARED = zlib.crc32(b"is this call the same on all ranks?")

#: The other ranks of an operation, in which all ranks take part.
_ALL: frozenset[int] = frozenset()

#: Runs a part of a message's transfer, until a deadline (time.monotonic() seconds).
Part = Callable[[float], None]


class Operations:
    """Runs operations in the order of issue. timeout_s: seconds that each operation may take from its start, unless run() is
    given another limit; the attribute can be changed. stall_warning_s: see Stalls. comparing: returns what takes the maximum of
    bytes over all ranks, by which they compare a new call; None if they post it.

    Attributes: queue, the order of operations and messages; in_flight, the operations that were given to GPUs and are not done;
    monitor, which ends and explains those that cannot finish."""

    def __init__(
        self,
        transport: Transport,
        channel: Channel,
        timeout_s: float,
        stall_warning_s: float | None = None,
        comparing: Callable[[], Run | None] = lambda: None,
    ) -> None:
        self.timeout_s = timeout_s
        self.monitor = FailureMonitor(transport, channel, stall_warning_s)
        self.in_flight = InFlight(self.monitor, transport)
        self.monitor.in_flight = weakly(self.in_flight.oldest)
        last_begun = weakly(self.monitor.last_begun) if transport.capabilities.interruptible else None
        self.queue = WorkQueue("gradwire", last_begun)
        self._rank, self._is_alone = transport.rank, transport.size == 1
        self._channel = channel
        self._known = self.monitor.agreement.known
        self._comparing = None if self._is_alone else comparing  # None once it was called
        self._compare: Run | None = None

    @property
    def usable(self) -> bool:
        """Return whether an operation can still run."""
        return self.monitor.failure is None and not self.queue.sealed

    def fail(self) -> None:
        """Raise the failure that other ranks have reported. A joined rank needs this, since it calls no operation that would
        raise the failure."""

        def in_vain(*given: object) -> None:
            raise InVainError

        self.monitor.agreement.take(ANY_CALL)
        self.run(PreparedCall(ANY_CALL, ANY_CALL, in_vain), in_vain, None, None)

    def settle(self) -> None:
        """Wait until all issued operations have ended, with or without an error."""
        self._enqueue("join", lambda: None, async_op=False, counted=False)
        self.in_flight.drain()

    def run(
        self,
        call: PreparedCall,
        run: Callable[[Any, Any, int, float], None],
        source: Any,
        destination: Any,
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
        device: DeviceOperation | None = None,
        enqueues: bool = False,
        around: Callable[[Callable[[], None]], None] | None = None,
        awaited: bool = False,
    ) -> Work:
        """Run a call in its turn: run(source, destination, tag, deadline). Return its Work, which is done unless async_op is
        True. Turns are numbered in the order of issue, which is arbitrary for calls from several threads. timeout_s: seconds that
        this operation may take from its start; None: the attribute timeout_s.

        awaited: see WorkQueue.submit().

        device: orders the call on GPUs. enqueues: whether the run only gives them work; then the calling thread makes it, if no
        other one has a turn. around: calls the turn, on its thread, with what precedes and follows it."""
        if (comparing := self._comparing) is not None:
            self._compare = comparing()  # which compiles what it needs before any deadline starts
            self._comparing = None
        if around is not None:
            where = whereabouts.of_call(sys._getframe())
            turn = partial(self._take_turn, call, run, source, destination, timeout_s, where)
            body = partial(around, turn)
            return self._enqueue(call.text, body, async_op=async_op, timeout_s=timeout_s, device=device)
        if not async_op or enqueues:
            queue, mine = self.queue, (get_ident(),)
            try:
                if queue.enter(mine):
                    self._take_turn(call, run, source, destination, timeout_s, mine[0])
                    return DONE if device is None else Work.launched(self._rank, call.text, device)
            finally:
                queue.leave(mine, self.monitor.sequence)
        where = whereabouts.of_call(sys._getframe())
        body = partial(self._take_turn, call, run, source, destination, timeout_s, where)
        return self._enqueue(call.text, body, async_op=async_op, timeout_s=timeout_s, device=device, awaited=awaited)

    def run_message(
        self, call: PreparedCall, peers: frozenset[int], part: Part, *, async_op: bool, at_once: bool = True
    ) -> Work | None:
        """Run a part of a message's transfer in its turn. With async_op, return its Work, or None if the part has run at once,
        which at_once=False prevents. The turn has no number, since only `peers` take part in it."""
        if at_once and self.try_message(call, peers, part):
            return None
        body = partial(self._take_turn, call, _last(part), None, None, None, "", peers)
        return self._enqueue(call.text, body, async_op=async_op, counted=False)

    def try_message(self, call: PreparedCall, peers: frozenset[int], part: Part) -> bool:
        """Run a part of a message's transfer if no other turn runs or waits; else return False, with nothing done."""
        turn = (get_ident(),)
        try:
            if self.monitor.failure is not None or not self.queue.enter(turn, counted=False):
                return False
            self._take_turn(call, _last(part), None, None, None, turn[0], peers)
            return True
        finally:
            self.queue.leave(turn, self.monitor.sequence)

    def _enqueue(
        self,
        text: str,
        body: Callable[[], None],
        *,
        async_op: bool,
        counted: bool = True,
        timeout_s: float | None = None,
        device: DeviceOperation | None = None,
        awaited: bool = False,
    ) -> Work:
        """Run a turn on the queue's thread, and return its Work; with async_op=False, when it is done."""
        if self.monitor.failure is not None:
            self._refuse(self.monitor.failure, text, was_queued=False)
        if not async_op:
            self.queue.check_may_wait(self._rank, text)
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        work = Work(self._rank, text, body, counted=counted, timeout_s=timeout_s, device=device)
        try:
            self.queue.submit(work, awaited=awaited)
        except CollectiveError:
            if (
                self.monitor.failure is None and self.queue.calls_here()
            ):  # later operations would get the number of this one
                self.monitor.break_off(text, "the end of its Communicator", self.queue.number + 1)
            raise
        if not async_op:
            work.wait()
        return work

    def _take_turn(
        self,
        call: PreparedCall,
        run: Callable[[Any, Any, int, float], None],
        source: Any,
        destination: Any,
        timeout_s: float | None,
        where: str | int,
        peers: frozenset[int] = _ALL,
    ) -> None:
        """Run an operation or a message in its turn. where: the place of the call in the user's code, or the thread that makes
        it. peers: the other ranks of a message. The other arguments: see run()."""
        monitor = self.monitor
        if monitor.failure is not None:
            self._refuse(monitor.failure, call.text, was_queued=isinstance(where, str))
        if timeout_s is None:
            timeout_s = self.timeout_s
        is_new = not peers and call.signature not in self._known
        ends = deadline = time.monotonic() + timeout_s
        try:
            sequence = self.queue.number
            if peers:
                ends = monitor.begin_message(call.text, peers, deadline)
            else:
                monitor.where = where
                monitor.calls[sequence % COMPARED_CALLS] = (sequence, call.text)
                if is_new:
                    monitor.unagreed = sequence
                monitor.running = monitor.sequence = sequence
                if self._channel.has_news:
                    monitor.check_news()
            if self.queue.overdue:
                raise OverdueError
            if is_new:
                self._agree(call.signature, sequence, deadline)
            # Ranks that call different operations use different tags, so that no rank receives a message of another shape.
            # Segment i of a buffer uses the tag plus i, within 31 bits.
            run(source, destination, (call.digest + sequence * _SPREAD) % 2**30, ends)
            if monitor.interrupted:  # a backend's wait may end without an error then, as NCCL's does
                raise LinkError(None, timed_out=False, detail=ENDED, awaited=peers)
            if monitor.joined.refused == sequence and not peers:
                raise PeerJoined(monitor.joined.absent, rank=self._rank, operation=call.text)
        except BaseException as error:
            raise self._failed(error, call.text, timeout_s, deadline, peers) from None
        finally:
            monitor.running = -1
            if peers:
                monitor.message = None

    def _agree(self, signature: str, sequence: int, deadline: float) -> None:
        """Compare the running call, which is new, with those of the other ranks."""
        compare = self._compare
        if self._is_alone:
            self.monitor.agreement.take(signature)
        elif compare is None:
            self.monitor.agree(signature, None, deadline)
        else:
            tag = (_COMPARED + sequence * _SPREAD) % 2**30
            self.monitor.agree(signature, lambda hashes: compare(hashes, hashes, tag, deadline), deadline)

    def _failed(
        self, error: BaseException, text: str, timeout_s: float, deadline: float, peers: frozenset[int]
    ) -> BaseException:
        """Return the error to raise for an error inside a turn. Every error but Mismatch and PeerJoined breaks the
        Communicator: all ranks raise these two alike, with no message in flight. timeout_s: the seconds from the start of
        the turn to the deadline. peers: the other ranks of a message."""
        monitor = self.monitor
        if monitor.sequence < self.queue.number:
            return error  # interrupted before the turn began
        if isinstance(error, LinkError):
            return monitor.explain(error, text, timeout_s, deadline, peers)
        if not isinstance(error, (Mismatch, PeerJoined)):
            monitor.break_off(text, repr(error), monitor.sequence + bool(peers), whereabouts.of_exception(error))
        return error

    def _refuse(self, failure: CollectiveError, text: str, *, was_queued: bool) -> NoReturn:
        """Raise a CollectiveError of the same kind as the failure that has broken the Communicator."""
        message = f"the Communicator is broken since an earlier failure ({failure}); make a new one"
        if was_queued:
            message = f"not run, the Communicator broke before ({failure})"
        raise failure.again(message, text) from failure


def _last(part: Part) -> Callable[[Any, Any, int, float], None]:
    """Return what runs a part of a message's transfer as run() of an operation is called."""
    return lambda _source, _destination, _tag, deadline: part(deadline)
