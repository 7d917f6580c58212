"""The Watch, which detects the end of ranks, and forwards the reports of ranks whose operations fail.

Its connections carry no tensors, so they work when a backend does not: when gloo does not notice that a peer was
killed, when the store ended with the host of rank 0, and with NCCL, which never reports a lost peer. Each rank is
connected to the ranks 1, 2, 4, ... places before and after it (a circulant graph), so any two ranks are at most
log2(size) connections apart. A rank forwards each message once; a message not seen before is *news*. If a connection
ends without a final message, the rank at its other end counts as lost, unless it replies to this news that it is alive.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from gradwire.collectives.control.paths import unconfirmed_bytes

_log = logging.getLogger("gradwire")

_LENGTH = struct.Struct("!I")
#: Longer than any report, whose calls list at most some thousand tensors.
_LONGEST_NEWS = 1 << 24
#: The most that read() receives at a time, and in how many pieces, so that no sender keeps the thread of all connections.
_PIECE_BYTES, _PIECES = 1 << 16, 16

#: How long close() tries to send the last messages, and how long if some ranks may be unreachable: the other ranks
#: receive them within milliseconds.
_FLUSH_S, _FLUSH_AFTER_FAILURE_S = 2.0, 0.2

#: Seconds between two checks of the losses that a launcher has noted.
_NOTES_POLL_S = 0.1

#: Seconds between two checks whether sent messages are acknowledged.
_POLL_S = 0.01


class Neighbour:
    """A connection, with the bytes read of the next message and the bytes still to be written."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.incoming = bytearray()
        self.outgoing = bytearray()

    def put(self, text: bytes) -> None:
        """Write a message, as much of it as possible without waiting; write() writes the rest. text: JSON."""
        self.outgoing += _LENGTH.pack(len(text)) + text
        self.write()

    def say(self, **message: Any) -> None:
        """Write a message of numbers, strings, and lists and dicts of them, as put() does."""
        self.put(json.dumps(message).encode())

    def write(self) -> None:
        """Write as much as possible without waiting. If the connection is broken, drop the rest."""
        try:
            while self.outgoing:
                del self.outgoing[: self.socket.send(self.outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            self.outgoing.clear()

    def is_unconfirmed(self) -> bool:
        """Return whether written bytes are still unacknowledged. The kernel of the other host acknowledges them within
        milliseconds, even if its process is stopped."""
        try:
            return unconfirmed_bytes(self.socket) > 0
        except OSError:  # the connection has ended
            return False

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the messages that are complete, and whether the connection has ended. Only for authenticated connections."""
        ended = False
        try:
            for _ in range(_PIECES):
                if not (piece := self.socket.recv(_PIECE_BYTES)):
                    ended = True
                    break
                self.incoming += piece
        except OSError as error:
            ended = not isinstance(error, BlockingIOError)
        messages: list[dict[str, Any]] = []
        while len(self.incoming) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self.incoming)
            if length > _LONGEST_NEWS:
                return messages, True
            if len(self.incoming) < _LENGTH.size + length:
                break
            messages.append(json.loads(self.incoming[_LENGTH.size : _LENGTH.size + length]))
            del self.incoming[: _LENGTH.size + length]
        return messages, ended


def poll_of(watched: Iterable[int | socket.socket], neighbours: Iterable[Neighbour] = ()) -> select.poll:
    """Return a poll for input from any of these, and for output to each Neighbour that has something to write."""
    poll = select.poll()
    for each in watched:
        poll.register(each, select.POLLIN)
    for neighbour in neighbours:
        poll.register(neighbour.socket, select.POLLIN | (select.POLLOUT if neighbour.outgoing else 0))
    return poll


class Watch:
    """Exchanges news with the other ranks, and holds the state of all ranks.

    Attributes, for reading: lost, the ranks whose process has ended, or whose host does not answer, with the time at
    which that was noticed (time.monotonic()); cut, the pairs of ranks that are alive but no longer connected; left, the
    ranks that close their Communicator, with the number of the first operation in which they take no part, in the order
    of their messages; reasons, by rank, the exceptions because of which ranks leave; done, the ranks that have finished
    all operations; reports, each rank's report of a failure; failure, why this rank receives no more news, or empty;
    has_news, whether any of these is set; posts, by topic and rank, the latest post of each rank, including this one.
    """

    def __init__(self, rank: int, size: int, connections: dict[int, socket.socket]) -> None:
        """Start the Watch's thread. connections: from Listener.join, by rank; the Watch closes them."""
        self.rank = rank
        self.size = size
        self.lost: dict[int, float] = {}
        self.cut: set[tuple[int, int]] = set()
        self.left: dict[int, int] = {}
        self.reasons: dict[int, str] = {}
        self.done: set[int] = set()
        self.reports: dict[int, dict[str, Any]] = {}
        self.failure = ""
        self.has_news = False
        self.posts: dict[str, dict[int, Any]] = {}
        self._post_numbers: dict[tuple[str, int], int] = {}
        self._seen: set[str] = set()
        self._seen_ending: set[tuple[int, int]] = set()  # (rank, the rank that saw its connection end)
        self._given_up: set[int] = set()  # ranks that a launcher counts as lost
        self._neighbours = {peer: Neighbour(connection) for peer, connection in connections.items()}
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], float | None]] = []
        self._close_by: float | None = None
        self._ending = False
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        if connections:
            self._thread = threading.Thread(target=self._serve, name="gradwire-watch", daemon=True)
            self._thread.start()

    def on_news(self, listener: Callable[[], float | None]) -> None:
        """Call a function on the Watch's thread whenever news may have arrived. It returns the seconds after which to
        call it again without news, or None."""
        self._listeners.append(listener)
        self._wake_up()

    def look_at(self, noted: Callable[[], Iterable[int]]) -> None:
        """Ten times a second, report to all ranks the ranks that noted() returns: as lost, even if they answer, or as
        done if they have left. (If a host's link is cut, no connection ends for many seconds.) noted: must not wait."""

        def report() -> float:
            for rank in self.others.intersection(noted()):
                self._send("done" if rank in self.left else "given up", rank)
            return _NOTES_POLL_S

        self.on_news(report)

    def report_leaving(self, sequence: int, why: str = "") -> None:
        """Report to all ranks that this rank takes no part in operations from a number on. why: the exception because
        of which it leaves; empty if there is none."""
        self._send("leaving", self.rank, sequence=sequence, why=why)

    def report_done(self) -> None:
        """Report to all ranks that this rank has finished all its operations."""
        self._send("done", self.rank)

    def report_failure(self, report: dict[str, Any]) -> None:
        """Report a failure to all ranks. report: numbers, strings, and lists and dicts of them."""
        self._send("report", self.rank, report=report)

    def post(self, topic: str, body: Any) -> None:
        """Replace this rank's last post on a topic, on all ranks. body: numbers, strings, lists and dicts of them."""
        with self._changed:
            number = self._post_numbers.get((topic, self.rank), 0) + 1
            self._send("post", self.rank, topic=topic, number=number, body=body)

    def reset_has_news(self) -> None:
        """Set has_news to whether there is news, after the caller has set it because of a post."""
        with self._changed:
            self.has_news = bool(self._seen or self.failure)

    def report_unreachable(self, timeout_s: float) -> None:
        """Wait until all neighbours that have reported a failure have acknowledged this rank's messages. If some have
        not within timeout_s seconds, report to all ranks that they are alive, but not connected to this rank."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._changed:
                neighbours = self._neighbours.items()
                unreachable = [peer for peer, each in neighbours if peer in self.reports and each.is_unconfirmed()]
            if not unreachable or time.monotonic() >= deadline:
                break
            time.sleep(_POLL_S)
        for peer in unreachable:
            self._send("alive", peer, by=self.rank)

    def is_unconfirmed(self) -> bool:
        """Return whether a neighbour's host has not acknowledged all messages of this rank. A host that can be reached
        does so within milliseconds, even if its process is stopped."""
        with self._changed:
            return any(each.outgoing or each.is_unconfirmed() for each in self._neighbours.values())

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until news makes the condition true; return whether it did within timeout_s seconds."""
        with self._changed:
            return self._changed.wait_for(condition, timeout_s)

    @property
    def others(self) -> set[int]:
        """All ranks but this one."""
        return set(range(self.size)) - {self.rank}

    def close(self, *, after_failure: bool = False) -> None:
        """Begin to send the last messages and to close the connections; join() waits until that is done. after_failure:
        whether some ranks may be unreachable. Calling it again does nothing."""
        if os.getpid() != self._process or self._close_by is not None:
            return
        with self._changed:
            self._close_by = time.monotonic() + (_FLUSH_AFTER_FAILURE_S if after_failure else _FLUSH_S)
            if self._thread is None:
                self._end()
            else:
                self._wake_up()

    def join(self) -> None:
        """Wait until close() has finished: at most four seconds, if a peer does not read."""
        if self._thread is not None and os.getpid() == self._process:
            self._thread.join(2 * _FLUSH_S)

    def disown(self) -> None:
        """Close this process's connections, such as a forked child's copies, which must end with the rank itself."""
        for neighbour in self._neighbours.values():
            neighbour.socket.close()
        self._wake.close()
        self._woken.close()

    def _send(self, kind: str, rank: int, **body: Any) -> None:
        with self._changed:
            if self._close_by is None:
                self._take({"kind": kind, "rank": rank} | body)

    def _take(self, message: dict[str, Any]) -> None:
        """Process a message, and forward it, if it is news or a newer post."""
        text = json.dumps(message).encode()
        kind, rank = message["kind"], message["rank"]
        if kind == "post":
            topic = message["topic"]
            if message["number"] <= self._post_numbers.get((topic, rank), 0):  # a later post has arrived first
                return
            self._post_numbers[topic, rank] = message["number"]
            self.posts.setdefault(topic, {})[rank] = message["body"]
        else:
            known = text.decode() if kind != "report" else f"report {rank}"
            if known in self._seen:
                return
            self._seen.add(known)
            self.has_news = True
        if kind in ("lost", "alive"):
            self._note_end(rank, message["by"], is_alive=kind == "alive")
        elif kind == "given up":
            self._given_up |= {rank} - {self.rank}
            self._note_lost()
        elif kind == "leaving":
            self.left[rank] = min(message["sequence"], self.left.get(rank, message["sequence"]))
            if message["why"]:
                self.reasons.setdefault(rank, message["why"])
        elif kind == "done":
            self.done.add(rank)
        elif kind == "report":
            self.reports[rank] = message["report"]
        for neighbour in self._neighbours.values():
            neighbour.put(text)
        if any(neighbour.outgoing for neighbour in self._neighbours.values()):
            self._wake_up()
        self._changed.notify_all()
        if kind == "lost" and rank == self.rank:
            self._take({"kind": "alive", "rank": rank, "by": message["by"]})

    def _note_end(self, rank: int, by: int, *, is_alive: bool) -> None:
        """Record that the connection of rank `by` to a rank has ended, or that this rank is alive all the same."""
        pair = min(rank, by), max(rank, by)
        if is_alive:
            self.cut.add(pair)
            self._seen_ending.discard((rank, by))
        elif rank != self.rank and pair not in self.cut:
            self._seen_ending.add((rank, by))
        self._note_lost()

    def _note_lost(self) -> None:
        lost = self._given_up | {who for who, _ in self._seen_ending}
        self.lost = {who: self.lost.get(who, time.monotonic()) for who in lost}

    def _wake_up(self) -> None:
        with suppress(OSError):  # raised if wake-ups are pending already, or the thread has ended
            self._wake.send(b"!")

    def _serve(self) -> None:
        try:
            again_s: float | None = None
            while True:
                with self._changed:
                    poll = poll_of([self._woken], self._neighbours.values())
                ready = poll.poll(None if again_s is None else again_s * 1000)
                with self._changed:
                    self._look(dict(ready))
                    if self._close_by is not None and self._has_closed(self._close_by):
                        return
                wanted = [again for listener in self._listeners if (again := listener()) is not None]
                again_s = min(wanted, default=None)
                if self._close_by is not None:
                    again_s = _FLUSH_S / 40
        except Exception as error:  # _end() closes the connections, so the other ranks count this one as lost
            _log.exception("gradwire: rank %d no longer receives news of the other ranks", self.rank)
            self.failure = repr(error)
            self.has_news = True
        finally:
            with self._changed:
                self._end()
                self._changed.notify_all()

    def _has_closed(self, close_by: float) -> bool:
        """Continue a close(); return whether it has finished.

        Closing a connection that has unread input resets it, and the last messages are lost. So each end shuts down its
        output after the last message, and reads until the other end has done the same.
        """
        if not self._ending and not any(neighbour.outgoing for neighbour in self._neighbours.values()):
            self._ending = True
            for neighbour in self._neighbours.values():
                with suppress(OSError):
                    neighbour.socket.shutdown(socket.SHUT_WR)
        return not self._neighbours or time.monotonic() >= close_by

    def _look(self, ready: dict[int, int]) -> None:
        """Read from and write to the connections that are ready."""
        if self._woken.fileno() in ready:
            self._woken.recv(1 << 12)
        for peer, neighbour in list(self._neighbours.items()):
            if neighbour.socket.fileno() not in ready:
                continue
            neighbour.write()
            messages, ended = neighbour.read()
            for message in messages:
                self._take(message)
            if ended:
                del self._neighbours[peer]
                neighbour.socket.close()
                if peer in self.left:
                    self._send("done", peer)
                else:
                    self._send("lost", peer, by=self.rank)

    def _end(self) -> None:
        self.disown()
        self._neighbours.clear()
