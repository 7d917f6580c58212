"""Connections that only the ranks of one job can make.

The two ends of a new connection authenticate each other before they exchange anything else. Each sends a greeting: its rank, its
build of gradwire, and a random challenge. Each then sends a proof: an HMAC-SHA256 (RFC 2104) of its role and of both greetings,
keyed with a secret of the job. Until an end has verified the proof of the other, it reads these fixed lengths and nothing more,
and interprets nothing. The format stays the same in all versions of gradwire, so that ranks with different builds find that out.
An end that has dialled a rank of the same build then sends the purpose of the connection. If there is a key, the ends do instead
what gradwire.collectives.control.private describes.
"""

from __future__ import annotations

import errno
import hmac
import logging
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from gradwire.collectives.control.addresses import socket_address
from gradwire.collectives.control.build import BUILD_BYTES, OtherBuild, build, other_build
from gradwire.collectives.control.key import Key
from gradwire.collectives.control.libcrypto import NoLibcrypto
from gradwire.collectives.control.paths import send_small_segments
from gradwire.collectives.control.private import HANDSHAKE_S, PRIVATE_MAGIC, PURPOSE_BYTES, PrivateHandshake
from gradwire.collectives.control.records import Connection
from gradwire.collectives.errors import LinkError

_log = logging.getLogger("gradwire")

_MAGIC = b"gradwire"
_CHALLENGE_BYTES, _PROOF_BYTES = 32, 32
#: _MAGIC, the rank, the build (ASCII, filled up with zeros), and the challenge.
_GREETING = struct.Struct(f"!{len(_MAGIC)}si{BUILD_BYTES}s{_CHALLENGE_BYTES}s")
HANDSHAKE_BYTES = _GREETING.size + _PROOF_BYTES

#: How many connections may be unauthenticated at a time; one more closes the oldest.
MOST_UNVERIFIED = 256

#: TCP keep-alive, which ends a connection to a silent host: idle seconds, seconds between probes, number of probes.
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 5))
_SILENCE_MS = 15_000

#: The errors of connecting that this process causes, and not the process at the other end.
OWN_FAULTS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)

#: Seconds between two calls of check() in a wait for another rank.
_CHECK_S = 0.03


class NotARank(ConnectionError):
    """The process at the other end of a connection does not know the secret of the job."""


class Handshake:
    """One end of the authentication of a new, nonblocking connection.

    Attributes: peer, the rank at the other end, and its build, once is_verified; until, when it must be (time.monotonic()).
    """

    def __init__(
        self, connection: socket.socket, rank: int, secret: bytes, *, dials: bool, purpose: bytes = bytes(PURPOSE_BYTES)
    ) -> None:
        """Send the greeting. dials: whether this process has made the connection, and not accepted it. purpose: what to send if
        it has."""
        self.connection = connection
        self.until = time.monotonic() + HANDSHAKE_S
        self.is_verified = False
        self.peer, self.build, self.purpose = -1, "", purpose
        self._rank, self._secret, self._dials = rank, secret, dials
        self._sent = _GREETING.pack(_MAGIC, rank, build().encode(), secrets.token_bytes(_CHALLENGE_BYTES))
        self._received = b""
        self._wanted = HANDSHAKE_BYTES
        self._send(self._sent)

    def advance(self) -> bool:
        """Read what has arrived, but no byte beyond the proof and the purpose, and answer a greeting by the proof. Return whether
        more has to arrive; if not, is_verified says whether the other end has authenticated itself."""
        before = len(self._received)
        try:
            piece = self.connection.recv(self._wanted - before)
        except OSError as error:
            return isinstance(error, BlockingIOError)
        self._received += piece
        if not piece or self._received[: len(_MAGIC)] != _MAGIC[: len(self._received)]:
            return False
        if before < _GREETING.size <= len(self._received):
            self._send(self._proof(self._dials, self._sent, self._received[: _GREETING.size]))
        if len(self._received) < self._wanted:
            return True
        if self._wanted > HANDSHAKE_BYTES:
            self.purpose = self._received[HANDSHAKE_BYTES:]
            self.is_verified = True
            return False
        greeting, proof = self._received[: _GREETING.size], self._received[_GREETING.size :]
        if not hmac.compare_digest(proof, self._proof(not self._dials, greeting, self._sent)):
            return False
        _, self.peer, name, _ = _GREETING.unpack(greeting)
        self.build = name.rstrip(b"\0").decode(errors="replace")
        if self._dials:
            self._send(self.purpose)
        elif self.other_build() is None:
            self._wanted += PURPOSE_BYTES
            return True
        self.is_verified = True
        return False

    def other_build(self) -> OtherBuild | None:
        """Return the error for a verified peer with another build of gradwire; None if it runs the same."""
        return other_build(self._rank, self.peer, self.build)

    def has_begun(self) -> bool:
        """Return whether the other end has sent anything."""
        return bool(self._received)

    def why(self) -> str:
        """Return why the other end, which has sent something else than a rank of the job, did so."""
        has_key = self._received.startswith(PRIVATE_MAGIC)
        return (
            "the process that listens there has a key, and this one has none"
            if has_key
            else "another program listens there"
        )

    def _proof(self, dials: bool, mine: bytes, theirs: bytes) -> bytes:
        """Return the proof of the end that dials, or of the one that listens. mine: the greeting that this end has sent."""
        return hmac.digest(self._secret, (b"dials" if dials else b"listens") + mine + theirs, "sha256")

    def _send(self, message: bytes) -> None:
        # advance() notices a connection that has ended; an empty buffer has room for both messages.
        with suppress(OSError):
            self.connection.send(message)


