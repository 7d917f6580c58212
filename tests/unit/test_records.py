"""Records of RecordSockets and of transports, and what a relay cannot do with them unnoticed."""

import ctypes
import errno
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

from gradwire.collectives.control.libcrypto import Cipher, functions
from gradwire.collectives.control.records import Connection, Forged, RecordSocket
from gradwire.collectives.errors import ForgedMessage, LinkError
from gradwire.collectives.kernels import layout
from gradwire.collectives.transports.tcp import TcpTransport
from tests.unit.over_records import TEXT, encrypted, flipped, read

DEADLINE_S = 20.0


def pair() -> tuple[RecordSocket, socket.socket, socket.socket, RecordSocket]:
    """A connection with a relay: one end, the two sockets of the relay, and the other end."""
    (one, near), (far, other) = socket.socketpair(), socket.socketpair()
    for each in (near, far):
        each.settimeout(DEADLINE_S)
    mine, theirs = encrypted(one, other)
    return mine, near, far, theirs


LENGTH_BYTES = 4 + 16
RECORD_BYTES = LENGTH_BYTES + len(TEXT) + 16


def changed(at: int) -> Callable[[list[bytes]], list[bytes]]:
    return lambda records: [flipped(at)(records[0], 0), *records[1:]]


FORGERIES: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "a bit of the length": changed(3),
    "a bit of the tag of the length": changed(LENGTH_BYTES - 1),
    "a bit of the text": changed(LENGTH_BYTES + 6),
    "a bit of the tag": changed(RECORD_BYTES - 1),
    "repeated": lambda records: [records[0], records[0]],
    "in another order": lambda records: [records[1], records[0]],
    "left out": lambda records: [records[1], records[2]],
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_records_that_are_not_as_they_were_sent_are_not_read(forgery: str) -> None:
    one, near, far, other = pair()
    for number in range(3):
        one.sendall(TEXT[:-1] + bytes([number]))
    records = [near.recv(RECORD_BYTES, socket.MSG_WAITALL) for _ in range(3)]
    far.sendall(b"".join(FORGERIES[forgery](records)) + bytes(64))
    for _ in range(3):  # and nothing that follows
        with pytest.raises(Forged):
            read(other, 4 * RECORD_BYTES)
    for each in (one, near, far, other):
        each.close()


def test_a_record_is_of_one_connection_and_of_one_direction() -> None:
    one, near, far, other = pair()
    another = pair()
    one.sendall(TEXT)
    record = near.recv(1 << 12)
    for there, reads in ((another[2], another[3]), (near, one), (another[1], another[0])):
        there.sendall(record)
        with pytest.raises(Forged):
            reads.recv(1)
    for each in (one, near, far, other, *another):
        each.close()


def test_a_record_that_ends_early_is_not_read() -> None:
    one, near, far, other = pair()
    one.sendall(TEXT)
    far.sendall(near.recv(1 << 12)[:-1])
    far.close()
    assert other.recv(1) == b""
    for each in (one, near, other):
        each.close()


def test_a_send_that_would_block_goes_on_with_the_same_record() -> None:
    one, other = encrypted(*socket.socketpair())
    one.setblocking(False)
    said = secrets.token_bytes(1 << 20)
    rest, heard = said, b""
    while len(heard) < len(said):
        with suppress(BlockingIOError):
            while rest:
                rest = rest[one.send(rest) :]
        heard += other.recv(1 << 16)
    assert heard == said
    one.close()
    other.close()


def test_a_new_key_replaces_a_key_at_the_same_record_at_both_ends() -> None:
    """In Python and in kernels, which continue its connection: from here on, both have another key, and the same one."""
    one, other = encrypted(*socket.socketpair())
    directions = (one.leaving, other.arriving)
    for seal in directions:
        seal.words[layout.RECORDS] = layout.RECORDS_OF_A_KEY - 2
    keys = []
    for _ in range(3):
        one.sendall(TEXT)
        assert read(other, len(TEXT)) == TEXT
        keys.append({tuple(seal.words[layout.KEY : layout.KEY + 4]) for seal in directions})
    assert [len(each) for each in keys] == [1, 1, 1]
    assert keys[0] != keys[1] == keys[2]
    for seal in directions:
        seal.words[layout.RECORDS] = 2 * layout.RECORDS_OF_A_KEY - 3
    for each in (one, other):
        each.setblocking(False)
    sends, receives = TcpTransport(0, 2, {1: one}), TcpTransport(1, 2, {0: other})
    tensor, landed = torch.arange(1 << 16), torch.zeros(1 << 16, dtype=torch.int64)
    with ThreadPoolExecutor(1) as pool:
        (waiting,) = receives.post([], [(0, landed)], 7)[1]
        received = pool.submit(waiting.wait, time.monotonic() + DEADLINE_S)
        sends.post([(1, tensor)], [], 7)[0][0].wait(time.monotonic() + DEADLINE_S)
        received.result()
    assert torch.equal(tensor, landed)
    last = {tuple(seal.words[layout.KEY : layout.KEY + 4]) for seal in directions}
    assert len(last) == 1
    assert last != keys[2]
    sends.close()
    receives.close()


