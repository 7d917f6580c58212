"""The key of a job, which its processes get from outside, and keys that are derived from it."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field

from gradwire.collectives.control.libcrypto import Cipher, NoLibcrypto, libcrypto
from gradwire.collectives.environment import KEY_FILE
from gradwire.collectives.kernels.layout import KEY_BYTES, MAC_BYTES

_NONCE, _SALT_BYTES = bytes(12), 32
_FILE_MODE = 0o600
#: The content of a key file.
_CONTENT = re.compile(rf"([0-9a-fA-F]{{{2 * KEY_BYTES}}})(?:\r?\n)?")
#: How the texts of Key.seal() begin.
SEALED = "gradwire-sealed"


class UnusableKey(ValueError):
    """A process is to have a key, and cannot read its file, or encrypt anything with it."""


def hkdf(secret: bytes, salt: bytes, *purposes: bytes) -> list[bytes]:
    """Return a key for each purpose, derived from a secret by HKDF-SHA-256 (RFC 5869, 2010)."""
    extracted = hmac.digest(salt, secret, hashlib.sha256)
    return [hmac.digest(extracted, purpose + b"\x01", hashlib.sha256) for purpose in purposes]


@dataclass(frozen=True)
class Key:
    """A key that only the processes of a job have. With it, all connections of gradwire are encrypted."""

    secret: bytes = field(repr=False)

    @classmethod
    def made(cls) -> Key:
        """Return a new, random key."""
        return cls(secrets.token_bytes(KEY_BYTES))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Key:
        """Return the key in a file. Raises UnusableKey, without any of its content, for a file that cannot be read, that other
        users can read or write, or that has no key."""
        try:
            # O_NONBLOCK does not wait for the writer of a FIFO.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(descriptor, encoding="ascii", errors="replace", newline="") as file:
                found = os.fstat(file.fileno())
                if not stat.S_ISREG(found.st_mode):
                    raise UnusableKey(f"the key file {path} must be a regular file")
                if stat.S_IMODE(found.st_mode) & 0o077 or found.st_uid not in (os.geteuid(), 0):
                    mode = f"its mode is {stat.S_IMODE(found.st_mode):04o} and its owner {found.st_uid}"
                    raise UnusableKey(
                        f"the key file {path} must be private to its owner, this user: {mode}; chmod 600 it"
                    )
                text = file.read(2 * KEY_BYTES + 3)  # one more than are allowed
        except OSError as error:
            raise UnusableKey(
                f"cannot read the key file {path}: {error.strerror}. `gradwire keygen` makes one"
            ) from None
        if (digits := _CONTENT.fullmatch(text)) is None:
            raise UnusableKey(
                f"the key file {path} must hold {2 * KEY_BYTES} hexadecimal digits and nothing else: `gradwire keygen` makes one"
            )
        return cls(bytes.fromhex(digits[1]))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the key to a new file that only its owner can read. Raises OSError, also if the file exists."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE_MODE)
        with open(descriptor, "w") as file:
            file.write(self.to_text() + "\n")

    def to_text(self) -> str:
        """Return the content of a key file."""
        return self.secret.hex()

    def of(self, meeting: str) -> Key:
        """Return the key of the ranks that meet, derived from this one. meeting: a text that no other meeting has."""
        return Key(hkdf(self.secret, b"", b"meeting " + meeting.encode())[0])

    def seal(self, name: str, text: str, writer: int = -1) -> str:
        """Return a text for a place that others can read and write, such as torch's store: encrypted, with a tag of the text and
        its name there. writer: a number that is not encrypted, and that others can replace."""
        salt = secrets.token_bytes(_SALT_BYTES)
        cipher = self._cipher(salt, encrypts=True)
        return f"{SEALED} {writer} {(salt + cipher.encrypt(text.encode(), name.encode())).hex()}"

    def open(self, name: str, sealed: str) -> str | None:
        """Return the text that seal() sealed under a name; None for anything else."""
        try:
            magic, _, digits = sealed.split(" ")
            found = bytes.fromhex(digits)
        except ValueError:
            return None
        salt, record = found[:_SALT_BYTES], found[_SALT_BYTES:]
        if magic != SEALED or len(record) < MAC_BYTES:
            return None
        text = self._cipher(salt, encrypts=False).decrypt(record, name.encode())
        return None if text is None else text.decode()

    def _cipher(self, salt: bytes, *, encrypts: bool) -> Cipher:
        """Return a cipher whose key nothing else has."""
        cipher = Cipher(hkdf(self.secret, salt, b"a text")[0], encrypts=encrypts)
        cipher.use(None, _NONCE)
        return cipher


def is_sealed(text: str) -> bool:
    """Return whether a text is one that Key.seal() makes."""
    return text.startswith(f"{SEALED} ")


class _Process:
    """Holds the key of this process, since torch's process groups have no place for it. file: that of init(), if it was given
    one."""

    key: Key | None = None
    file: str | os.PathLike[str] | None = None


_process = _Process()


def use_key_file(path: str | os.PathLike[str]) -> None:
    """Let key_of_process() return the key in a file, until the process ends. The first meeting reads it, so that the other ranks
    learn whether this one can. Raises ValueError if the process has another key."""
    if _process.key is not None and _process.key != Key.read(path):
        raise ValueError(
            "this process already uses another key: a process has one key from its first meeting to its end"
        )
    _process.file = path


def key_of_process() -> Key | None:
    """Return the key of this process: that of use_key_file(), else that of GRADWIRE_KEY_FILE, which is kept once it
    has been read. Every meeting of this process uses it. None without one. Raises UnusableKey, also if libcrypto is missing."""
    if _process.key is None:
        key = key_from(os.environ) if _process.file is None else Key.read(_process.file)
        if key is not None:
            try:
                libcrypto()
            except NoLibcrypto as error:
                raise UnusableKey(str(error)) from None
        _process.key = key
    return _process.key


def key_from(environment: Mapping[str, str]) -> Key | None:
    """Return the key in the file that GRADWIRE_KEY_FILE names; None if it names none. Raises as Key.read()."""
    path = environment.get(KEY_FILE)
    return Key.read(path) if path else None
