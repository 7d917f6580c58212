"""Connections whose bytes travel in records, which are encrypted and which nobody can change unnoticed.

A record is an encrypted text and a tag of 16 bytes. Each direction of each connection has a key of its own, and the number of a
record is its nonce: so a record that is changed, repeated, left out, or comes from another place does not verify. A RecordSocket
sends the length of a text as a record before that of the text. Compiled kernels continue its connection where it stops.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import hmac
import socket
import struct
from typing import Any

from gradwire.collectives.control.libcrypto import NEXT_KEY, Cipher, functions
from gradwire.collectives.kernels import layout

_LENGTH = struct.Struct("!I")
_LENGTH_BYTES = _LENGTH.size + layout.MAC_BYTES
#: The longest text of a record.
_LONGEST = layout.PIECE_BYTES
_NONCE_BYTES = 12


class Forged(OSError):
    """What has arrived is not what the other end has sent."""


class Seal:
    """One direction of a connection with records. words: the state that kernels share, see layout.CIPHER; address: its place."""

    def __init__(self, key: bytes | None, *, encrypts: bool) -> None:
        """key: None for records that have a checksum, and are not encrypted. encrypts: for the records that leave; False for
        those that arrive."""
        self.words = (ctypes.c_int64 * layout.SEAL_FIELDS)()
        self.address = ctypes.addressof(self.words)
        if key is not None:
            self._cipher = Cipher(key, encrypts=encrypts)
            self.words[layout.CIPHER] = self._cipher.address
            self.words[layout.FUNCTIONS] = ctypes.addressof(functions())
            ctypes.memmove(self.address + 8 * layout.KEY, key, layout.KEY_BYTES)

    def seal(self, text: bytes) -> bytes:
        """Return the next record."""
        self._begin()
        return self._cipher.encrypt(text)

    def open(self, record: bytes) -> bytes:
        """Return the text of the next record. Raises Forged."""
        self._begin()
        if (text := self._cipher.decrypt(record)) is None:
            raise Forged(errno.EBADMSG, "a record does not verify: it was changed, repeated or left out on the way")
        return text

    def _begin(self) -> None:
        """Prepare the cipher for the next record, and count it."""
        number, key = self.words[layout.RECORDS], None
        if number > 0 and number % layout.RECORDS_OF_A_KEY == 0:
            old = ctypes.string_at(self.address + 8 * layout.KEY, layout.KEY_BYTES)
            key = hmac.digest(old, NEXT_KEY, hashlib.sha256)
            ctypes.memmove(self.address + 8 * layout.KEY, key, layout.KEY_BYTES)
        self._cipher.use(key, ctypes.string_at(self.address + 8 * layout.RECORDS, _NONCE_BYTES))
        self.words[layout.RECORDS] = number + 1


class RecordSocket:
    """A socket that sends and receives records, with the methods of a socket that gradwire uses.

    A send that would block must be repeated with the same bytes: their record is encrypted already.
    """

    def __init__(self, connection: socket.socket, leaving: Seal, arriving: Seal) -> None:
        """connection: this object closes it. leaving, arriving: the two directions."""
        self.leaving, self.arriving = leaving, arriving
        self._socket = connection
        self._unsent, self._taken = b"", 0
        self._arrived, self._wanted, self._has_length = b"", _LENGTH_BYTES, False
        self._text = b""

    def send(self, data: bytes | bytearray | memoryview) -> int:
        """Send the beginning of some bytes, and return how many. Raises as socket.send()."""
        if not self._unsent:
            text = bytes(data[:_LONGEST])
            self._unsent = self.leaving.seal(_LENGTH.pack(len(text))) + self.leaving.seal(text)
            self._taken = len(text)
        while self._unsent:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        return self._taken

    def sendall(self, data: bytes) -> None:
        """Send all bytes on a blocking connection. Raises as socket.sendall()."""
        view = memoryview(data)
        while view:
            view = view[self.send(view) :]

    def recv(self, most: int) -> bytes:
        """Return at least one byte, or none at the end of the connection. Nothing beyond a record is read from the connection.
        Raises as socket.recv(), and Forged."""
        while not self._text:
            if not (piece := self._socket.recv(self._wanted - len(self._arrived))):
                return b""
            self._arrived += piece
            if len(self._arrived) < self._wanted:
                continue
            text, self._arrived = self.arriving.open(self._arrived), b""
            if self._has_length:
                self._text, self._wanted = text, _LENGTH_BYTES
            else:
                self._wanted = _LENGTH.unpack(text)[0] + layout.MAC_BYTES
            self._has_length = not self._has_length
        given, self._text = self._text[:most], self._text[most:]
        return given

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def shutdown(self, how: int) -> None:
        self._socket.shutdown(how)

    def setblocking(self, flag: bool) -> None:  # as a socket's
        self._socket.setblocking(flag)

    def settimeout(self, seconds: float | None) -> None:
        self._socket.settimeout(seconds)

    def setsockopt(self, level: int, option: int, value: int) -> None:
        self._socket.setsockopt(level, option, value)

    def getsockopt(self, level: int, option: int, nbytes: int) -> bytes:
        return self._socket.getsockopt(level, option, nbytes)

    def getsockname(self) -> Any:
        return self._socket.getsockname()

    def getpeername(self) -> Any:
        return self._socket.getpeername()


#: A connection to another rank.
Connection = socket.socket | RecordSocket


def seals_of(connection: Connection) -> tuple[Seal, Seal] | None:
    """Return the directions of a connection, that which leaves and that which arrives; None for one without records."""
    return (connection.leaving, connection.arriving) if isinstance(connection, RecordSocket) else None
