"""Records: pieces of a connection's bytes that are encrypted by AES-256-GCM (NIST SP 800-38D, 2007), or have a checksum.

Kernels call OpenSSL's libcrypto by the addresses of its functions. gradwire.collectives.kernels.layout has the fields of a Seal.
gradwire.collectives.control.records seals and opens records in Python. A record that fails is the last one of its direction: with
the number of the next one, a later record could take its place.
"""

from __future__ import annotations

from llvmlite import ir
from numba import int64, njit

from gradwire.collectives.kernels import layout
from gradwire.collectives.kernels.cpu.intrinsics import (
    I8,
    I32,
    I64,
    copy,
    field,
    instruction,
    load_unaligned,
    set_field,
    store_unaligned,
)
from gradwire.collectives.kernels.cpu.memory import add_lines, hash_words
from gradwire.collectives.kernels.cpu.scratch import clear_bytes, room_for
from gradwire.collectives.kernels.cpu.sockets import EBADMSG, ENOTRECOVERABLE

_LINE = layout.LINE_BYTES
_lines, _key = room_for(3 * _LINE), room_for(layout.KEY_BYTES)
_mixed = njit(hash_words)

_NULL = ir.Constant(I8.as_pointer(), None)
_AS_BEFORE = ir.Constant(I32, -1)  # neither encryption nor decryption is selected anew


def _call(builder, function, *given):
    """Generate a call of a function by its address; integers of 64 bits are addresses. It returns an int."""
    pointers = [builder.inttoptr(each, I8.as_pointer()) if each.type == I64 else each for each in given]
    kind = ir.FunctionType(I32, [each.type for each in pointers])
    return builder.sext(builder.call(builder.inttoptr(function, kind.as_pointer()), pointers), I64)


@instruction(int64, *[int64] * 4)
def _init(builder, function, cipher, key, nonce):
    """Set the key, unless it is 0, and the nonce."""
    return _call(builder, function, cipher, _NULL, _NULL, key, nonce, _AS_BEFORE)


@instruction(int64, *[int64] * 6)
def _update(builder, function, cipher, target, written, source, nbytes):
    return _call(builder, function, cipher, target, written, source, builder.trunc(nbytes, I32))


@instruction(int64, *[int64] * 4)
def _final(builder, function, cipher, target, written):
    return _call(builder, function, cipher, target, written)


@instruction(int64, *[int64] * 4)
def _control(builder, function, cipher, what, address):
    return _call(builder, function, cipher, builder.trunc(what, I32), ir.Constant(I32, layout.MAC_BYTES), address)


@instruction(int64, *[int64] * 7)
def _digest(builder, function, sha_256, key, text, nbytes, target, written):
    """Write the HMAC of a text: HMAC(). Return 0 if that failed."""
    key_bytes = ir.Constant(I32, layout.KEY_BYTES)
    pointers = [builder.inttoptr(each, I8.as_pointer()) for each in (sha_256, key, text, target, written)]
    sha_256, key, text, target, written = pointers
    given = sha_256, key, key_bytes, text, nbytes, target, written
    kind = ir.FunctionType(I8.as_pointer(), [each.type for each in given])
    return builder.ptrtoint(builder.call(builder.inttoptr(function, kind.as_pointer()), given), I64)


@njit
def _begin(seal):
    """Prepare the cipher for the next record. Return 1 if the library did."""
    functions, number, key = field(seal, layout.FUNCTIONS), field(seal, layout.RECORDS), int64(0)
    if number > 0 and number % layout.RECORDS_OF_A_KEY == 0:
        key, following = seal + 8 * layout.KEY, _key()
        made = _digest(
            field(functions, layout.HMAC_DIGEST),
            field(functions, layout.SHA_256),
            key,
            field(functions, layout.NEXT_KEY),
            field(functions, layout.NEXT_KEY_BYTES),
            following,
            seal + 8 * layout.WRITTEN,
        )
        if made == 0:
            return int64(0)
        copy(key, following, layout.KEY_BYTES)
        clear_bytes(following, layout.KEY_BYTES)
    return _init(field(functions, layout.EVP_INIT), field(seal, layout.CIPHER), key, seal + 8 * layout.RECORDS)


@njit
def _checksum(text, nbytes):
    """Return a 64-bit checksum: Fletcher's (1982) over lines of 64-bit words, mixed."""
    sums, count = _lines(), nbytes // _LINE
    clear_bytes(sums, 3 * _LINE)
    last = sums + 2 * _LINE
    copy(last, text + count * _LINE, nbytes - count * _LINE)
    add_lines(text, 0, count, sums)
    add_lines(last, 0, 1, sums)
    return int64(_mixed(sums, 2 * _LINE // 8, 0))


@njit
def seal_record(seal, text, nbytes, target):
    """Write the next record with a text to another address. Return 0, or the errno of a failure, also of an earlier one."""
    if field(seal, layout.FAILED) != 0:
        return field(seal, layout.FAILED)
    cipher, number = field(seal, layout.CIPHER), field(seal, layout.RECORDS)
    mac = target + nbytes
    if cipher == 0:
        copy(target, text, nbytes)
        store_unaligned(mac, _checksum(text, nbytes))
        store_unaligned(mac + 8, number)
    else:
        functions, written = field(seal, layout.FUNCTIONS), seal + 8 * layout.WRITTEN
        done = (
            _begin(seal) == 1
            and _update(field(functions, layout.EVP_UPDATE), cipher, target, written, text, nbytes) == 1
            and _final(field(functions, layout.EVP_FINAL), cipher, mac, written) == 1
            and _control(field(functions, layout.EVP_CONTROL), cipher, layout.GET_MAC, mac) == 1
        )
        if not done:
            set_field(seal, layout.FAILED, ENOTRECOVERABLE)
    set_field(seal, layout.RECORDS, number + 1)
    return field(seal, layout.FAILED)


@njit
def open_record(seal, record, nbytes, target):
    """Write the text of the next record, of nbytes, to another address; zeros if the record does not verify. Return 0, or the
    errno of a failure: EBADMSG if the record does not verify, or that of an earlier record."""
    if field(seal, layout.FAILED) != 0:
        return field(seal, layout.FAILED)
    cipher, number = field(seal, layout.CIPHER), field(seal, layout.RECORDS)
    mac = record + nbytes
    if cipher == 0:
        copy(target, record, nbytes)
        verifies = load_unaligned(mac) == _checksum(target, nbytes) and load_unaligned(mac + 8) == number
    else:
        functions, written = field(seal, layout.FUNCTIONS), seal + 8 * layout.WRITTEN
        done = (
            _begin(seal) == 1
            and _update(field(functions, layout.EVP_UPDATE), cipher, target, written, record, nbytes) == 1
            and _control(field(functions, layout.EVP_CONTROL), cipher, layout.SET_MAC, mac) == 1
        )
        verifies = done and _final(field(functions, layout.EVP_FINAL), cipher, target + nbytes, written) == 1
        if not done:
            set_field(seal, layout.FAILED, ENOTRECOVERABLE)
    if not verifies:
        clear_bytes(target, nbytes)
        if field(seal, layout.FAILED) == 0:
            set_field(seal, layout.FAILED, EBADMSG)
    set_field(seal, layout.RECORDS, number + 1)
    return field(seal, layout.FAILED)
