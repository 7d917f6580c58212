"""How the operations of a Communicator end: closed with the other ranks, abandoned after an error, left open when the process
exits or the object is deleted, and in a forked child."""

from __future__ import annotations

import atexit
import math
import os
import time
import weakref
from collections.abc import Callable, Iterable

from gradwire.collectives.control.channel import Channel
from gradwire.collectives.diagnostics import whereabouts
from gradwire.collectives.diagnostics.whereabouts import ExceptHook
from gradwire.collectives.engine.failure_monitor import weakly
from gradwire.collectives.engine.operations import Operations
from gradwire.collectives.engine.point_to_point import Messages
from gradwire.collectives.engine.queue import WorkQueue
from gradwire.collectives.errors import CollectiveError
from gradwire.collectives.forks import in_forked_child
from gradwire.collectives.transports.base import Transport

#: How long close() waits for the queued operations, and then for the other ranks.
DRAIN_S = 5.0
MEET_S = 2.0

#: How long a backend may take to end the waits of an operation after abort().
_LET_GO_S = 2.0

#: What the errors of other ranks say of a rank that deletes a Communicator while they use it.
_DELETED = (
    "deleted its Communicator without close(), as when an optimizer goes out of scope: keep it until close(), join() or "
    "shutdown()"
)

#: How long the other hosts may take to acknowledge the news that this rank leaves. After that they count as unreachable.
_ACKNOWLEDGE_S = 0.3


class Closing:
    """Ends the operations of one Communicator: it is closed or abandoned, or ends with this object or the process. messages: the
    sent ones are finished before the end."""

    def __init__(self, operations: Operations, messages: Messages, transport: Transport, channel: Channel) -> None:
        self._operations, self._messages = operations, messages
        self._queue, self._monitor = operations.queue, operations.monitor
        self._transport, self._channel = transport, channel
        self._at_exit = weakly(self.exit)
        atexit.register(self._at_exit)
        weakref.finalize(self, _abandon, os.getpid(), operations.queue, channel, self._at_exit).atexit = False
        self._hook = ExceptHook.register(self)
        in_forked_child(self, Closing.disown)

    def leave(self, why: str) -> None:
        """Report to the other ranks the exception that is about to end this rank."""
        self._channel.report_leaving(self._monitor.unfinished, why)

    def finish_calls(self, deadline: float) -> None:
        """Wait for the functions to be called after operations, but not beyond the deadline (time.monotonic())."""
        self._queue.finish_calls(max(0.0, deadline - time.monotonic()))

    def announce(self, error: BaseException | None = None) -> bool:
        """Report to the other ranks how many operations this one has issued, and that it issues no more. This is the first of
        four steps to close (drain, part and join follow), which take a few seconds at most beside what GPUs have yet to do, even
        after a failure. Return False, with nothing done, the second time. error: the exception that makes this rank leave."""
        if (promised := self._queue.seal()) is None:
            return False
        atexit.unregister(self._at_exit)
        self._hook.dismiss(self)
        self._channel.report_leaving(promised, "" if error is None else whereabouts.of_exception(error))
        return True

    def drain(self, deadline: float, *, is_failing: bool = False) -> None:
        """Finish the queued operations and the sent messages, but not beyond the deadline (time.monotonic()). GPUs may be
        behind, and the program has gone on as if it had waited for them: what they were given has its own deadlines, unless
        is_failing. Report the end to the other ranks."""
        monitor = self._monitor
        queued_s, in_flight = max(0.0, deadline - time.monotonic()), self._operations.in_flight
        until = deadline if is_failing else math.inf
        if monitor.failure is not None or not (self._queue.close(queued_s) and in_flight.drain(until)):
            if monitor.failure is None:
                monitor.break_off("close", "the end of the time for what was queued", monitor.unfinished)
            self._transport.abort()
            self._queue.close(_LET_GO_S)
        else:
            self._messages.drain(deadline)
            in_flight.drain(until)
        self._channel.report_done()

    def part(self, deadline: float) -> None:
        """Wait until the other ranks have finished their queued operations, but not beyond the deadline (time.monotonic()).
        Begin to close the connections that carry news; join() waits until they are closed.

        If a rank closed its connections at once, a slow rank could lose messages that it has yet to receive.
        """
        channel, has_failed = self._channel, self._monitor.failure is not None

        def all_done() -> bool:
            return channel.others <= channel.done | channel.lost.keys()

        is_done = not has_failed and channel.wait_for(all_done, min(_ACKNOWLEDGE_S, deadline - time.monotonic()))
        hopeless = has_failed or (not is_done and channel.is_unconfirmed())
        if not hopeless:
            channel.wait_for(all_done, deadline - time.monotonic())
        channel.close(after_failure=hopeless)

    def join(self) -> None:
        """Wait until the connections that carry news are closed, and close the transport: the last step to close."""
        self._channel.join()
        self._transport.close()

    def abandon(self, error: BaseException) -> bool:
        """Report to the other ranks that this one takes part in no more operations, and end the running ones, without waiting
        for any rank. join() is the second step. Arguments and result: see announce()."""
        is_first = self.announce(error)
        if is_first:
            self.drain(time.monotonic(), is_failing=True)
            self._channel.close(after_failure=True)
        return is_first

    def disown(self) -> None:
        """Break the Communicator in a forked child, which lacks the Communicator's threads, and close the child's copies of the
        connections."""
        self._monitor.failure = CollectiveError(
            "this process is a fork of the rank", rank=self._transport.rank, operation="fork"
        )
        self._queue.sealed = True  # without its lock, which a thread of the parent may have held
        atexit.unregister(self._at_exit)
        self._hook.dismiss(self)
        self._transport.close()

    def exit(self) -> None:
        """End the running operation without reporting a failure, when the interpreter exits with the Communicator open.

        A thread that is still inside the backend when the interpreter has ended would abort the process.
        """
        self._operations.in_flight.drain()  # the program has gone on as if it had waited
        self._monitor.exiting = True
        self._channel.report_leaving(self._monitor.unfinished)
        if self._queue.busy() or not self._operations.in_flight.is_empty:
            self._transport.abort()
            self._queue.close(_LET_GO_S)
        self._channel.close()
        self._channel.join()


def close_all(closings: Iterable[Closing], error: BaseException | None = None) -> None:
    """Close several Communicators. Arguments: see communicator.close_all()."""
    closings = list(closings)
    if error is None:  # operations that callbacks call count
        call_by = time.monotonic() + DRAIN_S
        for each in closings:
            each.finish_calls(call_by)
    closings = [each for each in closings if each.announce(error)]
    drain_by = time.monotonic() + DRAIN_S
    try:
        for each in closings:
            each.drain(drain_by, is_failing=error is not None)
    finally:
        part_by = time.monotonic() + MEET_S
        for each in closings:
            each.part(part_by)
        for each in closings:
            each.join()


def abandon_all(closings: Iterable[Closing], error: BaseException) -> None:
    """End several Communicators at once. Arguments: see communicator.abandon_all()."""
    closings = [each for each in closings if each.abandon(error)]
    for each in closings:
        each.join()


def _abandon(owner: int, queue: WorkQueue, channel: Channel, at_exit: Callable[[], None]) -> None:
    """End the threads and connections of a Communicator that is deleted without having been closed, but not in a forked
    child. Report to the other ranks that this one leaves, and wait for none of them."""
    if os.getpid() != owner:
        return
    atexit.unregister(at_exit)
    if (promised := queue.seal()) is not None:
        channel.report_leaving(promised, _DELETED)
    queue.close(0.0)
    channel.close()
