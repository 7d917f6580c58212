"""Provides the fixtures that several files use."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from itertools import combinations

import pytest

from gradwire.collectives.transports.tcp import TcpTransport
from tests.unit.over_tcp import Connect


@pytest.fixture
def connect() -> Iterator[Connect]:
    """connect(size): the transports of so many ranks, each connected to every other one."""
    made: list[TcpTransport] = []

    def connect(size: int) -> list[TcpTransport]:
        ends: list[dict[int, socket.socket]] = [{} for _ in range(size)]
        for one, other in combinations(range(size), 2):
            ends[one][other], ends[other][one] = socket.socketpair()
        for connections in ends:
            for connection in connections.values():
                connection.setblocking(False)
        made.extend(TcpTransport(rank, size, connections) for rank, connections in enumerate(ends))
        return made[-size:]

    yield connect
    for transport in made:
        transport.abort()
        transport.close()
