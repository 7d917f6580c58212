"""How the operations of a Communicator end: closed with the other ranks, abandoned after an error, left open when the process
exits or the object is deleted, and in a forked child."""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from gradwire.collectives.control.channel import Channel
from gradwire.collectives.diagnostics import whereabouts
from gradwire.collectives.diagnostics.whereabouts import ExceptHook
from gradwire.collectives.engine.operations import Operations
from gradwire.collectives.engine.queue import WorkQueue
from gradwire.collectives.engine.supervision import weakly
from gradwire.collectives.errors import CollectiveError
from gradwire.collectives.forks import in_forked_child
from gradwire.collectives.transports.base import Transport

if TYPE_CHECKING:
    from gradwire.collectives.engine.engine import Engine

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


class ClosableOperations(Operations):
    """Operations that end: their Communicator is closed or abandoned, or ends with this object or the process. Arguments: see
    Operations."""

    def __init__(
        self, transport: Transport, watch: Channel, timeout_s: float, stall_warning_s: float | None = None
    ) -> None:
        super().__init__(transport, watch, timeout_s, stall_warning_s)
        self._at_exit = weakly(self.exit)
        atexit.register(self._at_exit)
        weakref.finalize(self, _abandon, os.getpid(), self._queue, watch, self._at_exit).atexit = False
        self._hook = ExceptHook.register(self)
        in_forked_child(self, ClosableOperations.disown)

    def leave(self, why: str) -> None:
        """Report to the other ranks the exception that is about to end this rank."""
        self._watch.report_leaving(self._unfinished, why)

    def finish_calls(self, deadline: float) -> None:
        """Wait for the functions to be called after operations, but not beyond the deadline (time.monotonic())."""
        self._queue.finish_calls(max(0.0, deadline - time.monotonic()))

    def announce_close(self, error: BaseException | None = None) -> bool:
        """Report to the other ranks how many operations this one has issued, and that it issues no more. This is the first of
        four steps to close (drain, part and join follow), which take a few seconds at most, even after a failure. Return False,
        with nothing done, the second time. error: the exception that makes this rank leave."""
        promised = None if self._queue.sealed else self._queue.seal()
        if promised is None:
            return False
        atexit.unregister(self._at_exit)
        self._hook.dismiss(self)
        self._watch.report_leaving(promised, "" if error is None else whereabouts.of_exception(error))
        return True

    def drain(self, deadline: float, finish: Callable[[float], None]) -> None:
        """Finish the queued operations, then call finish(deadline), but not beyond the deadline (time.monotonic()). Report the
        end to the other ranks."""
        if self._failure is not None or not self._queue.close(max(0.0, deadline - time.monotonic())):
            if self._failure is None:
                self._break("close", "the end of the time for what was queued", self._unfinished)
            self._transport.abort()
            self._queue.close(_LET_GO_S)
        else:
            finish(deadline)
        self._watch.report_done()

    def part(self, deadline: float) -> None:
        """Wait until the other ranks have finished their queued operations, but not beyond the deadline (time.monotonic()).
        Begin to close the connections that carry news; join() waits until they are closed.

        If a rank closed its connections at once, a slow rank could lose messages that it has yet to receive.
        """
        watch = self._watch
        all_done = self._failure is None and watch.wait_for(
            self._all_done, min(_ACKNOWLEDGE_S, deadline - time.monotonic())
        )
        hopeless = self._failure is not None or (not all_done and watch.is_unconfirmed())
        if not hopeless:
            watch.wait_for(self._all_done, deadline - time.monotonic())
        watch.close(after_failure=hopeless)

    def abandon(self, error: BaseException) -> bool:
        """Report to the other ranks that this one takes part in no more operations, and end the running ones, without waiting
        for any rank. join() is the second step. Arguments and result: see announce_close()."""
        is_first = self.announce_close(error)
        if is_first:
            self.drain(time.monotonic(), lambda _: None)
            self._watch.close(after_failure=True)
        return is_first

    def _all_done(self) -> bool:
        return self._watch.others <= self._watch.done | self._watch.lost.keys()

    def join(self) -> None:
        """Wait until the connections that carry news are closed: the last step to close."""
        self._watch.join()

    def disown(self) -> None:
        """Break the Communicator in a forked child, which lacks the Communicator's threads, and close the child's copies of the
        connections."""
        self._failure = CollectiveError("this process is a fork of the rank", rank=self._rank, operation="fork")
        self._queue.sealed = True  # without its lock, which a thread of the parent may have held
        atexit.unregister(self._at_exit)
        self._hook.dismiss(self)
        self._transport.close()

    def exit(self) -> None:
        """End the running operation without reporting a failure, when the interpreter exits with the Communicator open.

        A thread that is still inside the backend when the interpreter has ended would abort the process.
        """
        self._exiting = True
        self._watch.report_leaving(self._unfinished)
        if self._queue.busy():
            self._transport.abort()
            self._queue.close(_LET_GO_S)
        self._watch.close()
        self._watch.join()


def close_all(engines: Iterable[Engine], error: BaseException | None = None) -> None:
    """Close the Communicators of several engines. Arguments: see communicator.close_all()."""
    engines = list(engines)
    if error is None:  # operations that callbacks call count
        call_by = time.monotonic() + DRAIN_S
        for engine in engines:
            engine.operations.finish_calls(call_by)
    engines = [engine for engine in engines if engine.operations.announce_close(error)]
    drain_by = time.monotonic() + DRAIN_S
    try:
        for engine in engines:
            engine.operations.drain(drain_by, engine.messages.drain)
    finally:
        part_by = time.monotonic() + MEET_S
        for engine in engines:
            engine.operations.part(part_by)
        for engine in engines:
            engine.join()


def abandon_all(engines: Iterable[Engine], error: BaseException) -> None:
    """End the Communicators of several engines at once. Arguments: see communicator.abandon_all()."""
    engines = [engine for engine in engines if engine.operations.abandon(error)]
    for engine in engines:
        engine.join()


def _abandon(owner: int, queue: WorkQueue, watch: Channel, at_exit: Callable[[], None]) -> None:
    """End the threads and connections of a Communicator that is deleted without having been closed, but not in a forked
    child. Report to the other ranks that this one leaves, and wait for none of them."""
    if os.getpid() != owner:
        return
    atexit.unregister(at_exit)
    if (promised := queue.seal()) is not None:
        watch.report_leaving(promised, _DELETED)
    queue.close(0.0)
    watch.close()
