"""Fixtures of several files."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gradwire.collectives.link.tcp import TcpTransport
from tests.unit.over_tcp import Connect, transports


@pytest.fixture
def connect() -> Iterator[Connect]:
    """connect(size): the transports of so many ranks, each connected to every other one."""
    made: list[TcpTransport] = []

    def connect(size: int) -> list[TcpTransport]:
        made.extend(transports(size))
        return made[-size:]

    yield connect
    for transport in made:
        transport.abort()
        transport.close()