def handshake_of(
    connection: socket.socket,
    rank: int,
    secret: bytes | Key,
    *,
    dials: bool,
    purpose: bytes = bytes(PURPOSE_BYTES),
) -> Handshake | PrivateHandshake:
    """Begin the handshake of a new connection: with a Key, that which encrypts the connection. Arguments: see Handshake."""
    if isinstance(secret, Key):
        return PrivateHandshake(connection, rank, secret, dials=dials, purpose=purpose)
    return Handshake(connection, rank, secret, dials=dials, purpose=purpose)


def finish(handshake: Handshake | PrivateHandshake, deadline: float, check: Callable[[], None]) -> bool:
    """Run a handshake to its end, and return whether the other end has authenticated itself. check: see wait_ready. Raises
    TimeoutError at the deadline."""
    while True:
        wait_ready({handshake.connection: select.POLLIN}, deadline, check)
        if not handshake.advance():
            return handshake.is_verified


def dial(
    rank: int,
    peer: int,
    place: tuple[str, int],
    secret: bytes | Key,
    deadline: float,
    check: Callable[[], None],
    *,
    purpose: bytes = bytes(PURPOSE_BYTES),
    called: int | None = None,
    small_segments: bool = False,
) -> Connection:
    """Return an authenticated, nonblocking connection to a rank. place: the address and port at which it listens. check: see
    wait_ready. called: the number of the rank in errors, if it is another one. small_segments: whether the connection must work
    on paths that lose large packets.

    Raises LinkError, which names the peer, with NotARank as its cause if another program listens there; OtherBuild; OSError (one
    of OWN_FAULTS) if this process lacks the resources to connect.
    """
    address, port = place
    connection: socket.socket | None = None
    try:
        family, there = socket_address(address, port)
        connection = socket.socket(family)
        connection.setblocking(False)
        if small_segments:
            send_small_segments(connection)
        if (failed := connection.connect_ex(there)) in (0, errno.EINPROGRESS):
            wait_ready({connection: select.POLLOUT}, deadline, check)
            failed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failed:
            raise OSError(failed, os.strerror(failed))
        set_up(connection)
        handshake = handshake_of(connection, rank, secret, dials=True, purpose=purpose)
        if not finish(handshake, deadline, check) or handshake.peer != peer:
            closed = "it closed the connection"
            raise NotARank(handshake.why() if handshake.has_begun() else closed)
        if (error := handshake.other_build()) is not None:
            raise error
    except BaseException as error:
        if connection is not None:
            connection.close()
        if not isinstance(error, OSError) or error.errno in OWN_FAULTS:
            raise
        named = peer if called is None else called
        detail = f"rank {named} at {address} port {port}: {error}"
        raise LinkError(named, timed_out=isinstance(error, TimeoutError), detail=detail) from error
    return handshake.connection


