"""The Monitor of a process, which detects the end of other processes, and carries the messages of its Channels.

Ranks that meet make one Monitor each. Its connections carry no tensors, so they work when a backend does not: when gloo does
not notice that a peer was killed, when the store ended with the host of rank 0, and with NCCL, which never reports a lost peer.
Each rank is connected to the ranks 1, 2, 4, ... places before and after it (a circulant graph), so any two ranks are at most
log2(size) connections apart. A rank forwards each message once. If a connection ends without a final message, the rank at its
other end counts as lost, unless it replies that it is alive.

All messages of a rank arrive everywhere in the order in which it sent them: each connection keeps the order, and each rank
forwards messages in the order in which they arrived first. So the number of the last one tells which are old. If so many ranks
end that others are no longer connected, those of a common Channel connect again, and repeat what they have said.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import math
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from gradwire.collectives.control.addresses import seen_from
from gradwire.collectives.control.channel import Channel
from gradwire.collectives.control.handshake import (
    MOST_UNVERIFIED,
    Arrived,
    Door,
    dial,
    give_up_on_silence,
)
from gradwire.collectives.control.key import Key
from gradwire.collectives.control.neighbour import Neighbour, poll_of
from gradwire.collectives.control.paths import check_paths
from gradwire.collectives.control.ports import listen_in
from gradwire.collectives.control.private import HANDSHAKE_S, PURPOSE_BYTES
from gradwire.collectives.control.records import Connection
from gradwire.collectives.errors import ForgedMessage, LinkError, ranks_text
from gradwire.collectives.forks import in_forked_child

if TYPE_CHECKING:
    from gradwire.collectives.control.coordinator import Coordinator

_log = logging.getLogger("gradwire")

#: The place of the rank that sends a message, and the message's number.
_HEADER = struct.Struct("!IQ")

#: The purposes of connections to the Coordinator, and between Monitors. Others are for the tensors of a Channel.
TO_COORDINATOR, _BETWEEN_MONITORS = (name.ljust(PURPOSE_BYTES - 1, b"\0") for name in (b"coordinator", b"monitor"))

#: The last byte of the purpose of a connection: whether the rank that dials tests the path.
_TESTS, _TRUSTS = b"\x01", b"\0"

_SCOPE_DIGITS = 16

#: How long close() tries to send the last messages, and how long if some ranks may be unreachable: the other ranks
#: receive them within milliseconds.
_FLUSH_S, _FLUSH_AFTER_FAILURE_S = 2.0, 0.2

#: Seconds between two checks of the losses that a launcher has noted, and of waits for connections.
_NOTES_POLL_S, _CHECK_S = 0.1, 0.03


def neighbours(rank: int, size: int) -> list[int]:
    """Return the ranks 1, 2, 4, ... places before and after one: any two ranks are at most log2(size) connections apart."""
    steps = [sign << k for k in range((size - 1).bit_length()) for sign in (1, -1)]
    return sorted({(rank + step) % size for step in steps} - {rank})


class Monitor:
    """The connections of this process to others that it has met, a listening socket, and a thread.

    Attributes, for reading: lost, the ranks whose process has ended, or whose host does not answer, with the time at which that
    was noticed; cut, the pairs of ranks that are alive but no longer connected; gone, the ranks that have ended in order; unmet,
    those of them to which not all ranks were connected; has_met, whether all were connected to this rank; port, at which this
    process listens; secret, which all ranks know, and no other process: a Key where the job has one; cards, what each rank has
    said of itself, and key, a name of these ranks only, both set once the ranks have met.
    """

    def __init__(self, rank: int, size: int, address: str, ports: range | None = None) -> None:
        """Listen on a free port of an address. ports: see ports.listen_in(). Raises OSError if this process cannot."""
        self.rank, self.size, self.address = rank, size, address
        self.lost: dict[int, float] = {}
        self.cut: set[tuple[int, int]] = set()
        self.gone: set[int] = set()
        self.unmet: set[int] = set()
        self.has_met = False
        self.cards: Sequence[Mapping[str, Any]] = ()
        self.key = ""
        self.lock = threading.RLock()
        self._listening = listen_in(address, ports)
        self.port: int = self._listening.getsockname()[1]
        self._door: Door | None = None
        self.secret: bytes | Key = b""
        self._coordinator: Coordinator | None = None
        self._neighbours: dict[int, Neighbour] = {}
        self._is_connected = False
        self._reaching: set[int] = set()  # ranks to which this one connects again
        self._number = 0
        self._outbox = deque[tuple[str, str, Sequence[Any]]]()
        self._is_sending = False
        self._seen = [0] * size
        self._seen_ending: set[tuple[int, int]] = set()  # (rank, the rank that saw its connection end)
        self._given_up: set[int] = set()  # ranks that a launcher counts as lost
        self._noted: Callable[[], Iterable[int]] | None = None
        self._channels: dict[str, Channel] = {}
        self._opened = Counter[str]()
        self._early: dict[str, list[tuple[int, str, list[Any]]]] = {}  # messages of Channels that this rank will open
        self._accepted: dict[tuple[bytes, int], Arrived] = {}  # by purpose, without its last byte, and place
        self._tested: set[int] = set()
        self._arrivals = threading.Condition(self.lock)
        self._holds = 1
        self._after_failure = False
        self._close_by: float | None = None
        self._ending = False
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        in_forked_child(self, Monitor.disown)

    def start(self, secret: bytes | Key, coordinator: Coordinator | None = None) -> None:
        """Accept connections of processes that know the secret, on a new thread. coordinator: that of the ranks, if it is in
        this process. Raises RuntimeError if no thread can be started."""
        self.secret, self._coordinator = secret, coordinator
        self._door = Door(self._listening, self.rank, secret, max(MOST_UNVERIFIED, self.size))
        thread = threading.Thread(target=self._serve, name="gradwire-monitor", daemon=True)
        thread.start()
        self._thread = thread
        atexit.register(_end_at_exit, weakref.ref(self))

    @property
    def is_private(self) -> bool:
        """Return whether there is a key, so that connections are encrypted."""
        return isinstance(self.secret, Key)

    def connect(self, deadline: float, check: Callable[[], None]) -> None:
        """Connect to the neighbours; `cards` are set. Raises LinkError with the ranks that do not connect."""
        peers = {peer: peer for peer in neighbours(self.rank, self.size)}
        made = self._join(peers, _BETWEEN_MONITORS, deadline, check, small_segments=True)
        with self.lock:
            self._is_connected = True
            for place, arrived in made.items():
                self._add(place, arrived.connection)
            self.wake_up()

    def look_at(self, noted: Callable[[], Iterable[int]]) -> None:
        """Ten times a second, report to all ranks the ranks that noted() returns, as lost, even if they answer. (If a host's
        link is cut, no connection ends for many seconds.) noted: must not wait."""
        self._noted = noted
        self.wake_up()

    def open(self, places: Sequence[int], scope: str) -> Channel:
        """Return a new Channel among ranks, this one among them: rank r of the Channel is at places[r]. All of these ranks open
        the Channels of the same places and scope in the same order."""
        members = sum(1 << place for place in places)
        name = f"{members:x} {hashlib.sha256(f'{list(places)} {scope}'.encode()).hexdigest()[:_SCOPE_DIGITS]}"
        with self.lock:
            number = self._opened[name]
            self._opened[name] += 1
            tag = f"{name} {number}"
            channel = Channel(places.index(self.rank), len(places), self, places, tag)
            self._channels[tag] = channel
            for message in self._early.pop(tag, ()):
                channel.take(*message)
            if self.lost or self.gone or self.cut:
                channel.note(self.lost, self.gone, self.cut)
            return channel

    def drop(self, channel: Channel, *, after_failure: bool) -> None:
        """Take no more messages of a Channel. End if it was the last one, and release() was called."""
        with self.lock:
            self._channels.pop(channel.tag, None)
            for key in [key for key in self._accepted if key[0] == _purpose_of(channel.tag)]:
                self._accepted.pop(key).connection.close()
            self._after_failure |= after_failure
        self._end_if_unused()

    def hold(self) -> None:
        """Keep the Monitor until one more call of release()."""
        with self.lock:
            self._holds += 1

    def release(self) -> None:
        """End after as many calls as there were of hold(), and one more, unless a Channel is open; then the Monitor ends with the
        last one."""
        if not self._is_ours():  # in a forked child, a thread of the parent may have held the lock
            return
        with self.lock:
            self._holds -= 1
        self._end_if_unused()

    def end(self) -> None:
        """End, whether Channels are open or not, and wait until the last messages are sent."""
        if self._is_ours():
            self._channels.clear()
            self._holds = 0
            self._end_if_unused()
            self.join()

    def join(self) -> None:
        """Wait until the thread has ended, if it is about to: at most four seconds, if a peer does not read."""
        thread = self._thread
        if self._close_by is not None and thread not in (None, threading.current_thread()) and self._is_ours():
            assert thread is not None
            thread.join(2 * _FLUSH_S)

    def disown(self) -> None:
        """Close this process's sockets, such as a forked child's copies, which must end with the rank itself."""
        if self._coordinator is not None:
            self._coordinator.disown()
        if self._door is not None:
            self._door.close()
        for connection in (
            self._listening,
            *(neighbour.socket for neighbour in self._neighbours.values()),
            *(arrived.connection for arrived in self._accepted.values()),
            self._wake,
            self._woken,
        ):
            connection.close()

    def wake_up(self) -> None:
        """Wake up the thread, which then looks for messages to send and for times that have passed."""
        with suppress(OSError):  # raised if wake-ups are pending already, or the thread has ended
            self._wake.send(b"!")

    def send(self, tag: str, kind: str, body: Sequence[Any]) -> None:
        """Send a message to all ranks of a Channel, this one included; of all Channels if the tag is empty."""
        with self.lock:
            self._outbox.append((tag, kind, body))
            if not self._is_sending:  # else the garbage collector has called, in the middle of another message
                self._is_sending = True
                try:
                    self._send_all()
                finally:
                    self._is_sending = False

    def report_alive(self, place: int) -> None:
        """Report to all ranks that a rank is alive, but not connected to this one."""
        self.send("", "alive", [place, self.rank])

    def unconfirmed(self, places: Iterable[int]) -> list[int]:
        """Return the neighbours among some ranks whose hosts have not acknowledged all messages of this process."""
        with self.lock:
            found = {place: self._neighbours[place] for place in places if place in self._neighbours}
            return [place for place, each in found.items() if each.outgoing or each.is_unconfirmed()]

    def join_peers(self, channel: Channel, peers: Collection[int], deadline: float) -> dict[int, Connection]:
        """See Channel.connect."""
        numbers = {channel.places[rank]: rank for rank in peers}
        untested = {channel.places[rank] for rank in peers} - self._tested
        arrived = self._join(numbers, _purpose_of(channel.tag), deadline, channel.check, untested)
        made = {numbers[place]: each.connection for place, each in arrived.items()}
        try:
            tested = [numbers[place] for place, each in arrived.items() if each.purpose.endswith(_TESTS)]
            check_paths(channel.rank, {rank: made[rank] for rank in tested}, deadline, channel.check)
        except BaseException:
            for connection in made.values():
                connection.close()
            raise
        self._tested |= numbers.keys()
        return made

    # Connections

    def _join(
        self,
        peers: Mapping[int, int],
        purpose: bytes,
        deadline: float,
        check: Callable[[], None],
        tests: Collection[int] = (),
        *,
        small_segments: bool = False,
    ) -> dict[int, Arrived]:
        """Return connections to peers, which call this too, by place. peers: the numbers of ranks in errors, by place. tests: the
        places to which this rank tests the path if it dials."""
        made: dict[int, Arrived] = {}
        try:
            # The last rank accepts at once, the others when they have dialled: so each waits for one handshake, not for all.
            for place in sorted((place for place in peers if place > self.rank), reverse=True):
                card, whole = self.cards[place], purpose + (_TESTS if place in tests else _TRUSTS)
                connection = dial(
                    self.rank,
                    place,
                    self._place_of(card),
                    self.secret,
                    deadline,
                    check,
                    purpose=whole,
                    called=peers[place],
                    small_segments=small_segments,
                )
                made[place] = Arrived(place, connection, None, whole)
            while missing := {place for place in peers if place < self.rank} - made.keys():
                with self._arrivals:
                    if not any((purpose, place) in self._accepted for place in missing):
                        self._arrivals.wait(_CHECK_S)
                    for place in missing:
                        if (arrived := self._accepted.pop((purpose, place), None)) is not None:
                            made[place] = arrived
                if missing := missing - made.keys():
                    check()
                    if time.monotonic() >= deadline:
                        late = sorted(peers[place] for place in missing)
                        detail = f"{ranks_text(late)} did not connect"
                        raise LinkError(late[0], timed_out=True, detail=detail, awaited=late)
        except BaseException:
            for arrived in made.values():
                arrived.connection.close()
            raise
        return made

    def _let_in(self, arrived: Arrived) -> None:
        """Take an authenticated connection for what its purpose says."""
        key = arrived.purpose[:-1], arrived.rank
        if arrived.error is not None or key[0] == TO_COORDINATOR:
            if self._coordinator is not None:
                self._coordinator.let_in(arrived)
            else:
                arrived.connection.close()
        elif key in self._accepted or key[0] not in (_BETWEEN_MONITORS, *map(_purpose_of, list(self._channels))):
            arrived.connection.close()
        elif key[0] == _BETWEEN_MONITORS and self._is_connected:
            self._add(arrived.rank, arrived.connection)
        else:
            self._accepted[key] = arrived
            self._arrivals.notify_all()

    def _add(self, place: int, connection: Connection) -> None:
        """Add a connection to the Monitor of a rank."""
        if place in self._neighbours or self._close_by is not None:
            connection.close()
            return
        give_up_on_silence(connection)
        self._neighbours[place] = Neighbour(connection)
        for channel in list(self._channels.values()):
            channel.repeat_to(place)
        self.wake_up()

    def _connect_again(self) -> None:
        """Connect to the ranks of open Channels that no path of running ranks reaches any more."""
        running = set(range(self.size)) - self.gone - self.lost.keys()
        reached, new = set[int](), {self.rank}
        while new:
            reached |= new
            new = {peer for rank in new for peer in neighbours(rank, self.size)} & running - reached
        members = {place for channel in list(self._channels.values()) for place in channel.places}
        for place in (running & members) - reached - self._reaching - self._neighbours.keys():
            if place > self.rank:  # the other end accepts
                self._reaching.add(place)
                threading.Thread(target=self._reach, args=(place,), name="gradwire-reach", daemon=True).start()

    def _reach(self, place: int) -> None:
        card, purpose = self.cards[place], _BETWEEN_MONITORS + _TRUSTS
        there, deadline = self._place_of(card), time.monotonic() + HANDSHAKE_S
        with suppress(LinkError, OSError):  # it has ended too, or its host is out of reach: waits for it have deadlines
            made = dial(
                self.rank, place, there, self.secret, deadline, lambda: None, purpose=purpose, small_segments=True
            )
            with self.lock:
                self._add(place, made)

    def _place_of(self, card: Mapping[str, Any]) -> tuple[str, int]:
        """Return where a rank listens."""
        return seen_from(self.address, card["address"]), card["port"]

    # Messages

    def _send_all(self) -> None:
        """Send what is in the outbox."""
        while self._outbox:
            tag, kind, body = self._outbox.popleft()
            self._number += 1
            text = json.dumps([tag, kind, body]).encode()
            self._forward(_HEADER.pack(self.rank, self._number) + text, ())
            self._take(self.rank, tag, kind, list(body))
        if any(neighbour.outgoing for neighbour in self._neighbours.values()):
            self.wake_up()

    def _receive(self, message: bytes, sender: int) -> None:
        """Process a message, and forward it, unless it has arrived before."""
        place, number = _HEADER.unpack_from(message)
        if number <= self._seen[place] or place == self.rank:
            return
        self._seen[place] = number
        self._forward(message, (sender, place))
        self._take(place, *json.loads(message[_HEADER.size :]))

    def _forward(self, message: bytes, but: Collection[int]) -> None:
        for place, neighbour in self._neighbours.items():
            if place not in but:
                neighbour.put(message)

    def _take(self, place: int, tag: str, kind: str, body: list[Any]) -> None:
        if tag == "":
            self._take_own(place, kind, body)
        elif (channel := self._channels.get(tag)) is not None:
            channel.take(place, kind, body)
        else:
            members, scope, number = tag.split()
            if int(members, 16) >> self.rank & 1 and int(number) >= self._opened.get(f"{members} {scope}", 0):
                self._early.setdefault(tag, []).append((place, kind, body))

    def _take_own(self, place: int, kind: str, body: list[Any]) -> None:
        """Process a message of the Monitors themselves."""
        if kind == "gone":
            self.gone.add(place)
            self.unmet |= set() if body[0] else {place}
        elif kind == "forged":
            for channel in list(self._channels.values()):
                channel.fail(str(ForgedMessage(*body)))
        else:
            about, by = body
            pair = min(about, by), max(about, by)
            if kind == "alive":
                self.cut.add(pair)
                self._seen_ending.discard((about, by))
            elif kind == "given up":
                self._given_up |= {about} - {self.rank}
            elif about != self.rank and pair not in self.cut:  # lost
                self._seen_ending.add((about, by))
            lost = self._given_up | {who for who, _ in self._seen_ending}
            self.lost = {who: self.lost.get(who, time.monotonic()) for who in lost}
        for channel in list(self._channels.values()):
            channel.note(self.lost, self.gone, self.cut)
        if kind == "lost" and body[0] == self.rank:
            self.send("", "alive", body)
        elif self._channels:
            self._connect_again()

    # The thread

    def _serve(self) -> None:
        try:
            due = 0.0
            while True:
                poll, ready = self._poll(), {}
                with suppress(InterruptedError):
                    ready = dict(poll.poll(None if due == math.inf else max(0.0, due - time.monotonic()) * 1000 + 1))
                with self.lock:
                    self._is_sending = True
                    try:
                        self._look(ready)
                        self._send_all()
                    finally:
                        self._is_sending = False
                    if self._close_by is not None and self._has_closed(self._close_by):
                        return
                due = self._do_what_is_due(ready)
        except Exception as error:  # the end of the connections makes the other ranks count this one as lost
            _log.exception("gradwire: rank %d no longer receives news of the other ranks", self.rank)
            with self.lock:
                for channel in list(self._channels.values()):
                    channel.fail(repr(error))
        finally:
            if self._coordinator is not None:
                self._coordinator.flush()
            with self.lock:
                self.disown()
                self._neighbours.clear()

    def _poll(self) -> select.poll:
        """Return a poll for everything that the thread waits for."""
        assert self._door is not None
        with self.lock:
            others = [] if self._coordinator is None else self._coordinator.neighbours
            return poll_of((self._woken, *self._door.descriptors), (*self._neighbours.values(), *others))

    def _do_what_is_due(self, ready: Mapping[int, int]) -> float:
        """Let the Coordinator and the Channels do what is due, without the lock. Return the
        time.monotonic() at which something is due next."""
        assert self._door is not None
        now = time.monotonic()
        due = [math.inf if (until := self._door.due()) is None else until]
        if self._coordinator is not None:
            due.append(self._coordinator.serve(ready))
        if (noted := self._noted) is not None:
            for place in set(noted()).difference(self._given_up, self.gone, {self.rank}):
                self.send("", "given up", [place, self.rank])
            due.append(now + _NOTES_POLL_S)
        for channel in list(self._channels.values()):
            if channel.is_changed or channel.due <= now:
                channel.call_listeners()
            due.append(channel.due)
        if self._close_by is not None:
            due.append(now + _FLUSH_S / 40)
        return min(due)

    def _look(self, ready: Mapping[int, int]) -> None:
        """Read from and write to the connections that are ready."""
        assert self._door is not None
        if self._woken.fileno() in ready:
            self._woken.recv(1 << 12)
        for arrived in self._door.look(ready):
            self._let_in(arrived)
        if self._listening.fileno() in ready:
            try:
                self._door.accept()
            except OSError:  # this process has no descriptor left
                time.sleep(_CHECK_S)
        for place, neighbour in list(self._neighbours.items()):
            if neighbour.socket.fileno() not in ready:
                continue
            neighbour.write()
            messages, ended = neighbour.read()
            for message in messages:
                self._receive(message, place)
            if ended:
                del self._neighbours[place]
                neighbour.socket.close()
                if neighbour.is_forged:
                    self.send("", "forged", [place, self.rank])
                if place not in self.gone:
                    self.send("", "lost", [place, self.rank])

    def _end_if_unused(self) -> None:
        """Begin to send the last messages and to close the connections, if no Channel is open and nothing holds the Monitor."""
        if not self._is_ours():  # in a forked child, a thread of the parent may have held the lock
            return
        with self.lock:
            if self._holds > 0 or self._channels or self._close_by is not None:
                return
            self.send("", "gone", [self.has_met])
            self._close_by = time.monotonic() + (_FLUSH_AFTER_FAILURE_S if self._after_failure else _FLUSH_S)
            if self._thread is None:
                self.disown()
            self.wake_up()

    def _has_closed(self, close_by: float) -> bool:
        """Continue to end; return whether that has finished.

        Closing a connection that has unread input resets it, and the last messages are lost. So each end shuts down its
        output after the last message, and reads until the other end has done the same.
        """
        if not self._ending and not any(neighbour.outgoing for neighbour in self._neighbours.values()):
            self._ending = True
            for neighbour in self._neighbours.values():
                with suppress(OSError):
                    neighbour.socket.shutdown(socket.SHUT_WR)
        return not self._neighbours or time.monotonic() >= close_by

    def _is_ours(self) -> bool:
        """Return False in a forked child."""
        return os.getpid() == self._process


def _purpose_of(tag: str) -> bytes:
    """Return the purpose of the connections of a Channel."""
    return hashlib.sha256(tag.encode()).digest()[: PURPOSE_BYTES - 1]


def _end_at_exit(monitor: weakref.ref[Monitor]) -> None:
    if (alive := monitor()) is not None:
        alive.end()