def between(has_checksums: bool) -> tuple[TcpTransport, socket.socket, socket.socket, TcpTransport]:
    """Ranks 0 and 1 with a relay: a transport, the two sockets of the relay, and the other transport."""
    (one, near), (far, other) = socket.socketpair(), socket.socketpair()
    ends: tuple[Connection, Connection] = (one, other) if has_checksums else encrypted(one, other)
    for each in ends:
        each.setblocking(False)
    made = [TcpTransport(rank, 2, {1 - rank: ends[rank]}, has_checksums=has_checksums) for rank in range(2)]
    near.settimeout(DEADLINE_S)
    return made[0], near, far, made[1]


NUMBERS = 1000
HEADER = 16 + 16
MESSAGE = HEADER + 4 * NUMBERS + 16

MESSAGE_FORGERIES = FORGERIES | {
    "a bit of the length": changed(8),
    "a bit of the tag of the header": changed(HEADER - 1),
    "a bit of the text": changed(HEADER + 5),
    "a bit of the tag": changed(MESSAGE - 1),
}


@pytest.mark.parametrize("has_checksums", [True, False], ids=["with checksums", "encrypted"])
@pytest.mark.parametrize("forgery", MESSAGE_FORGERIES)
def test_messages_that_are_not_as_they_were_sent_are_not_received(forgery: str, has_checksums: bool) -> None:
    sends, near, far, receives = between(has_checksums)
    tensors = [torch.full((NUMBERS,), float(number)) for number in range(3)]
    for tensor in tensors:
        sends.post([(1, tensor)], [], 7)[0][0].wait(time.monotonic() + DEADLINE_S)
    messages = [near.recv(MESSAGE, socket.MSG_WAITALL) for _ in range(3)]
    far.sendall(b"".join(MESSAGE_FORGERIES[forgery](messages)))
    before = torch.full((NUMBERS,), -1.0)
    landed = [before.clone() for _ in range(2)]
    first, second = receives.post([], [(0, each) for each in landed], 7)[1]
    with suppress(ForgedMessage):
        first.wait(time.monotonic() + DEADLINE_S)
    for _ in range(3):  # and nothing that follows
        with pytest.raises(ForgedMessage) as caught:
            second.wait(time.monotonic() + DEADLINE_S)
        assert (caught.value.peer, caught.value.awaited) == (0, {0, 1})
    assert landed[0].unique().tolist() in ([-1.0], [0.0])  # which is the first message, too
    assert landed[1].unique().tolist() in ([-1.0], [0.0])
    for each in (sends, receives, near, far):
        each.close()


@ctypes.CFUNCTYPE(ctypes.c_void_p)
def fails() -> None:
    """Take the place of a function of libcrypto, and fail."""


@pytest.mark.parametrize("function", [layout.HMAC_DIGEST, layout.EVP_INIT, layout.EVP_CONTROL])
@pytest.mark.parametrize("which", [0, 1], ids=["sends", "receives"])
def test_a_rank_whose_libcrypto_fails_blames_itself_and_sends_nothing(function: int, which: int) -> None:
    one, other = encrypted(*socket.socketpair())
    table = (ctypes.c_int64 * layout.CRYPTO_FIELDS)(*functions())
    table[function] = ctypes.cast(fails, ctypes.c_void_p).value or 0
    for each in (one, other):
        each.setblocking(False)
    for seal in (one.leaving, other.arriving):
        seal.words[layout.RECORDS] = layout.RECORDS_OF_A_KEY
    (one.leaving, other.arriving)[which].words[layout.FUNCTIONS] = ctypes.addressof(table)
    sends, receives = TcpTransport(0, 2, {1: one}), TcpTransport(1, 2, {0: other})
    landed = torch.full((NUMBERS,), -1.0)

    def exchange() -> None:
        sends.post([(1, torch.ones(NUMBERS))], [], 7)[0][0].wait(time.monotonic() + DEADLINE_S)
        receives.post([], [(0, landed)], 7)[1][0].wait(time.monotonic() + DEADLINE_S)

    for _ in range(2):
        with pytest.raises(LinkError) as caught:
            exchange()
        assert (type(caught.value), caught.value.peer, caught.value.timed_out) == (LinkError, which, False)
    assert landed.unique().tolist() == [-1.0]
    assert which == 1 or not select.select([other], [], [], 0)[0]
    for transport in (sends, receives):
        transport.close()