class Arrived(NamedTuple):
    """An authenticated connection to a rank that has dialled. error: set if the rank runs another build of gradwire; then it has
    sent no purpose."""

    rank: int
    connection: Connection
    error: OtherBuild | None
    purpose: bytes


class Door:
    """A listening socket, and the connections to it that are not authenticated yet: at most `most`, each for HANDSHAKE_S
    seconds and HANDSHAKE_BYTES bytes."""

    def __init__(self, listening: socket.socket, rank: int, secret: bytes | Key, most: int = MOST_UNVERIFIED) -> None:
        """listening: from ports.listen_in(); the Door closes it."""
        listening.setblocking(False)
        self.socket = listening
        self._rank, self._secret, self._most = rank, secret, most
        self._unverified: dict[int, Handshake | PrivateHandshake] = {}

    @property
    def descriptors(self) -> list[int]:
        """Return the descriptors to poll for input."""
        return [self.socket.fileno(), *self._unverified]

    def due(self) -> float | None:
        """Return when the first connection must be authenticated (time.monotonic()); None without one."""
        return min((handshake.until for handshake in self._unverified.values()), default=None)

    def look(self, ready: Collection[int]) -> list[Arrived]:
        """Return the connections that have authenticated themselves, and close those that cannot or are too late. ready: the
        descriptors with input."""
        arrived = []
        for descriptor, handshake in list(self._unverified.items()):
            is_late = time.monotonic() >= handshake.until
            try:
                if (descriptor not in ready or handshake.advance()) and not is_late:
                    continue
            except NoLibcrypto as error:
                _log.warning("gradwire: rank %d refused a connection: %s", self._rank, error)
            del self._unverified[descriptor]
            if handshake.is_verified:
                arrived.append(
                    Arrived(handshake.peer, handshake.connection, handshake.other_build(), handshake.purpose)
                )
            else:
                handshake.connection.close()
        return arrived

    def accept(self) -> None:
        """Accept a connection, if one waits. Raises OSError (one of OWN_FAULTS) if this process lacks the resources."""
        try:
            connection, _ = self.socket.accept()
        except OSError as error:
            if error.errno in OWN_FAULTS:
                raise
            return  # it has ended already
        connection.setblocking(False)
        set_up(connection)
        self._unverified[connection.fileno()] = handshake_of(connection, self._rank, self._secret, dials=False)
        if len(self._unverified) > self._most:
            self._unverified.pop(next(iter(self._unverified))).connection.close()

    def close(self) -> None:
        """Close the listening socket and the connections that are not authenticated. Calling it again does nothing."""
        self.socket.close()
        for handshake in self._unverified.values():
            handshake.connection.close()
        self._unverified.clear()


def wait_ready(events: Mapping[Any, int], deadline: float, check: Callable[[], None]) -> list[int]:
    """Wait for any of the events, and return the ready descriptors. events: those of poll(), by socket or descriptor.
    check: called every _CHECK_S seconds; raises LinkError to end a useless wait. Raises TimeoutError at the
    deadline."""
    poll = select.poll()
    for waiting, event in events.items():
        poll.register(waiting, event)
    while not (ready := poll.poll(max(0.0, min(_CHECK_S, deadline - time.monotonic())) * 1000)):
        check()
        if time.monotonic() >= deadline:
            raise TimeoutError("timed out")
    return [descriptor for descriptor, _ in ready]


def give_up_on_silence(connection: Connection) -> None:
    """Break a connection when the other host acknowledges no sent bytes for _SILENCE_MS milliseconds. Only for
    connections whose peer always reads soon: once the buffers are full, a peer that does not read sends no
    acknowledgement."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_MS)


def set_up(connection: socket.socket) -> None:
    """Send small messages of a connection at once, and break it when the other host does not answer for about 15 s."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
