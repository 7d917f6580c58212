"""A connection to another rank that carries short messages, and never waits."""

from __future__ import annotations

import json
import select
import struct
from collections.abc import Iterable
from typing import Any

from gradwire.collectives.control.paths import unconfirmed_bytes
from gradwire.collectives.control.records import Connection, Forged

_LENGTH = struct.Struct("!I")
#: Longer than any report, whose calls list at most some thousand tensors.
_LONGEST = 1 << 24
#: The most that read() receives at a time, and in how many pieces, so that no sender keeps the thread of all connections.
_PIECE_BYTES, _PIECES = 1 << 16, 16


class Neighbour:
    """A connection, with the bytes read of the next message and the bytes still to be written. is_forged: whether it has ended
    because something has arrived that the other end has not sent."""

    def __init__(self, connection: Connection) -> None:
        self.socket = connection
        self.is_forged = False
        self.incoming = bytearray()
        self.outgoing = bytearray()

    def put(self, message: bytes) -> None:
        """Write a message, as much of it as possible without waiting; write() writes the rest."""
        self.outgoing += _LENGTH.pack(len(message)) + message
        self.write()

    def say(self, **message: Any) -> None:
        """Write a message of numbers, strings, and lists and dicts of them, as put() does."""
        self.put(json.dumps(message).encode())

    def write(self) -> None:
        """Write as much as possible without waiting. If the connection is broken, drop the rest."""
        try:
            while self.outgoing:
                del self.outgoing[: self.socket.send(self.outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            self.outgoing.clear()

    def is_unconfirmed(self) -> bool:
        """Return whether written bytes are still unacknowledged. The kernel of the other host acknowledges them within
        milliseconds, even if its process is stopped."""
        try:
            return unconfirmed_bytes(self.socket) > 0
        except OSError:  # the connection has ended
            return False

    def read(self) -> tuple[list[bytes], bool]:
        """Return the messages that are complete, and whether the connection has ended. Only for authenticated connections."""
        ended = False
        try:
            for _ in range(_PIECES):
                if not (piece := self.socket.recv(_PIECE_BYTES)):
                    ended = True
                    break
                self.incoming += piece
        except OSError as error:
            ended = not isinstance(error, BlockingIOError)
            self.is_forged = isinstance(error, Forged)
        messages: list[bytes] = []
        while len(self.incoming) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self.incoming)
            if length > _LONGEST:
                return messages, True
            if len(self.incoming) < _LENGTH.size + length:
                break
            messages.append(bytes(self.incoming[_LENGTH.size : _LENGTH.size + length]))
            del self.incoming[: _LENGTH.size + length]
        return messages, ended


def poll_of(watched: Iterable[int | Connection], neighbours: Iterable[Neighbour] = ()) -> select.poll:
    """Return a poll for input from any of these, and for output to each Neighbour that has something to write."""
    poll = select.poll()
    for each in watched:
        poll.register(each, select.POLLIN)
    for neighbour in neighbours:
        poll.register(neighbour.socket, select.POLLIN | (select.POLLOUT if neighbour.outgoing else 0))
    return poll
