"""A connection between two hosts that both run `gradwire check`: lines of JSON and zeros, each answer with a deadline."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gradwire.collectives.control.handshake import finish, handshake_of
from gradwire.collectives.control.key import Key
from gradwire.collectives.control.paths import LargePacketsLost, check_paths
from gradwire.collectives.control.records import Connection
from gradwire.collectives.errors import LinkError

_GREETING = b'"gradwire check 3"\n'
#: The limits of the greeting, of each answer, of a whole test, and of a connection to a port.
_GREETING_S, ANSWER_S, ALL_S, KNOCK_S = 5.0, 30.0, 120.0, 3.0
#: The most ports that one side opens.
MOST_PORTS = 3
#: At most how many zeros measure the rate, for at most about how long.
_STREAM_BYTES, _STREAM_S = 1 << 28, 1.0
_LONGEST_LINE = 1 << 12
_STRANGE = "the other side is not gradwire check"
_STRANGE_TO_KEY = "the other side is not gradwire check with the same key and the same version"


class JsonLines:
    """Sends and receives lines of JSON on a connection, after the greetings, with a deadline for each answer, and one for all.
    With a key, they are encrypted. Raises ConnectionError if the other side sends another greeting, or has another key."""

    def __init__(self, connection: socket.socket, key: Key | None, *, dials: bool) -> None:
        """dials: whether this process has made the connection, and not accepted it."""
        self._end = time.monotonic() + _GREETING_S
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = _met(connection, key, self._end, dials=dials)
        self._send(_GREETING)
        for each in _GREETING:
            if self._receive(1)[0] != each:
                raise ConnectionError(_STRANGE)
        self._end = time.monotonic() + ALL_S

    def write(self, said: Any, zeros: int = 0) -> None:
        """Send a value, and so many zeros."""
        self._send(json.dumps(said).encode() + b"\n" + bytes(zeros))

    def read(self) -> Any:
        """Return the next value from the other side. Raises OSError if it does not arrive."""
        line = b""
        while not line.endswith(b"\n"):
            line += self._receive(1)  # and not a byte more: the next bytes may not be a line
            if len(line) > _LONGEST_LINE:
                raise ConnectionError(_STRANGE)
        return json.loads(line)

    def read_ports(self) -> list[int]:
        """Return the ports that the other side has opened."""
        ports: list[int] = self.read()
        if type(ports) is not list or len(ports) > MOST_PORTS or {*map(type, ports)} - {int}:
            raise ConnectionError(_STRANGE)
        if not all(0 < port < 1 << 16 for port in ports):
            raise ConnectionError(_STRANGE)
        return ports

    def echo(self) -> None:
        """Answer the other side's round trips: receive the zeros that follow each number, and send it back, until a None."""
        while (count := self.read()) is not None:
            left = int(count)
            while left > 0:
                left -= len(self._receive(min(left, 1 << 16)))
            self.write(count)

    def round_trip(self, zeros: int) -> float:
        """Send zeros, and return the seconds until the other side confirms them."""
        start = time.perf_counter()
        self.write(zeros, zeros)
        self.read()
        return time.perf_counter() - start

    def measure_rate(self) -> float:
        """Return how many bytes per second arrive at the other side, and end its echo()."""
        zeros, took_s = 1 << 16, self.round_trip(1 << 16)
        while took_s < _STREAM_S / 2 and zeros < _STREAM_BYTES:
            zeros *= 2
            took_s = self.round_trip(zeros)
        self.write(None)
        return zeros / took_s

    def try_large_packets(self) -> bool:
        """Return whether a probe longer than one packet arrives at both ends. Raises OSError for all other errors."""
        self.socket.setblocking(False)
        try:
            check_paths(0, {1: self.socket}, min(time.monotonic() + ANSWER_S, self._end), lambda: None)
        except LargePacketsLost:
            return False
        except LinkError as error:
            raise ConnectionError(str(error)) from error
        return True

    def _send(self, data: bytes) -> None:
        self._limit()
        self.socket.sendall(data)

    def _receive(self, at_most: int) -> bytes:
        self._limit()
        if not (piece := self.socket.recv(at_most)):
            raise ConnectionError("the other side has closed the connection")
        return piece

    def _limit(self) -> None:
        if (left_s := self._end - time.monotonic()) <= 0:  # also if the other side never pauses
            raise TimeoutError("timed out")
        self.socket.settimeout(min(ANSWER_S, left_s))


def _met(connection: socket.socket, key: Key | None, deadline: float, *, dials: bool) -> Connection:
    """Return the connection after the handshake with the key, if there is one."""
    if key is None:
        return connection
    connection.setblocking(False)
    handshake = handshake_of(connection, 0, key.of("gradwire check"), dials=dials)
    if not finish(handshake, deadline, lambda: None) or handshake.other_build() is not None:
        raise ConnectionError(_STRANGE_TO_KEY)
    return handshake.connection


@contextmanager
def of_strangers() -> Iterator[None]:
    """Raise ConnectionError for the other side's data that cannot be read: another program may send anything."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise ConnectionError(_STRANGE) from error


def plain(address: str) -> str:
    """Return an IPv4 address without the prefix that a socket of IPv6 gives it; other addresses unchanged."""
    return address.removeprefix("::ffff:")
