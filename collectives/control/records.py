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
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from gradwire.collectives.control.libcrypto import NEXT_KEY, Cipher, NoLibcrypto, functions
from gradwire.collectives.kernels import layout

_LENGTH = struct.Struct("!I")
_LENGTH_BYTES = _LENGTH.size + layout.MAC_BYTES
#: The longest text of a record.
_LONGEST = layout.PIECE_BYTES
_NONCE_BYTES = 12


class Forged(OSError):
    """What has arrived is not what the other end has sent."""


def _error(failed: int) -> OSError:
    """Return the error of a record. failed: see layout.FAILED."""
    if failed == errno.EBADMSG:
        return Forged(failed, "a record does not verify: it was changed, repeated or left out on the way")
    return OSError(failed, "a call of OpenSSL's libcrypto failed in this process")


class Seal:
    """One direction of a connection with records. words: the state that kernels share, see layout.CIPHER; address: its place.
    After a record that fails, there is no other: all methods raise its error again."""

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
        """Return the next record. Raises OSError (ENOTRECOVERABLE) if libcrypto fails."""
        return self._next(self._cipher.encrypt, text)

    def open(self, record: bytes) -> bytes:
        """Return the text of the next record. Raises Forged, and OSError as seal()."""
        return self._next(self._cipher.decrypt, record)

    def check(self) -> None:
        """Raise the error of the record that has failed, if one has."""
        if failed := self.words[layout.FAILED]:
            raise _error(failed)

    def _next(self, crypt: Callable[[bytes], bytes | None], data: bytes) -> bytes:
        """Encrypt or decrypt the next record."""
        self.check()
        self.words[layout.FAILED] = errno.ENOTRECOVERABLE  # until it is complete
        try:
            self._begin()
            made = crypt(data)
        except NoLibcrypto as error:
            raise _error(errno.ENOTRECOVERABLE) from error
        self.words[layout.FAILED] = errno.EBADMSG if made is None else 0
        if made is None:
            raise _error(errno.EBADMSG)
        return made

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
        self._timeout_s: float | None = None

    @property
    def is_between_records(self) -> bool:
        """Return whether no part of a record is in this object."""
        return not (self._unsent or self._arrived or self._text or self._has_length)

    def send(self, data: bytes | bytearray | memoryview) -> int:
        """Send the beginning of some bytes, and return how many. Raises as socket.send(), and as Seal.seal(); then the connection
        has ended."""
        return self._send(data, self._deadline())

    def sendall(self, data: bytes) -> None:
        """Send all bytes on a blocking connection. Raises as send()."""
        view, deadline = memoryview(data), self._deadline()
        while view:
            view = view[self._send(view, deadline) :]

    def recv(self, most: int) -> bytes:
        """Return at least one byte, or none at the end of the connection. Nothing beyond a record is read from the connection.
        Raises as socket.recv(), and as Seal.open()."""
        deadline = self._deadline()
        while not self._text:
            self.arriving.check()
            self._limit(deadline)
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
        self._timeout_s = None
        self._socket.setblocking(flag)

    def settimeout(self, seconds: float | None) -> None:
        """Limit each call, however many records it reads or writes."""
        self._timeout_s = seconds
        self._socket.settimeout(seconds)

    def setsockopt(self, level: int, option: int, value: int) -> None:
        self._socket.setsockopt(level, option, value)

    def getsockopt(self, level: int, option: int, nbytes: int) -> bytes:
        return self._socket.getsockopt(level, option, nbytes)

    def getsockname(self) -> Any:
        return self._socket.getsockname()

    def getpeername(self) -> Any:
        return self._socket.getpeername()

    def _send(self, data: bytes | bytearray | memoryview, deadline: float | None) -> int:
        if not self._unsent:
            text = bytes(data[:_LONGEST])
            try:
                self._unsent = self.leaving.seal(_LENGTH.pack(len(text))) + self.leaving.seal(text)
            except OSError:
                with suppress(OSError):  # it has ended already
                    self._socket.shutdown(socket.SHUT_RDWR)
                raise
            self._taken = len(text)
        while self._unsent:
            self._limit(deadline)
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        return self._taken

    def _deadline(self) -> float | None:
        """Return when a call that begins now must end; None without a limit, and for a nonblocking connection."""
        return time.monotonic() + self._timeout_s if self._timeout_s else None

    def _limit(self, deadline: float | None) -> None:
        """Let the next call of the socket end at the deadline. Raises TimeoutError after it."""
        if deadline is not None:
            if (left_s := deadline - time.monotonic()) <= 0:
                raise TimeoutError("timed out")
            self._socket.settimeout(left_s)


#: A connection to another rank.
Connection = socket.socket | RecordSocket


def seals_of(connection: Connection) -> tuple[Seal, Seal] | None:
    """Return the directions of a connection, that which leaves and that which arrives; None for one without records. Kernels
    continue them: no part of a record may be left in the connection."""
    if not isinstance(connection, RecordSocket):
        return None
    assert connection.is_between_records
    return connection.leaving, connection.arriving
