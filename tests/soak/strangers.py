"""Strangers: `python -m tests.soak.strangers PID...` knocks at every TCP port on which the simulated hosts listen whose
namespaces these processes hold, says what is none of a rank's business, and goes; until it is killed.
"""

from __future__ import annotations

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

from bench.hosts import address

PATIENCE_S = 0.2
BETWEEN_S = 0.005
STAYING = 8  # of those who came last, who have not gone yet
_LISTENS = "0A"  # in /proc/net/tcp


def _nothing(_: socket.socket) -> None: ...


def _noise(connection: socket.socket) -> None:
    connection.sendall(random.randbytes(random.randint(1, 5000)))


def _web(connection: socket.socket) -> None:
    connection.sendall(b"GET / HTTP/1.1\r\nHost: gradwire\r\nConnection: close\r\n\r\n")


def _half_a_handshake(connection: socket.socket) -> None:
    """As of a rank that does not get to the end of it, or that does not know the secret."""
    with suppress(TimeoutError):
        connection.recv(32)
    hello = struct.pack("!i", random.randrange(4)) + random.randbytes(32)
    connection.sendall(hello[: random.choice((2, 20, 36))])


def _reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


WAYS: tuple[Callable[[socket.socket], None], ...] = (_nothing, _noise, _web, _half_a_handshake, _reset)


def ports(table: str) -> set[int]:
    """The ports on which somebody listens, by the text of /proc/net/tcp or tcp6."""
    rows = [line.split() for line in table.splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _LISTENS}


def main(holders: list[str]) -> None:
    staying: deque[socket.socket] = deque(maxlen=STAYING)
    knocks = 0
    for turn in count():
        host = turn % len(holders)
        listening = set[int]().union(
            *(ports(Path(f"/proc/{holders[host]}/net/{n}").read_text()) for n in ("tcp", "tcp6"))
        )
        for port in listening:
            with suppress(OSError):  # nobody listens at this address, or not any more
                connection = socket.create_connection((address(host), port), PATIENCE_S)
                staying.append(connection)
                random.choice(WAYS)(connection)
                knocks += 1
                if knocks == 1:
                    print("knocked", flush=True)
        time.sleep(BETWEEN_S)


if __name__ == "__main__":
    main(sys.argv[1:])
