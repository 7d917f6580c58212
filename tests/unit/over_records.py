"""Connections with records, and who changes what they carry, for tests."""

import secrets
import socket
from collections.abc import Callable

from gradwire.collectives.control.records import Connection, RecordSocket, Seal

TEXT = b"a text that nobody else is to read"
#: What a relay makes of a piece of a stream, and the number of bytes before it.
Change = Callable[[bytes, int], bytes]


def encrypted(one: socket.socket, other: socket.socket, there: bytes = b"") -> tuple[RecordSocket, RecordSocket]:
    """The two ends of a connection, with keys that both know. there: the key of what the first end sends."""
    there, back = there or secrets.token_bytes(32), secrets.token_bytes(32)
    return (
        RecordSocket(one, Seal(there, encrypts=True), Seal(back, encrypts=False)),
        RecordSocket(other, Seal(back, encrypts=True), Seal(there, encrypts=False)),
    )


def flipped(at: int) -> Change:
    """Flip a bit of the byte at a place of the stream."""

    def change(piece: bytes, before: int) -> bytes:
        if not before <= at < before + len(piece):
            return piece
        changed = bytearray(piece)
        changed[at - before] ^= 0x10
        return bytes(changed)

    return change


def read(connection: Connection, nbytes: int) -> bytes:
    connection.setblocking(True)
    got = b""
    while len(got) < nbytes:
        got += connection.recv(nbytes - len(got))
    return got
