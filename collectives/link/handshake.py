"""How the ranks of a job connect to each other, and to nobody else.

Who listens sends a challenge to whoever connects, and reads nothing but the answer: the rank that connects, and a code of both
ranks and of the challenge that only those can make who know the job's secret (HMAC-SHA256, RFC 2104). Any other connection
is dropped.
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
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from gradwire.collectives.errors import LinkError, ranks_text
from gradwire.collectives.link.paths import send_small_segments

_HELLO = struct.Struct("!i32s")
CHALLENGE_BYTES = 32

#: A host that answers nothing for so long is gone: seconds of silence, seconds between questions, and how many of those.
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 5))
_SILENCE_MS = 15_000

#: What keeps this process, and not the one at the other end, from connecting.
OWN_FAULTS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)

#: How often a wait for another rank checks whether there is any use in waiting.
_CHECK_S = 0.03

#: How many connections may at a time be about to say whose they are.
_MOST_STRANGERS = 256


def neighbours(rank: int, size: int) -> list[int]:
    """Return the ranks 1, 2, 4, ... places before and after one: any two ranks are at most log2(size) connections apart."""
    steps = [sign << k for k in range((size - 1).bit_length()) for sign in (1, -1)]
    return sorted({(rank + step) % size for step in steps} - {rank})


@dataclass
class _Stranger:
    """A connection that has not proved yet whose it is."""

    connection: socket.socket
    challenge: bytes
    said: bytes = b""


class Listener:
    """A socket that waits for those ranks that have a lower number. `card` tells the others where.

    small_segments: whether connections are to work where large packets are lost.
    """

    def __init__(self, address: str, *, small_segments: bool = False) -> None:
        """Raises OSError where the address cannot be listened on."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=128)
        self._small_segments = small_segments
        if small_segments:
            send_small_segments(self._socket)
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
        """Connect to the given ranks, which connect to this one, and stop listening. cards: of all ranks. check: raises LinkError
        where there is no use in waiting.

        Raises LinkError with those that did not come.
        """
        made: dict[int, socket.socket] = {}
        try:
            for peer in peers:
                if peer > rank:
                    made[peer] = self._connect(rank, peer, cards[peer], secret, deadline, check)
            expected = {peer for peer in peers if peer < rank}
            made |= self._accept(rank, expected, secret, deadline, check)
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
        self, rank: int, expected: set[int], secret: bytes, deadline: float, check: Callable[[], None]
    ) -> dict[int, socket.socket]:
        accepted: dict[int, socket.socket] = {}
        strangers: dict[int, _Stranger] = {}
        self._socket.setblocking(False)
        try:
            while missing := expected - accepted.keys():
                poll = select.poll()
                for descriptor in (self._socket.fileno(), *strangers):
                    poll.register(descriptor, select.POLLIN)
                ready = poll.poll(max(0.0, min(_CHECK_S, deadline - time.monotonic())) * 1000)
                if not ready:
                    check()
                    if time.monotonic() < deadline:
                        continue
                    detail = f"{ranks_text(missing)} did not connect"
                    raise LinkError(min(missing), timed_out=True, detail=detail, awaited=missing)
                for descriptor, _ in ready:
                    if descriptor == self._socket.fileno():
                        connection, _ = self._socket.accept()
                        connection.setblocking(False)
                        challenge = secrets.token_bytes(CHALLENGE_BYTES)
                        with suppress(OSError):  # one that has ended is seen below
                            connection.send(challenge)
                        strangers[connection.fileno()] = _Stranger(connection, challenge)
                        if len(strangers) > _MOST_STRANGERS:
                            strangers.pop(next(iter(strangers))).connection.close()
                        continue
                    if descriptor not in strangers:
                        continue
                    stranger = strangers.pop(descriptor)
                    stranger.said += _received(stranger.connection, _HELLO.size - len(stranger.said))
                    if (peer := _introduced(stranger, rank, missing, secret)) is not None:
                        accepted[peer] = stranger.connection
                    elif stranger.said and len(stranger.said) < _HELLO.size and not _has_ended(stranger.connection):
                        strangers[descriptor] = stranger
                    else:
                        stranger.connection.close()
        except BaseException:
            for connection in accepted.values():
                connection.close()
            raise
        finally:
            for stranger in strangers.values():
                stranger.connection.close()
        return accepted

    def _connect(
        self, rank: int, peer: int, card: str, secret: bytes, deadline: float, check: Callable[[], None]
    ) -> socket.socket:
        address, port = card.split()
        connection: socket.socket | None = None
        try:
            connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            connection.setblocking(False)
            if self._small_segments:
                send_small_segments(connection)
            if (failed := connection.connect_ex((address, int(port)))) not in (0, errno.EINPROGRESS):
                raise OSError(failed, os.strerror(failed))
            _await(connection, select.POLLOUT, deadline, check)
            if failed := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(failed, os.strerror(failed))
            challenge = b""
            while len(challenge) < CHALLENGE_BYTES:
                _await(connection, select.POLLIN, deadline, check)
                if not (piece := connection.recv(CHALLENGE_BYTES - len(challenge))):
                    raise ConnectionResetError("it closed the connection")
                challenge += piece
            connection.sendall(
                _HELLO.pack(rank, _code(rank, peer, challenge, secret))
            )  # which a new connection takes at once
        except LinkError:
            if connection is not None:
                connection.close()
            raise
        except OSError as error:
            if connection is not None:
                connection.close()
            if error.errno in OWN_FAULTS:
                raise
            timed_out = isinstance(error, TimeoutError)
            raise LinkError(
                peer, timed_out=timed_out, detail=f"rank {peer} at {address} port {port}: {error}"
            ) from error
        return connection


def _await(connection: socket.socket, event: int, deadline: float, check: Callable[[], None]) -> None:
    """Return when a connection can be written or read. Raises TimeoutError at the deadline, and what check raises."""
    poll = select.poll()
    poll.register(connection, event)
    while not poll.poll(max(0.0, min(_CHECK_S, deadline - time.monotonic())) * 1000):
        check()
        if time.monotonic() >= deadline:
            raise TimeoutError("timed out")


def _code(rank: int, peer: int, challenge: bytes, secret: bytes) -> bytes:
    return hmac.digest(secret, struct.pack("!ii", rank, peer) + challenge, "sha256")


def _introduced(stranger: _Stranger, rank: int, missing: set[int], secret: bytes) -> int | None:
    """Return the missing rank that a connection is from, if it has said so and knows the secret."""
    if len(stranger.said) < _HELLO.size:
        return None
    peer, code = _HELLO.unpack(stranger.said)
    return (
        peer if hmac.compare_digest(code, _code(peer, rank, stranger.challenge, secret)) and peer in missing else None
    )


def _received(connection: socket.socket, at_most: int) -> bytes:
    """Return what can be read at once; nothing at the end of the connection, or where there is nothing."""
    try:
        return connection.recv(at_most)
    except OSError:
        return b""


def _has_ended(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def give_up_on_silence(connection: socket.socket) -> None:
    """End a connection when the other end's system confirms nothing of what is sent for some seconds. Only for one whose reader
    is never long in coming: who does not read confirms nothing either, once what lies between is full."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_MS)


def set_up(connection: socket.socket) -> None:
    """Have a connection send small messages at once, and end when the other end's host does not answer for some seconds."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
