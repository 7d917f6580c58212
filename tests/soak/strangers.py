"""Strangers: `python -m tests.soak.strangers PID...` knocks at every TCP port on which the simulated hosts listen whose
namespaces these processes hold, says what is none of a rank's business, and goes; until it is killed.
"""

from __future__ import annotations

import hmac
import random
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

from gradwire.bench.hosts import address

PATIENCE_S = 0.02
BETWEEN_S = 0.001
AT_NEW_PORTS = 4  # who knock at once: a rank listens for some 10 ms, so nobody here waits for an answer
STAYING = 8  # of those who came last, who have not gone yet
_LISTENS = "0A"  # in /proc/net/tcp
FLOOD_BYTES = 1 << 22  # of one who never pauses: far more than a connection holds whose reader has had enough


def greeting(rank: int, build: str = "gradwire", challenge: bytes = bytes(32)) -> bytes:
    """The first thing that each end of a connection between ranks sends."""
    return struct.pack("!8si96s32s", b"gradwire", rank, build.encode(), challenge)


def proof(secret: bytes, role: bytes, mine: bytes, theirs: bytes) -> bytes:
    """The second thing. role: b"dials" or b"listens"; mine, theirs: the greetings."""
    return hmac.digest(secret, role + mine + theirs, "sha256")


def frame(text: bytes) -> bytes:
    """A message as ranks send it to the coordinator and to each other."""
    return struct.pack("!I", len(text)) + text


NESTED = frame(b"[" * 100_000)
"""A message that a parser of JSON cannot take."""


def _nothing(_: socket.socket) -> None: ...


def _noise(connection: socket.socket) -> None:
    connection.sendall(random.randbytes(random.randint(1, 5000)))


def _web(connection: socket.socket) -> None:
    connection.sendall(b"GET / HTTP/1.1\r\nHost: gradwire\r\nConnection: close\r\n\r\n")


def _half_a_handshake(connection: socket.socket) -> None:
    """As of a rank that does not get to the end of it, or that does not know the secret."""
    hello = greeting(random.randrange(4), challenge=random.randbytes(32)) + random.randbytes(32)
    connection.sendall(hello[: random.choice((2, 20, len(hello) - 32, len(hello)))])


def _another_version(connection: socket.socket) -> None:
    """As of a rank of another job, with another version of gradwire."""
    connection.sendall(greeting(random.randrange(4), "gradwire 99.0") + random.randbytes(32) + NESTED)


def _nested(connection: socket.socket) -> None:
    connection.sendall(NESTED)


def _a_long_frame(connection: socket.socket) -> None:
    """All that a message may have, but for its last byte."""
    connection.sendall(frame(bytes(1 << 24))[: 1 << 20])


def _flood(connection: socket.socket) -> None:
    """Who does not pause, and begins as a rank does."""
    connection.sendall(greeting(random.randrange(4)) + bytes(FLOOD_BYTES))


def _reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


WAYS: tuple[Callable[[socket.socket], None], ...] = (
    _nothing,
    _noise,
    _web,
    _half_a_handshake,
    _another_version,
    _nested,
    _a_long_frame,
    _flood,
    _reset,
)


def ports(table: str) -> set[int]:
    """The ports on which somebody listens, by the text of /proc/net/tcp or tcp6."""
    rows = [line.split() for line in table.splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _LISTENS}


def main(holders: list[str]) -> None:
    staying: deque[socket.socket] = deque(maxlen=STAYING)
    known: list[set[int]] = [set() for _ in holders]
    knocked = False
    for turn in count():
        host = turn % len(holders)
        tables = [Path(f"/proc/{holders[host]}/net/{name}").read_text() for name in ("tcp", "tcp6")]
        listening = set[int]().union(*map(ports, tables))
        knocking = [port for port in listening - known[host] for _ in range(AT_NEW_PORTS)]
        known[host] = listening
        for port in knocking or random.sample(sorted(listening), min(1, len(listening))):
            with suppress(OSError):  # nobody listens at this address, or not any more
                staying.append(socket.create_connection((address(host), port), PATIENCE_S))
                random.choice(WAYS)(staying[-1])
                knocked = knocked or print("knocked", flush=True) is None
        time.sleep(BETWEEN_S)


if __name__ == "__main__":
    main(sys.argv[1:])
