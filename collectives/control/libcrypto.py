"""OpenSSL's libcrypto, which Python's own module ssl loads: AES-256-GCM, X25519, and the addresses that compiled kernels call."""

from __future__ import annotations

import ctypes
import ctypes.util
import weakref
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any

from gradwire.collectives.kernels import layout

#: The text from which the next key of a connection is derived: HKDF-Expand (RFC 5869, 2010) of one block.
NEXT_KEY = b"gradwire: the next key\x01"

X25519_BYTES = 32
_X25519 = 1034  # NID_X25519

_Pointer = ctypes.c_void_p
_Int, _Size = ctypes.c_int, ctypes.c_size_t

#: The results and the arguments of the functions that are called.
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "EVP_aes_256_gcm": (_Pointer, []),
    "EVP_sha256": (_Pointer, []),
    "EVP_CIPHER_CTX_new": (_Pointer, []),
    "EVP_CIPHER_CTX_free": (None, [_Pointer]),
    "EVP_CipherInit_ex": (_Int, [_Pointer, _Pointer, _Pointer, _Pointer, _Pointer, _Int]),
    "EVP_CipherUpdate": (_Int, [_Pointer, _Pointer, _Pointer, _Pointer, _Int]),
    "EVP_CipherFinal_ex": (_Int, [_Pointer, _Pointer, _Pointer]),
    "EVP_CIPHER_CTX_ctrl": (_Int, [_Pointer, _Int, _Int, _Pointer]),
    "HMAC": (_Pointer, [_Pointer, _Pointer, _Int, _Pointer, _Size, _Pointer, _Pointer]),
    "EVP_PKEY_CTX_new_id": (_Pointer, [_Int, _Pointer]),
    "EVP_PKEY_CTX_new": (_Pointer, [_Pointer, _Pointer]),
    "EVP_PKEY_CTX_free": (None, [_Pointer]),
    "EVP_PKEY_free": (None, [_Pointer]),
    "EVP_PKEY_keygen_init": (_Int, [_Pointer]),
    "EVP_PKEY_keygen": (_Int, [_Pointer, _Pointer]),
    "EVP_PKEY_get_raw_public_key": (_Int, [_Pointer, _Pointer, _Pointer]),
    "EVP_PKEY_new_raw_public_key": (_Pointer, [_Int, _Pointer, _Pointer, _Size]),
    "EVP_PKEY_derive_init": (_Int, [_Pointer]),
    "EVP_PKEY_derive_set_peer": (_Int, [_Pointer, _Pointer]),
    "EVP_PKEY_derive": (_Int, [_Pointer, _Pointer, _Pointer]),
}


class NoLibcrypto(RuntimeError):
    """There is a key, and no libcrypto that can use it."""


@cache
def libcrypto() -> ctypes.CDLL:
    """Return libcrypto. Raises NoLibcrypto if there is none, or it lacks what is needed."""
    missing = "no library of OpenSSL was found: install libcrypto, which Python's module ssl needs too"
    for library in _libraries():
        if not hasattr(library, "EVP_aes_256_gcm"):
            continue
        try:
            for name, (result, arguments) in _FUNCTIONS.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
            return library
        except AttributeError as error:
            missing = f"OpenSSL's libcrypto is too old: {error}"
    raise NoLibcrypto(f"GRADWIRE_KEY_FILE: connections cannot be encrypted: {missing}")


def _libraries() -> Iterator[ctypes.CDLL]:
    """Yield the libraries in which libcrypto's functions may be: that of the module ssl, in which its dependencies are found too,
    this program, and that of the system."""
    with suppress(ImportError, OSError):
        yield ctypes.CDLL(getattr(import_module("_ssl"), "__file__", None))
    if (found := ctypes.util.find_library("crypto")) is not None:
        with suppress(OSError):
            yield ctypes.CDLL(found)


@cache
def functions() -> ctypes.Array[ctypes.c_int64]:
    """Return the table of the addresses that kernels call; see layout.EVP_INIT and those that follow."""
    library = libcrypto()
    table = (ctypes.c_int64 * layout.CRYPTO_FIELDS)()
    called = {
        layout.EVP_INIT: library.EVP_CipherInit_ex,
        layout.EVP_UPDATE: library.EVP_CipherUpdate,
        layout.EVP_FINAL: library.EVP_CipherFinal_ex,
        layout.EVP_CONTROL: library.EVP_CIPHER_CTX_ctrl,
        layout.HMAC_DIGEST: library.HMAC,
    }
    for place, function in called.items():
        table[place] = _made(ctypes.cast(function, _Pointer).value)
    table[layout.SHA_256] = library.EVP_sha256()
    table[layout.NEXT_KEY] = _made(ctypes.cast(ctypes.c_char_p(NEXT_KEY), _Pointer).value)
    table[layout.NEXT_KEY_BYTES] = len(NEXT_KEY)
    return table