def test_a_connection_whose_libcrypto_fails_ends() -> None:
    one, other = encrypted(*socket.socketpair())
    one.leaving.words[layout.FAILED] = errno.ENOTRECOVERABLE
    for _ in range(2):
        with pytest.raises(OSError, match="libcrypto"):
            one.send(TEXT)
    assert other.recv(1) == b""
    for each in (one, other):
        each.close()


def test_bytes_that_trickle_in_do_not_put_off_a_deadline() -> None:
    one, near, far, other = pair()
    one.sendall(TEXT)
    record = near.recv(1 << 12)
    is_late = threading.Event()

    def trickle() -> None:
        for byte in record:
            if not is_late.wait(0.02):
                far.sendall(bytes([byte]))

    other.settimeout(0.2)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(trickle)
        with pytest.raises(TimeoutError):
            other.recv(1)
        is_late.set()
    for each in (one, near, far, other):
        each.close()


@pytest.mark.parametrize("tag", [7, 8], ids=["awaited", "not awaited"])
def test_a_receive_from_any_rank_finds_a_forgery(tag: int) -> None:
    sends, near, far, receives = between(has_checksums=False)
    sends.post([(1, torch.zeros(1))], [], 7)[0][0].wait(time.monotonic() + DEADLINE_S)
    far.sendall(flipped(0)(near.recv(1 << 12), 0))
    with pytest.raises(ForgedMessage):
        receives.next_sender(tag, time.monotonic() + DEADLINE_S)
    for each in (sends, receives, near, far):
        each.close()


def test_a_message_that_ends_early_is_a_lost_rank() -> None:
    sends, near, far, receives = between(has_checksums=False)
    sends.post([(1, torch.zeros(NUMBERS))], [], 7)[0][0].wait(time.monotonic() + DEADLINE_S)
    far.sendall(near.recv(MESSAGE, socket.MSG_WAITALL)[:-1])
    far.close()
    (waiting,) = receives.post([], [(0, torch.empty(NUMBERS))], 7)[1]
    with pytest.raises(LinkError) as caught:
        waiting.wait(time.monotonic() + DEADLINE_S)
    assert (caught.value.peer, caught.value.timed_out) == (0, False)
    for each in (sends, receives, near):
        each.close()


def test_a_message_has_the_format_that_is_written_down() -> None:
    """A record of the header, and records of at most 56 KB of the bytes, whose nonces are their numbers."""
    key = secrets.token_bytes(32)
    (one, near), tensor = socket.socketpair(), torch.arange(20_000)
    mine, _ = encrypted(one, one, key)
    mine.setblocking(False)
    sends, heard, cipher = TcpTransport(0, 2, {1: mine}), b"", Cipher(key, encrypts=False)
    sending = sends.post([(1, tensor)], [], 7)[0][0]
    pieces = [layout.PIECE_BYTES, layout.PIECE_BYTES, tensor.nbytes - 2 * layout.PIECE_BYTES]
    while len(heard) < layout.HEADER_BYTES + sum(pieces) + 4 * layout.MAC_BYTES:
        heard += near.recv(1 << 16)
        sending.is_done()
    texts = []
    for number, nbytes in enumerate((layout.HEADER_BYTES, *pieces)):
        record, heard = heard[: nbytes + layout.MAC_BYTES], heard[nbytes + layout.MAC_BYTES :]
        cipher.use(None, number.to_bytes(12, "little"))
        texts.append(cipher.decrypt(record))
    assert texts[0] == struct.pack("<qq", 7, tensor.nbytes)
    assert b"".join(each or b"" for each in texts[1:]) == tensor.numpy().tobytes()
    assert sending.is_done()
    sends.close()
    near.close()
