"""The operations of one Communicator, one after the other: their numbers, deadlines and failures, and the end of them all."""

from __future__ import annotations

import atexit
import os
import time
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from torch.distributed.distributed_c10d import Store

from collectives.diagnostics.postmortem import Board, Report, verdict
from collectives.errors import CollectiveError, CollectiveTimeout, LinkError, Mismatch
from collectives.transport.local_group import LocalGroup
from collectives.transport.process_group import ProcessGroupTransport
from collectives.transport.routing import RoutingTransport
from collectives.work import Work, WorkQueue

#: How long close() waits for what is queued, and then for the other ranks.
_DRAIN_S = 5.0
_MEET_S = 2.0

#: Odd, and far from regular in binary (Knuth 1973, 6.4): numbers that follow each other give tags that lie far apart.
_SPREAD = 0x9E3779B1


def digest(call: str) -> int:
    """A number that stands for what is called."""
    return zlib.crc32(call.encode())


def tag_of(sequence: int, call_digest: int) -> int:
    """Marks an operation's messages. Ranks that call different things use different tags, so their messages never meet: nobody
    takes a message of another shape for his own. Segment i of a buffer adds i, within 31 bits."""
    return (call_digest + sequence * _SPREAD) % 2**30


_First = TypeVar("_First")
_Second = TypeVar("_Second")


@dataclass(frozen=True, slots=True)
class Turn:
    """One operation's turn: its number, what was called (the same on all ranks), its deadline (time.monotonic())."""

    sequence: int
    call: str
    deadline: float

    @property
    def tag(self) -> int:
        return tag_of(self.sequence, digest(self.call))


