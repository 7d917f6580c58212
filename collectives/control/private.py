"""The handshake of a connection with a key, after which it is encrypted.

Each end sends a hello: a nonce, and a public value of X25519, both new. The end that listens sends its own once that of the other
end has begun. From the key, the secret of X25519 and both hellos, both ends derive four keys by HKDF-SHA-256: a proof of each
end, and the key of the records of each direction. They differ in every connection. Who has recorded one, and learns the key of
the job later, cannot derive them. Each end sends its proof, and once it has verified that of the other end, its first record: its
rank, its build of gradwire, and the purpose of the connection. Until then, it sends nothing else, and reads only these fixed
lengths.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Generator
from contextlib import suppress

from gradwire.collectives.control.build import BUILD_BYTES, OtherBuild, build, other_build
from gradwire.collectives.control.key import Key, hkdf
from gradwire.collectives.control.libcrypto import X25519_BYTES, Exchange
from gradwire.collectives.control.records import Connection, RecordSocket, Seal

PRIVATE_MAGIC = b"gradwkey"
_NONCE_BYTES, _PROOF_BYTES = 32, 32
PURPOSE_BYTES = 16
#: The rank, the build (ASCII, filled up with zeros), and the purpose.
_IDENTITY = struct.Struct(f"!i{BUILD_BYTES}s{PURPOSE_BYTES}s")

#: How long a connection may take to authenticate itself.
HANDSHAKE_S = 30.0

_OF_DIALLER, _OF_LISTENER = b"gradwire: of the end that dials", b"gradwire: of the end that listens"


class PrivateHandshake:
    """One end of the handshake of a new, nonblocking connection with a key.

    Attributes: as Handshake's; connection is a RecordSocket once is_verified.
    """

    def __init__(
        self, connection: socket.socket, rank: int, key: Key, *, dials: bool, purpose: bytes = bytes(PURPOSE_BYTES)
    ) -> None:
        """Send the hello; the end that listens sends only its beginning. Arguments: see Handshake."""
        self.connection: Connection = connection
        self.until = time.monotonic() + HANDSHAKE_S
        self.is_verified = False
        self.peer, self.build, self.purpose = -1, "", purpose
        self._rank, self._key, self._dials = rank, key, dials
        self._magic, self._received = b"", b""
        self._socket = connection
        self._steps = self._step()
        self._wanted = next(self._steps)

    def advance(self) -> bool:
        """Read what has arrived, but no byte beyond the first record, and answer. Return whether more has to arrive; if not,
        is_verified says whether the other end has authenticated itself."""
        try:
            piece = self.connection.recv(self._wanted - len(self._received))
        except OSError as error:
            return isinstance(error, BlockingIOError)
        if not piece:
            return False
        self._received += piece
        if len(self._received) < self._wanted:
            return True
        received, self._received = self._received, b""
        try:
            self._wanted = self._steps.send(received)
        except StopIteration:
            return False
        return True

    def other_build(self) -> OtherBuild | None:
        """Return the error for a verified peer with another build of gradwire; None if it runs the same."""
        return other_build(self._rank, self.peer, self.build)

    def has_begun(self) -> bool:
        """Return whether the other end has sent anything."""
        return bool(self._magic or self._received)

    def why(self) -> str:
        """Return why the other end, which has sent something else than a rank of the job, did so."""
        if self._magic == PRIVATE_MAGIC:
            return "another key, or another program, listens there"
        has_none = self._magic == b"gradwire"
        return "the process that listens there has no key" if has_none else "another program listens there"

    def _step(self) -> Generator[int, bytes, None]:
        """Run the handshake: yield the number of bytes that must arrive next, and receive them. End early to fail."""
        hello, exchange = _hello() if self._dials else (PRIVATE_MAGIC, None)
        self._send(hello)
        self._magic = yield len(PRIVATE_MAGIC)
        if self._magic != PRIVATE_MAGIC:
            return
        if exchange is None:  # not before, as it takes longer than all else that a stranger can cause
            hello, exchange = _hello()
            self._send(hello[len(PRIVATE_MAGIC) :])
        theirs = self._magic + (yield _NONCE_BYTES + X25519_BYTES)
        if (shared := exchange.shared(theirs[-X25519_BYTES:])) is None:
            return
        hellos = (hello, theirs) if self._dials else (theirs, hello)
        proofs, directions = _derived(self._key, shared, *hellos)
        mine, other = (0, 1) if self._dials else (1, 0)
        self._send(proofs[mine])
        if not hmac.compare_digest((yield _PROOF_BYTES), proofs[other]):
            return
        leaving, arriving = Seal(directions[mine], encrypts=True), Seal(directions[other], encrypts=False)
        self.connection = RecordSocket(self._socket, leaving, arriving)
        self._send(_IDENTITY.pack(self._rank, build().encode()[:BUILD_BYTES], self.purpose))
        self.peer, name, purpose = _IDENTITY.unpack((yield _IDENTITY.size))
        self.build = name.rstrip(b"\0").decode(errors="replace")
        if not self._dials:
            self.purpose = purpose
        self.is_verified = True

    def _send(self, message: bytes) -> None:
        # advance() notices a connection that has ended; an empty buffer has room for all messages.
        with suppress(OSError):
            self.connection.send(message)


def _hello() -> tuple[bytes, Exchange]:
    """Return a new hello, and the exchange whose public value it names."""
    exchange = Exchange()
    return PRIVATE_MAGIC + secrets.token_bytes(_NONCE_BYTES) + exchange.public, exchange


def _derived(key: Key, shared: bytes, dials: bytes, listens: bytes) -> tuple[list[bytes], list[bytes]]:
    """Return the proofs of both ends and the keys of both directions, those of the end that dials first. dials, listens: the
    hellos."""
    nonces = b"".join(hello[len(PRIVATE_MAGIC) :][:_NONCE_BYTES] for hello in (dials, listens))
    of_ends = [
        end + what + dials + listens for what in (b", proof: ", b", records: ") for end in (_OF_DIALLER, _OF_LISTENER)
    ]
    made = hkdf(key.secret + shared, nonces, *of_ends)
    return made[:2], made[2:]
