"""Connections that only the ranks of one job can make.

A listening rank sends a challenge over each new connection, and reads only the answer: the rank that connects, and a code of
both ranks and the challenge, keyed with the job's secret (HMAC-SHA256, RFC 2104). It closes any other connection.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from gradwire.collectives.errors import LinkError, ranks_text
from gradwire.collectives.link.paths import send_small_segments

_HELLO = struct.Struct("!i32s")
CHALLENGE_BYTES = 32

#: TCP keep-alive, which ends a connection to a silent host: idle seconds, seconds between probes, number of probes.
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 5))
_SILENCE_MS = 15_000

#: The errors of connecting that this process causes, and not the process at the other end.
OWN_FAULTS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)

#: Seconds between two calls of check() in a wait for another rank.
_CHECK_S = 0.03

#: How many connections may be unverified at a time; one more closes the oldest.
MOST_UNVERIFIED = 256


def neighbours(rank: int, size: int) -> list[int]:
    """Return the ranks 1, 2, 4, ... places before and after one: any two ranks are at most log2(size) connections apart."""
    steps = [sign << k for k in range((size - 1).bit_length()) for sign in (1, -1)]
    return sorted({(rank + step) % size for step in steps} - {rank})


def listen(address: str, backlog: int, *, small_segments: bool = False) -> socket.socket:
    """Return a nonblocking socket that listens on a numeric address, IPv4 or IPv6. Raises OSError if it cannot.
    small_segments: whether connections must work on paths that lose large packets."""
    listener = socket.create_server((address, 0), family=_family(address), backlog=backlog)
    listener.setblocking(False)
    if small_segments:
        send_small_segments(listener)
    return listener


def dial(
    peer: int,
    address: str,
    port: int,
    deadline: float,
    check: Callable[[], None],
    begin: Callable[[socket.socket], None],
    *,
    small_segments: bool = False,
) -> socket.socket:
    """Return a nonblocking connection to a rank that listens, after begin(connection). check: see wait_ready.

    Raises LinkError, which names the peer; OSError (one of OWN_FAULTS) if this process lacks the resources to connect.
    """
    connection: socket.socket | None = None
    try:
        connection = socket.socket(_family(address))
        connection.setblocking(False)
        if small_segments:
            send_small_segments(connection)
        if (failed := connection.connect_ex((address, port))) in (0, errno.EINPROGRESS):
            wait_ready({connection: select.POLLOUT}, deadline, check)
            failed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failed:
            raise OSError(failed, os.strerror(failed))
        begin(connection)
    except BaseException as error:
        if connection is not None:
            connection.close()
        if not isinstance(error, OSError) or error.errno in OWN_FAULTS:
            raise
        detail = f"rank {peer} at {address} port {port}: {error}"
        raise LinkError(peer, timed_out=isinstance(error, TimeoutError), detail=detail) from error
    return connection


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


class _Unverified:
    """A new connection whose rank is not known yet."""

    def __init__(self, connection: socket.socket) -> None:
        """Send a challenge over the connection."""
        self.connection = connection
        self._challenge = secrets.token_bytes(CHALLENGE_BYTES)
        self._answer = b""
        connection.setblocking(False)
        with suppress(OSError):  # read() notices a connection that has ended
            connection.send(self._challenge)

    def read(self) -> bool:
        """Read the part of the answer that has arrived; return whether more of it may follow."""
        try:
            piece = self.connection.recv(_HELLO.size - len(self._answer))
        except OSError as error:
            return isinstance(error, BlockingIOError)
        self._answer += piece
        return bool(piece) and len(self._answer) < _HELLO.size

    def peer(self, rank: int, secret: bytes) -> int | None:
        """Return the rank that has connected to this one; None for a process that does not know the secret."""
        if len(self._answer) < _HELLO.size:
            return None
        peer, code = _HELLO.unpack(self._answer)
        return peer if hmac.compare_digest(code, _code(peer, rank, self._challenge, secret)) else None


class Listener:
    """A socket to which ranks with lower numbers connect. card: its address and port. small_segments: see listen."""

    def __init__(self, address: str, *, small_segments: bool = False) -> None:
        """Listen on a free port of an address. Raises OSError if this process cannot."""
        self._small_segments = small_segments
        self._socket = listen(address, socket.SOMAXCONN, small_segments=small_segments)
        self.card = f"{address} {self._socket.getsockname()[1]}"

    def join(
        self,
        rank: int,
        peers: Collection[int],
        cards: Sequence[str],
        secret: bytes,
        deadline: float,
        check: Callable[[], None],
    ) -> dict[int, socket.socket]:
        """Connect this rank to its peers, which call join() too, and stop listening. Return the connections by rank.

        cards: each rank's Listener.card. check: see wait_ready. Raises LinkError with the ranks that did not connect.
        """
        made: dict[int, socket.socket] = {}

        def introduce(peer: int, connection: socket.socket) -> None:
            challenge = b""
            while len(challenge) < CHALLENGE_BYTES:
                wait_ready({connection: select.POLLIN}, deadline, check)
                if not (piece := connection.recv(CHALLENGE_BYTES - len(challenge))):
                    raise ConnectionResetError("it closed the connection")
                challenge += piece
            connection.sendall(_HELLO.pack(rank, _code(rank, peer, challenge, secret)))  # fits into an empty buffer

        try:
            # The last rank accepts at once, the others when they have dialled: so each waits for one handshake, not for all.
            for peer in sorted((peer for peer in peers if peer > rank), reverse=True):
                address, port = cards[peer].split()
                begin, small = partial(introduce, peer), self._small_segments
                made[peer] = dial(peer, address, int(port), deadline, check, begin, small_segments=small)
            self._accept(made, {peer for peer in peers if peer < rank}, rank, secret, deadline, check)
            for connection in made.values():
                set_up(connection)
        except BaseException:
            for connection in made.values():
                connection.close()
            raise
        finally:
            self.close()
        return made

    def close(self) -> None:
        """Stop listening. Calling it again does nothing."""
        self._socket.close()

    def _accept(
        self,
        made: dict[int, socket.socket],
        expected: set[int],
        rank: int,
        secret: bytes,
        deadline: float,
        check: Callable[[], None],
    ) -> None:
        """Accept the connections of the expected ranks, and add them to `made`."""
        unverified: dict[int, _Unverified] = {}
        try:
            while missing := expected - made.keys():
                try:
                    if time.monotonic() >= deadline:  # unverified connections may have kept the listener busy
                        raise TimeoutError
                    listening = dict.fromkeys((self._socket.fileno(), *unverified), select.POLLIN)
                    ready = wait_ready(listening, deadline, check)
                except TimeoutError:
                    detail = f"{ranks_text(missing)} did not connect"
                    raise LinkError(min(missing), timed_out=True, detail=detail, awaited=missing) from None
                for descriptor in ready:
                    if descriptor == self._socket.fileno():
                        try:
                            candidate = _Unverified(self._socket.accept()[0])
                        except OSError as error:
                            if error.errno in OWN_FAULTS:
                                raise
                            continue  # the connection ended before it was accepted
                        unverified[candidate.connection.fileno()] = candidate
                        if len(unverified) > max(MOST_UNVERIFIED, len(expected)):
                            unverified.pop(next(iter(unverified))).connection.close()
                    elif descriptor in unverified:
                        candidate = unverified.pop(descriptor)
                        if candidate.read():
                            unverified[descriptor] = candidate
                        elif (peer := candidate.peer(rank, secret)) in missing:
                            made[peer] = candidate.connection
                        else:
                            candidate.connection.close()
        finally:
            for candidate in unverified.values():
                candidate.connection.close()


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _code(rank: int, peer: int, challenge: bytes, secret: bytes) -> bytes:
    return hmac.digest(secret, struct.pack("!ii", rank, peer) + challenge, "sha256")


def give_up_on_silence(connection: socket.socket) -> None:
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
