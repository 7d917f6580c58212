"""The Channel of a Communicator: the small records that its ranks exchange over their Monitor, and what is known of each rank.

A Channel has no connections and no thread. Its messages travel with a tag over the connections of the Monitor, which the process
made when the ranks met.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

from gradwire.collectives.errors import LinkError, ranks_text

if TYPE_CHECKING:
    from gradwire.collectives.control.monitor import Monitor
    from gradwire.collectives.control.records import Connection

_log = logging.getLogger("gradwire")

#: How long ranks may take to answer that they run.
ANSWER_S = 0.5

#: Seconds between two checks of what no message reports.
_CHECK_S = 0.03

#: Seconds between two checks whether sent messages are acknowledged.
_POLL_S = 0.01

_COMPILES = "compiles"


@dataclass(frozen=True)
class Failure:
    """The reason why ranks cannot connect. ranks: those at fault. why: the reason as text. ended: whether their processes have
    ended. timed_out: whether a deadline has passed."""

    ranks: tuple[int, ...]
    why: str
    ended: bool = False
    timed_out: bool = False

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Failure:
        """Return the Failure for an error on a rank: of the ranks that a LinkError names, else of this rank."""
        if isinstance(error, LinkError):
            return cls(tuple(sorted(error.awaited)), str(error), error.ended, error.timed_out)
        return cls((rank,), f"rank {rank} raised {type(error).__name__}: {error}")

    @classmethod
    def loss_of(cls, ranks: Collection[int]) -> Failure:
        """Return the Failure of ranks whose processes have ended."""
        return cls(tuple(sorted(ranks)), f"lost {ranks_text(ranks)}", ended=True)

    def as_link_error(self) -> LinkError:
        """Return the error that the other ranks raise for it."""
        return LinkError(None, timed_out=self.timed_out, detail=self.why, awaited=self.ranks, ended=self.ended)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Failure:
        """Return the Failure whose asdict() is a record."""
        return cls(tuple(record["ranks"]), record["why"], record["ended"], record["timed_out"])


class Channel:
    """Exchanges news between the ranks of a Communicator, and holds the state of each.

    Attributes, for reading: lost, the ranks whose process has ended, or whose host does not answer, with the time at
    which that was noticed (time.monotonic()); cut, the pairs of ranks that are alive but no longer connected; left, the
    ranks that close their Communicator, with the number of the first operation in which they take no part, in the order
    of their messages; reasons, by rank, the exceptions because of which ranks leave; done, the ranks that have finished
    all operations; reports, each rank's report of a failure; failure, why this rank receives no more news, or empty;
    has_news, whether any of these is set; refusal, why the ranks cannot connect, or None; posts, by topic and rank, the
    latest post of each rank, including this one.
    """

    def __init__(
        self, rank: int, size: int, monitor: Monitor | None = None, places: Sequence[int] = (), tag: str = ""
    ) -> None:
        """Without a monitor, the Channel of a rank alone. places: the ranks' places in the monitor. tag: of the messages."""
        self.rank = rank
        self.size = size
        self.tag = tag
        self.places = tuple(places)
        self.lost: dict[int, float] = {}
        self.cut: set[tuple[int, int]] = set()
        self.left: dict[int, int] = {}
        self.reasons: dict[int, str] = {}
        self.done: set[int] = set()
        self.reports: dict[int, dict[str, Any]] = {}
        self.failure = ""
        self.has_news = False
        self.refusal: Failure | None = None
        self.posts: dict[str, dict[int, Any]] = {}
        self.is_changed = False  # whether the listeners are to be called
        self.due = math.inf  # when to call them without news
        self._has_news = False
        self._exchanges = 0
        self._answered: set[int] = set()
        self._listeners: list[Callable[[], float | None]] = []
        self._monitor = monitor
        self._ranks = {place: rank for rank, place in enumerate(self.places)}
        self._changed = threading.Condition(threading.RLock() if monitor is None else monitor.lock)
        self._is_closed = False
        self._process = os.getpid()

    # What the engine uses

    def on_news(self, listener: Callable[[], float | None]) -> None:
        """Call a function on the Monitor's thread whenever news may have arrived. It returns the seconds after which to
        call it again without news, or None."""
        with self._changed:
            self._listeners.append(listener)
            self.is_changed = True
        if self._monitor is not None:
            self._monitor.wake_up()

    def report_leaving(self, sequence: int, why: str = "") -> None:
        """Report to all ranks that this rank takes no part in operations from a number on. why: the exception because
        of which it leaves; empty if there is none."""
        self._send("leaving", sequence, why)

    def report_done(self) -> None:
        """Report to all ranks that this rank has finished all its operations."""
        self._send("done")

    def report_failure(self, report: dict[str, Any]) -> None:
        """Report a failure to all ranks. report: numbers, strings, and lists and dicts of them."""
        self._send("report", report)

    def post(self, topic: str, body: Any) -> None:
        """Replace this rank's last post on a topic, on all ranks. body: numbers, strings, lists and dicts of them."""
        self._send("post", topic, body)

    def reset_has_news(self) -> None:
        """Set has_news to whether there is news, after the caller has set it because of a post."""
        with self._changed:
            self.has_news = self._has_news or bool(self.failure)

    def report_unreachable(self, timeout_s: float) -> None:
        """Wait until all neighbours that have reported a failure have acknowledged this rank's messages. If some have
        not within timeout_s seconds, report to all ranks that they are alive, but not connected to this rank."""
        if (monitor := self._monitor) is None:
            return
        deadline = time.monotonic() + timeout_s
        while True:
            with self._changed:
                unreachable = monitor.unconfirmed([self.places[rank] for rank in self.reports])
            if not unreachable or time.monotonic() >= deadline:
                break
            time.sleep(_POLL_S)
        for place in unreachable:
            monitor.report_alive(place)

    def is_unconfirmed(self) -> bool:
        """Return whether a neighbour's host has not acknowledged all messages of this rank. A host that can be reached
        does so within milliseconds, even if its process is stopped."""
        return self._monitor is not None and bool(self._monitor.unconfirmed(range(self._monitor.size)))

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until news makes the condition true; return whether it did within timeout_s seconds."""
        with self._changed:
            return self._changed.wait_for(condition, timeout_s)

    @property
    def others(self) -> set[int]:
        """All ranks but this one."""
        return set(range(self.size)) - {self.rank}

    def close(self, *, after_failure: bool = False) -> None:
        """End the exchange of news; to the other ranks, this one has finished all operations. after_failure: whether some
        ranks may be unreachable. The Monitor ends too if this was its last Channel, and the ranks that have met no longer need
        it. Calling it again does nothing."""
        if os.getpid() != self._process:
            return
        with self._changed:
            self._send("done")
            is_closed, self._is_closed = self._is_closed, True
        if self._monitor is not None and not is_closed:
            self._monitor.drop(self, after_failure=after_failure)

    def join(self) -> None:
        """Wait until the Monitor has ended, if it ends: at most four seconds, if a peer does not read."""
        if self._monitor is not None:
            self._monitor.join()

    # What ranks that make a Communicator use

    def exchange(
        self,
        topic: str,
        mine: Any,
        deadline: float,
        compile_s: float = 0.0,
        check: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        """Return every rank's record, by rank. A collective call. topic: the same on all ranks.

        deadline: time.monotonic() seconds, extended by compile_s for ranks that have called compiles(). check: called
        repeatedly; raises LinkError to end a useless wait. Raises LinkError with ranks that are missing, have ended, or cannot
        connect.
        """
        topic = f"{topic} {self._exchanges}"  # a rank may begin the next exchange before this one has all records
        self._exchanges += 1
        self.post(topic, mine)
        posts = self.posts[topic]
        while missing := set(range(self.size)) - posts.keys():
            self.check()
            check()
            now = time.monotonic()
            if now >= deadline:
                compiling = self.posts.get(_COMPILES, {}) if now < deadline + compile_s else ()
                if late := missing.difference(compiling):
                    detail = f"{ranks_text(late)} did not arrive"
                    raise LinkError(None, timed_out=True, detail=detail, awaited=late)
            self.wait_for(lambda: len(posts) == self.size or bool(self.refusal or self.lost or self.failure), _CHECK_S)
        del self.posts[topic]
        return [posts[rank] for rank in range(self.size)]

    def compiles(self) -> None:
        """Report to all ranks that this rank compiles kernels before it takes part in an exchange."""
        self.post(_COMPILES, True)

    def refuse(self, failure: Failure) -> None:
        """Report to the other ranks the reason why the ranks cannot connect. The first report counts."""
        self._send("refusal", *astuple(failure))

    def check(self) -> None:
        """Raise LinkError with the ranks, if ranks are known to have ended or to be unable to connect."""
        if self.refusal is not None:
            raise self.refusal.as_link_error()
        if self.lost:
            raise Failure.loss_of(self.lost).as_link_error()
        if self.failure:
            raise LinkError(self.rank, timed_out=False, detail=f"rank {self.rank}: {self.failure}", awaited={self.rank})

    def cause(self, within_s: float) -> LinkError | None:
        """Return the error of other ranks that keeps these from connecting; None if it is not known within within_s seconds."""
        self.wait_for(lambda: self.refusal is not None or bool(self.lost), within_s)
        try:
            self.check()
        except LinkError as error:
            return error
        return None

    def leave_unconnected(self) -> None:
        """Report to the other ranks that this one does not connect, and close."""
        self.report_leaving(0)
        self.close()

    def silent(self) -> set[int]:
        """Return the other ranks whose processes do not answer, because they are stopped or gone."""
        self._send("ask")
        self.wait_for(lambda: self.others <= self._answered or self.refusal is not None, 2 * ANSWER_S)
        if self.refusal is not None:
            return set(self.refusal.ranks) - {self.rank}
        return self.others - self._answered

    def connect(self, peers: Collection[int], deadline: float) -> dict[int, Connection]:
        """Return new connections to other ranks, which call this too, by rank. A collective call. Raises LinkError with the ranks
        that do not connect, LargePacketsLost for a path that loses large packets."""
        assert self._monitor is not None
        return self._monitor.join_peers(self, peers, deadline)

    # What the Monitor calls, with its lock

    def take(self, place: int, kind: str, body: Sequence[Any]) -> None:
        """Process a message from a place."""
        rank = self._ranks[place]
        if kind == "post":
            topic, record = body
            self.posts.setdefault(topic, {})[rank] = record
        elif kind == "ask":
            self._send("answer", rank)
        elif kind == "answer":
            self._answered |= {rank} if body[0] == self.rank else set()
        elif kind == "refusal":
            ranks, *rest = body
            self.refusal = self.refusal or Failure(tuple(ranks), *rest)
        else:
            self.has_news = self._has_news = True
        if kind == "leaving":
            sequence, why = body
            self.left[rank] = min(sequence, self.left.get(rank, sequence))
            if why:
                self.reasons.setdefault(rank, why)
        elif kind == "done":
            self.done.add(rank)
        elif kind == "report":
            self.reports.setdefault(rank, body[0])
        self.notify()

    def note(self, lost: Mapping[int, float], gone: Collection[int], cut: Collection[tuple[int, int]]) -> None:
        """Take over what the Monitor knows of the processes. lost: places, with times. gone: places that have ended in order,
        and take part in no Channel any more. cut: pairs of places."""
        for rank, place in enumerate(self.places):
            has_ended = place in lost or place in gone
            if has_ended and rank in self.left:
                self.done.add(rank)
            elif has_ended:
                self.lost.setdefault(rank, lost.get(place, time.monotonic()))
            else:
                self.lost.pop(rank, None)
        pairs = ([self._ranks.get(place, -1) for place in pair] for pair in cut)
        self.cut = {(min(pair), max(pair)) for pair in pairs if -1 not in pair}
        if self.lost or self.cut or self.done:
            self.has_news = self._has_news = True
        self.notify()

    def repeat_to(self, place: int) -> None:
        """Send again what this rank has reported, if a place is that of another rank of the Channel."""
        me = self.rank
        if place not in self._ranks:
            return
        for topic, posts in list(self.posts.items()):
            if me in posts:
                self._send("post", topic, posts[me])
        if me in self.reports:
            self._send("report", self.reports[me])
        if me in self.left:
            self._send("leaving", self.left[me], self.reasons.get(me, ""))
        if me in self.done:
            self._send("done")

    def fail(self, why: str) -> None:
        """Record that this rank receives no more news."""
        self.failure = why
        self.has_news = True
        self.notify()

    def notify(self) -> None:
        """Wake what waits for news, and let the listeners be called."""
        self.is_changed = True
        self._changed.notify_all()

    def call_listeners(self) -> None:
        """Call the listeners, on the Monitor's thread and without its lock. An error of one of them ends the news of this Channel
        alone."""
        self.is_changed = False
        try:
            again = [seconds for listener in self._listeners if (seconds := listener()) is not None]
        except Exception as error:
            _log.exception("gradwire: rank %d no longer receives news of the other ranks in a Communicator", self.rank)
            self._listeners.clear()
            with self._changed:
                self.fail(repr(error))
            self.report_leaving(0, repr(error))
            again = []
        self.due = time.monotonic() + min(again) if again else math.inf

    def _send(self, kind: str, *body: Any) -> None:
        with self._changed:
            if self._is_closed:
                return
            if self._monitor is None:
                self._ranks = self._ranks or {self.rank: self.rank}
                self.take(self.rank, kind, body)
            else:
                self._monitor.send(self.tag, kind, body)