class Operations:
    """Runs operations in the order of issue. local: the ranks of this host, where they share memory. timeout_s: seconds that each
    operation may take from its start."""

    def __init__(
        self,
        transport: ProcessGroupTransport | RoutingTransport,
        local: LocalGroup | None,
        store: Store,
        timeout_s: float,
    ) -> None:
        self._transport = transport
        self._local = local
        self._rank = transport.rank
        self._size = transport.size
        self._timeout_s = timeout_s
        self._board = Board(store, transport.rank, transport.size)
        self._queue = WorkQueue("gradwire")
        self._sequence = 0
        self._beside_work = False
        self._failure: CollectiveError | None = None
        self._closed = False
        self._leaving = False
        self._at_exit = partial(_leave, weakref.ref(self))
        atexit.register(self._at_exit)
        _all.add(self)

    @property
    def usable(self) -> bool:
        """Whether anything can still be run."""
        return self._failure is None and not self._closed

    def submit(self, call: str, body: Callable[[Turn], None], *, async_op: bool) -> Work | None:
        """Run `body` when its turn comes; with async_op return its handle at once. Turns are numbered in order of issue."""
        if self._failure is not None:
            raise CollectiveError(
                f"the Communicator is broken since an earlier failure ({self._failure}); make a new one",
                rank=self._rank,
                operation=call,
            ) from self._failure
        if self._closed:
            raise CollectiveError("the Communicator is closed", rank=self._rank, operation=call)
        sequence = self._sequence
        self._sequence += 1
        if not async_op and self._queue.enter():
            try:
                self._take_turn(sequence, call, body, beside_work=False)
            finally:
                self._queue.leave()
            return None
        work = Work(self._rank, call, lambda: self._take_turn(sequence, call, body, beside_work=True))
        self._queue.submit(work)
        if async_op:
            return work
        work.wait()
        return None

    def run_now(
        self,
        call: str,
        call_digest: int,
        body: Callable[[_First, _Second, int, float], None],
        first: _First,
        second: _Second,
    ) -> bool:
        """submit() in the calling thread, with the least work around body(first, second, tag, deadline); False, with nothing
        done, where anything stands in the way. call_digest: digest(call)."""
        if self._failure is not None or self._closed or not self._queue.enter():
            return False
        sequence = self._sequence
        self._sequence = sequence + 1
        deadline = time.monotonic() + self._timeout_s
        if self._beside_work:
            self._wait_beside_work(False)
        try:
            body(first, second, tag_of(sequence, call_digest), deadline)
        except BaseException as error:
            raise self._failed(error, Turn(sequence, call, deadline)) from None
        finally:
            self._queue.leave()
        return True

    def _take_turn(self, sequence: int, call: str, body: Callable[[Turn], None], *, beside_work: bool) -> None:
        if self._failure is not None:
            raise CollectiveError(
                f"not run, the Communicator broke before ({self._failure})", rank=self._rank, operation=call
            ) from self._failure
        turn = Turn(sequence, call, time.monotonic() + self._timeout_s)
        if beside_work != self._beside_work:
            self._wait_beside_work(beside_work)
        try:
            body(turn)
        except BaseException as error:
            raise self._failed(error, turn) from None

    def _wait_beside_work(self, beside_work: bool) -> None:
        """Operations on the queue's thread run while the caller computes; in the caller's, nothing else has anything to do."""
        self._beside_work = beside_work
        if self._local is not None:
            self._local.wait_beside_work(beside_work)

    def _failed(self, error: BaseException, turn: Turn) -> BaseException:
        """What to raise for what went wrong in a turn. All but a Mismatch breaks the Communicator: that one was found before any
        of the data was sent, by all ranks alike."""
        if isinstance(error, LinkError):
            self._failure = self._explain(error, turn)
            return self._failure
        if not isinstance(error, Mismatch):
            self._failure = CollectiveError(f"interrupted by {error!r}", rank=self._rank, operation=turn.call)
            self._transport.abort()
        return error

    def _explain(self, error: LinkError, turn: Turn) -> CollectiveError:
        if self._leaving:
            return CollectiveError("this process is exiting", rank=self._rank, operation=turn.call)
        peers = set(range(self._size)) - {self._rank}
        report = Report.of(error, turn.sequence, turn.call, peers, self._transport.lost_peers())
        ended = self._local.dead() if self._local is not None else frozenset[int]()
        reports = self._board.exchange(report, ended, after_writing=self._transport.abort)
        return verdict(reports, self._rank, self._timeout_s, str(error))

    def close(self, meet: Callable[[Turn], None]) -> bool:
        """Finish what is queued and meet the other ranks; a few seconds at most, whatever happened. False the second time.

        Meeting keeps a fast rank from closing connections on which a slow one still receives. A rank that does not come
        within the few seconds, or a failure, ends the connections instead.
        """
        if self._closed:
            return False
        self._closed = True
        atexit.unregister(self._at_exit)
        drained = self._failure is None and self._queue.close(_DRAIN_S)
        if drained and self._failure is None:
            turn = Turn(self._sequence, "close", time.monotonic() + _MEET_S)
            if self._local is not None:
                self._local.leave()
            try:
                meet(turn)
            except LinkError as error:
                self._failure = CollectiveTimeout(_MEET_S, (), rank=self._rank, operation=f"close ({error})")
        else:
            self._failure = self._failure or CollectiveError("closed while running", rank=self._rank, operation="close")
            self._transport.abort()
            self._queue.close(_DRAIN_S)
        return True

    def disown(self) -> None:
        """This process is a fork of the one that made the Communicator: connections and their threads stayed there."""
        self._failure = CollectiveError("this process is a fork of the rank", rank=self._rank, operation="fork")
        self._closed = True
        atexit.unregister(self._at_exit)

    def leave(self) -> None:
        """The interpreter exits with the Communicator open: let go of what runs, without a report, as a dead process would.

        A thread that is still inside the backend when the interpreter is gone would end the process with an abort.
        """
        self._leaving = True
        if self._queue.busy():
            self._transport.abort()
            self._queue.close(_DRAIN_S)


def _leave(operations: weakref.ref[Operations]) -> None:
    """What atexit calls; it must not keep alive what nobody uses any more."""
    alive = operations()
    if alive is not None:
        alive.leave()


_all: weakref.WeakSet[Operations] = weakref.WeakSet()


def _after_fork() -> None:
    for operations in list(_all):
        operations.disown()


os.register_at_fork(after_in_child=_after_fork)