class Cipher:
    """AES-256-GCM with one key, to encrypt or to decrypt. address: that of its EVP_CIPHER_CTX, valid while this object lives."""

    def __init__(self, key: bytes, *, encrypts: bool) -> None:
        self._library = library = libcrypto()
        self.address: int = _made(library.EVP_CIPHER_CTX_new())
        weakref.finalize(self, library.EVP_CIPHER_CTX_free, self.address).atexit = False
        _check(library.EVP_CipherInit_ex(self.address, library.EVP_aes_256_gcm(), None, key, None, int(encrypts)))

    def use(self, key: bytes | None, nonce: bytes) -> None:
        """Set the nonce of the next text, and a new key unless it is None."""
        _check(self._library.EVP_CipherInit_ex(self.address, None, None, key, nonce, -1))

    def encrypt(self, text: bytes, beside: bytes = b"") -> bytes:
        """Return a text, encrypted, and the tag of the text and of what stands beside it."""
        library, room = self._library, ctypes.create_string_buffer(len(text) + layout.MAC_BYTES)
        place, written = ctypes.addressof(room), ctypes.c_int()
        self._read(beside)
        _check(library.EVP_CipherUpdate(self.address, place, ctypes.byref(written), text, len(text)))
        _check(library.EVP_CipherFinal_ex(self.address, place + len(text), ctypes.byref(written)))
        tag = place + len(text)
        _check(library.EVP_CIPHER_CTX_ctrl(self.address, layout.GET_MAC, layout.MAC_BYTES, tag))
        return room.raw

    def decrypt(self, record: bytes, beside: bytes = b"") -> bytes | None:
        """Return the text of what encrypt() returned; None if it does not verify."""
        library, nbytes = self._library, len(record) - layout.MAC_BYTES
        room, written = ctypes.create_string_buffer(max(nbytes, 1)), ctypes.c_int()
        self._read(beside)
        _check(library.EVP_CipherUpdate(self.address, room, ctypes.byref(written), record, nbytes))
        tag = record[nbytes:]
        _check(library.EVP_CIPHER_CTX_ctrl(self.address, layout.SET_MAC, layout.MAC_BYTES, tag))
        verifies = library.EVP_CipherFinal_ex(self.address, room, ctypes.byref(written)) == 1
        return room.raw[:nbytes] if verifies else None

    def _read(self, beside: bytes) -> None:
        if beside:
            written = ctypes.c_int()
            _check(self._library.EVP_CipherUpdate(self.address, None, ctypes.byref(written), beside, len(beside)))


class Exchange:
    """One end of an X25519 key exchange (RFC 7748, 2016). public: what the other end needs."""

    def __init__(self) -> None:
        self._library = library = libcrypto()
        context = library.EVP_PKEY_CTX_new_id(_X25519, None)
        if not context:
            raise NoLibcrypto("GRADWIRE_KEY_FILE: connections cannot be encrypted: OpenSSL's libcrypto has no X25519")
        own = _Pointer()
        try:
            _check(library.EVP_PKEY_keygen_init(context))
            _check(library.EVP_PKEY_keygen(context, ctypes.byref(own)))
        finally:
            library.EVP_PKEY_CTX_free(context)
        self._own = own
        weakref.finalize(self, library.EVP_PKEY_free, own).atexit = False
        room, length = ctypes.create_string_buffer(X25519_BYTES), _Size(X25519_BYTES)
        _check(library.EVP_PKEY_get_raw_public_key(own, room, ctypes.byref(length)))
        self.public = room.raw

    def shared(self, public: bytes) -> bytes | None:
        """Return the secret that both ends share; None for a public value with which there is none."""
        library, room, length = self._library, ctypes.create_string_buffer(X25519_BYTES), _Size(X25519_BYTES)
        other = _made(library.EVP_PKEY_new_raw_public_key(_X25519, None, public, len(public)))
        context = library.EVP_PKEY_CTX_new(self._own, None)
        try:
            _check(library.EVP_PKEY_derive_init(context))
            _check(library.EVP_PKEY_derive_set_peer(context, other))
            return room.raw if library.EVP_PKEY_derive(context, room, ctypes.byref(length)) == 1 else None
        finally:
            library.EVP_PKEY_CTX_free(context)
            library.EVP_PKEY_free(other)


def _made(address: int | None) -> int:
    if not address:
        raise NoLibcrypto("OpenSSL's libcrypto has no memory")
    return address


def _check(result: int) -> None:
    if result != 1:
        raise NoLibcrypto("a call of OpenSSL's libcrypto failed")
