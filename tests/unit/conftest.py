"""Provides the fixtures that several files use."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from itertools import combinations

import pytest

from gradwire.collectives.control.records import Connection
from gradwire.collectives.transports.tcp import TcpTransport
from tests.unit.over_records import encrypted
from tests.unit.over_tcp import Connect


@pytest.fixture(params=["plain", "with checksums", "encrypted"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """connect(size): the transports of so many ranks, each connected to every other one."""
    made: list[TcpTransport] = []

    def connect(size: int) -> list[TcpTransport]:
        ends: list[dict[int, Connection]] = [{} for _ in range(size)]
        for one, other in combinations(range(size), 2):
            pair: tuple[Connection, Connection] = socket.socketpair()
            if request.param == "encrypted":
                pair = encrypted(*pair)
            ends[one][other], ends[other][one] = pair
        for connections in ends:
            for connection in connections.values():
                connection.setblocking(False)
        has_checksums = request.param == "with checksums"
        made.extend(TcpTransport(rank, size, ends[rank], has_checksums=has_checksums) for rank in range(size))
        return made[-size:]

    yield connect
    for transport in made:
        transport.abort()
        transport.close()
