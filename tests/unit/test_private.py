"""Connections with a key, and who cannot make, read or change one. The relays and strangers of these tests have no key."""

import ctypes
import hashlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

import gradwire as hvd
from gradwire.collectives.control import private
from gradwire.collectives.control.handshake import Arrived, Door, NotARank, dial
from gradwire.collectives.control.key import Key, UnusableKey, hkdf, key_from, key_of_process
from gradwire.collectives.control.libcrypto import NoLibcrypto, libcrypto
from gradwire.collectives.control.neighbour import poll_of
from gradwire.collectives.control.notes import CoordinatorPlace, Notes
from gradwire.collectives.control.ports import listen_in
from gradwire.collectives.control.private import PRIVATE_MAGIC, PURPOSE_BYTES
from gradwire.collectives.control.records import Connection
from gradwire.collectives.control.rendezvous import rendezvous
from gradwire.collectives.control.texts import StrangeText, Texts
from gradwire.collectives.errors import ForgedMessage, LinkError
from tests.harness import wait_until
from tests.soak.strangers import greeting
from tests.unit.over_records import TEXT, Change, flipped, read
from tests.unit.test_coordinator import card_of as card_of_size
from tests.unit.test_monitor import monitors

DEADLINE_S = 20.0
KEY = Key.made()
PURPOSE = b"a purpose".ljust(PURPOSE_BYTES)
HELLO_BYTES, PROOF_BYTES = 72, 32


def card_of(rank: int) -> Any:
    """Return the card of one of two ranks."""
    return card_of_size(rank) | {"size": 2}


@pytest.fixture
def door() -> Iterator[Door]:
    """That of rank 2, with a key."""
    with closing(Door(listen_in("127.0.0.1", None, 16), 2, KEY, most=3)) as made:
        yield made


def dialled(place: tuple[str, int], key: Key | bytes = KEY) -> Connection:
    """The connection of rank 1 to the door."""
    return dial(1, 2, place, key, time.monotonic() + DEADLINE_S, lambda: None, purpose=PURPOSE)


def arrivals(door: Door, until: Callable[[], bool]) -> list[Arrived]:
    """Who has come to the door until a condition holds."""
    found: list[Arrived] = []
    end = time.monotonic() + DEADLINE_S
    while not (found or until()) and time.monotonic() < end:
        ready = [each for each, _ in poll_of(door.descriptors).poll(20)]
        if door.socket.fileno() in ready:
            door.accept()
        found += door.look(ready)
    return found


def met(door: Door, place: tuple[str, int] | None = None, key: Key | bytes = KEY) -> tuple[Connection, Arrived]:
    """Both ends of a connection to the door. Raises the error of the end that dials."""
    with ThreadPoolExecutor(1) as pool:
        dialling = pool.submit(dialled, place or door.socket.getsockname(), key)
        found = arrivals(door, dialling.done)
        connection = dialling.result(DEADLINE_S)
    (arrived,) = found or arrivals(door, lambda: False)
    return connection, arrived


def is_over(connection: Connection) -> bool:
    """Whether the other end has closed a connection without a word."""
    connection.setblocking(True)
    with closing(connection), suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


@dataclass
class Relay:
    """Stands between a rank and the door, passes on what `change` makes of each piece, and keeps everything. changes: that of
    the end that dials, and that of the door."""

    to: tuple[str, int]
    changes: tuple[Change, Change] = (lambda piece, _: piece, lambda piece, _: piece)
    heard: tuple[bytearray, bytearray] = field(default_factory=lambda: (bytearray(), bytearray()))

    def __enter__(self) -> tuple[str, int]:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._pool = ThreadPoolExecutor(3)
        self._pool.submit(self._serve)
        place: tuple[str, int] = self._listening.getsockname()
        return place

    def __exit__(self, *_: object) -> None:
        for each in (self._one, self._other):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._pool.shutdown()
        for each in (self._listening, self._one, self._other):
            each.close()

    def _serve(self) -> None:
        self._one, _ = self._listening.accept()
        self._other = socket.create_connection(self.to)
        self._pool.submit(self._pump, self._one, self._other, 0)
        self._pool.submit(self._pump, self._other, self._one, 1)

    def _pump(self, from_: socket.socket, to: socket.socket, which: int) -> None:
        with suppress(OSError):
            while piece := from_.recv(1 << 16):
                before = len(self.heard[which])
                self.heard[which].extend(piece)
                to.sendall(self.changes[which](piece, before))
        with suppress(OSError):
            to.shutdown(socket.SHUT_WR)


def test_two_ranks_with_the_key_meet_and_who_only_relays_reads_nothing(door: Door) -> None:
    relay = Relay(door.socket.getsockname())
    with relay as place:
        connection, arrived = met(door, place)
        assert (arrived.rank, arrived.error, arrived.purpose) == (1, None, PURPOSE)
        for one, other in ((connection, arrived.connection), (arrived.connection, connection)):
            assert one.send(TEXT) == len(TEXT)
            assert read(other, len(TEXT)) == TEXT
        connection.close()
        arrived.connection.close()
    for heard in relay.heard:
        assert len(heard) > HELLO_BYTES + PROOF_BYTES + len(TEXT)
        for secret in (TEXT, PURPOSE, KEY.secret, b"gradwire 0"):
            assert secret not in heard


def test_no_two_connections_have_anything_in_common(door: Door) -> None:
    heard = []
    for _ in range(2):
        relay = Relay(door.socket.getsockname())
        with relay as place:
            connection, arrived = met(door, place)
            connection.close()
            arrived.connection.close()
        heard.append(bytes(relay.heard[0]))
    windows = [{each[at : at + 8] for at in range(8, len(each) - 7)} for each in heard]
    assert not windows[0] & windows[1]


@pytest.mark.parametrize("which", [0, 1], ids=["of the end that dials", "of the door"])
@pytest.mark.parametrize(
    "at", [0, 8, 40, 71, 72, 103, 104, 123, 130, 255], ids=lambda at: f"byte {at}"
)  # magic, nonce, public value, proof, and of the first record the length, its tag, the identity and its tag
def test_a_relay_that_changes_a_bit_ends_the_handshake(door: Door, which: int, at: int) -> None:
    """The end that has read the change closes the connection. The other one may have finished before, and reads that."""
    changes: list[Change] = [lambda piece, _: piece, lambda piece, _: piece]
    changes[which] = flipped(at)
    with Relay(door.socket.getsockname(), (changes[0], changes[1])) as place, ThreadPoolExecutor(1) as pool:
        dialling = pool.submit(dialled, place)
        found = arrivals(door, lambda: dialling.done() and len(door.descriptors) == 1)
        if (error := dialling.exception(DEADLINE_S)) is None:
            assert not found
            assert is_over(dialling.result())
        else:
            assert isinstance(error, LinkError)
            assert (error.peer, error.timed_out) == (2, False)
            assert all(is_over(each.connection) for each in found)


@pytest.mark.parametrize("key", [Key.made(), secrets.token_bytes(32)], ids=["another key", "no key"])
def test_who_has_another_key_or_none_is_refused(door: Door, key: Key | bytes) -> None:
    with pytest.raises(LinkError) as caught:
        met(door, key=key)
    assert isinstance(caught.value.__cause__, NotARank)
    assert not arrivals(door, lambda: len(door.descriptors) == 1)


def test_a_recorded_rank_is_not_let_in_again(door: Door) -> None:
    relay = Relay(door.socket.getsockname())
    with relay as place:
        connection, arrived = met(door, place)
        connection.close()
        arrived.connection.close()
    with socket.create_connection(door.socket.getsockname()) as stranger:
        stranger.sendall(bytes(relay.heard[0]))
        assert not arrivals(door, lambda: len(door.descriptors) == 2)
        assert not arrivals(door, lambda: len(door.descriptors) == 1)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", greeting(1), PRIVATE_MAGIC + bytes(1000), bytes(5000)])
def test_a_stranger_learns_nothing(door: Door, said: bytes) -> None:
    """Not more than a nonce, a public value and a proof, whatever it says; none of these to who begins otherwise."""
    with socket.create_connection(door.socket.getsockname()) as stranger:
        stranger.sendall(said)
        assert not arrivals(door, lambda: len(door.descriptors) == 2)
        assert not arrivals(door, lambda: len(door.descriptors) == 1)
        heard = b""
        with suppress(OSError):
            while piece := stranger.recv(1 << 12):
                heard += piece
    assert len(heard) <= (HELLO_BYTES + PROOF_BYTES if said.startswith(PRIVATE_MAGIC) else len(PRIVATE_MAGIC))
    assert heard.startswith(PRIVATE_MAGIC)


def test_a_failure_of_libcrypto_ends_one_connection(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise NoLibcrypto("no memory")

    with monkeypatch.context() as patch, socket.create_connection(door.socket.getsockname()) as stranger:
        patch.setattr(private, "Exchange", fail)
        stranger.sendall(PRIVATE_MAGIC)
        assert not arrivals(door, lambda: len(door.descriptors) == 2)
        assert not arrivals(door, lambda: len(door.descriptors) == 1)
    for end in met(door):
        (end.connection if isinstance(end, Arrived) else end).close()


def test_a_rank_does_not_talk_to_itself(door: Door) -> None:
    """A stranger sends each end its own words."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:

        def repeat() -> None:
            with server.accept()[0] as connection, suppress(OSError):
                while piece := connection.recv(1 << 12):
                    connection.sendall(piece)

        repeating = pool.submit(repeat)
        with pytest.raises(LinkError) as caught:
            dialled(server.getsockname())
        repeating.result(DEADLINE_S)
    assert isinstance(caught.value.__cause__, NotARank)


# Ranks that meet


def between_monitors(relay: Relay) -> Callable[[Any], None]:
    """Put a relay between ranks 0 and 1: who connects to the highest of them connects to it. For monitors()."""

    def place(cards: Any) -> None:
        relay.to = cards[1]["address"], cards[1]["port"]
        address, port = relay.__enter__()
        cards[1] |= {"address": address, "port": port}

    return place


def test_news_pass_a_relay_that_reads_nothing() -> None:
    relay = Relay(("", 0))
    with monitors(2, between_monitors(relay), KEY) as met:
        opened = [each.open(range(2), "channel") for each in met]
        opened[0].post("topic", TEXT.decode())
        assert opened[1].wait_for(lambda: "topic" in opened[1].posts, DEADLINE_S)
        assert opened[1].posts["topic"][0] == TEXT.decode()
        for each in opened:
            each.close()
    relay.__exit__()
    assert all(len(heard) > HELLO_BYTES + PROOF_BYTES and TEXT not in heard for heard in relay.heard)


@pytest.mark.parametrize("size", [2, 5])
def test_news_that_are_changed_on_the_way_end_the_job_and_name_both_ranks(size: int) -> None:
    changes = False

    def change(piece: bytes, before: int) -> bytes:
        return flipped(before + len(piece) - 1)(piece, before) if changes else piece

    relay = Relay(("", 0), (change, lambda piece, _: piece))
    with monitors(size, between_monitors(relay), KEY) as met:
        opened = [each.open(range(size), "channel") for each in met]
        changes = True
        opened[0].post("topic", TEXT.decode())
        named = opened[1:] if size == 2 else opened  # two ranks have no other connection
        assert all(each.wait_for(lambda each=each: bool(each.failure), DEADLINE_S) for each in named)  # type: ignore[misc]
        assert {each.failure for each in named} == {str(ForgedMessage(0, 1))}
        if size == 2:
            assert opened[0].wait_for(lambda: 1 in opened[0].lost, DEADLINE_S)
        for each in opened:
            each.close()
    relay.__exit__()


@pytest.mark.parametrize(
    ("keys", "place"),
    [((KEY, None), ""), ((None, KEY), ""), ((KEY, Key.made()), ""), ((KEY, KEY), "another job")],
    ids=["no key", "a key", "another key", "of another job"],
)
def test_ranks_with_different_keys_or_of_different_jobs_do_not_meet(keys: tuple[Key | None, ...], place: str) -> None:
    """Both say so at once. A rank of another job does not end this one, whose ranks wait until their deadline."""
    store, of_first = HashStore(), time.monotonic() + (0.5 if place else 10 * DEADLINE_S)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(rendezvous, store, 2, card_of(0), of_first, coordinator_rank=0, key=keys[0])
        with pytest.raises(LinkError) as caught:
            rendezvous(
                store, 2, card_of(1), time.monotonic() + DEADLINE_S, coordinator_rank=0, key=keys[1], place=place
            )
        assert (caught.value.awaited, caught.value.timed_out) == ({0, 1}, False)
        with pytest.raises(LinkError) as told:
            first.result(DEADLINE_S)
        assert (told.value.awaited, told.value.timed_out) == (({1}, True) if place else ({0, 1}, False))


@pytest.mark.parametrize(
    ("refusal", "named"),
    [
        ('[1, "is a stranger"]', None),
        ('[2, "no key"]', None),
        ('[-1, "no key"]', None),
        ('[1, "no key"]', {0, 1}),
    ],
)
def test_who_reads_and_writes_the_store_learns_nothing_and_changes_nothing(
    refusal: str, named: set[int] | None
) -> None:
    """The job goes on, or ends with an error that names ranks of the job."""
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(
            rendezvous, store, 2, card_of(0), time.monotonic() + DEADLINE_S, coordinator_rank=0, key=KEY
        )
        wait_until(lambda: store.check(["hub"]))
        note = store.get("hub").decode()
        place = CoordinatorPlace.from_text(Texts(store, KEY).read("hub") or "")
        for secret in (place.token, place.address, str(place.port), place.key, "gradwire 0"):
            assert secret not in note
        with socket.create_connection((place.address, place.port)) as stranger:
            stranger.sendall(greeting(1) + bytes(1000))
            with suppress(OSError):
                assert len(stranger.recv(1 << 12, socket.MSG_WAITALL)) <= HELLO_BYTES + PROOF_BYTES
        store.set(f"failure/{place.key}", '{"ranks": [1], "why": "a stranger", "ended": true, "timed_out": false}')
        store.set(f"refused/{hashlib.sha256(b'/hub/' + note.encode()).hexdigest()}", refusal)
        second = pool.submit(
            rendezvous, store, 2, card_of(1), time.monotonic() + DEADLINE_S, coordinator_rank=0, key=KEY
        )
        if named is not None:
            for each in (first, second):
                with pytest.raises(LinkError) as caught:
                    each.result(DEADLINE_S)
                assert (caught.value.awaited, caught.value.timed_out) == (named, False)
            return
        arrived = [first.result(DEADLINE_S), second.result(DEADLINE_S)]
        for each in arrived:
            each.release()
        for each in arrived:
            each.join()


@pytest.mark.parametrize(("writer", "named"), [(0, {0, 1}), (2, set()), (999999999, set())])
@pytest.mark.parametrize("key", [None, KEY], ids=["no key", "a key"])
def test_a_forged_text_names_ranks_of_the_job_only(key: Key | None, writer: int, named: set[int]) -> None:
    store = HashStore()
    store.set("hub", f"gradwire-sealed {writer} 00")
    with pytest.raises(LinkError) as caught:
        rendezvous(store, 2, card_of(1), time.monotonic() + DEADLINE_S, coordinator_rank=0, key=key)
    assert (caught.value.awaited, caught.value.timed_out) == (named, False)


def test_a_refusal_is_of_the_place_that_a_rank_has_found() -> None:
    """Whatever the rank has read since."""
    store = HashStore()
    notes, without_key = (
        Notes(Texts(store, key, rank=rank, size=2), lambda call: call()) for rank, key in ((0, KEY), (1, None))
    )
    older = notes.publish(CoordinatorPlace.of(card_of(0), 1, "older", "-"), replaces=True)
    with pytest.raises(LinkError):
        without_key.coordinator()
    newer = notes.publish(CoordinatorPlace.of(card_of(0), 1, "newer", "-"), replaces=True)
    assert notes.coordinator() == newer
    refused = notes.failure(older)
    assert refused is not None
    assert set(refused.ranks) == {0, 1}
    assert notes.failure(newer) is None


# Keys


def test_hkdf_is_that_of_rfc_5869() -> None:
    """Its first test vector, whose output is one block and more: of the first, what one block gives."""
    made = hkdf(bytes([0x0B] * 22), bytes(range(13)), bytes(range(0xF0, 0xFA)))
    assert made[0].hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"


def test_a_sealed_text_is_of_one_key_and_one_name() -> None:
    sealed = KEY.seal("name", "text")
    assert sealed != KEY.seal("name", "text")
    assert KEY.open("name", sealed) == "text"
    for key, name, text in (
        (KEY, "another", sealed),
        (Key.made(), "name", sealed),
        (KEY, "name", sealed[:-1] + ("0" if sealed[-1] != "0" else "1")),
        (KEY, "name", sealed[:-2]),
        (KEY, "name", "text"),
        (KEY, "name", "gradwire-sealed 00"),
    ):
        assert key.open(name, text) is None


def test_a_text_in_the_store_is_of_one_place_and_one_name() -> None:
    store = HashStore()
    texts, elsewhere = Texts(store, KEY, "run 1/meeting 2"), Texts(store, KEY, "run 2/meeting 2")
    texts.write("hub", "text")
    store.set("end", store.get("hub").decode())
    assert texts.read("hub") == texts.open("hub", texts.write_first("hub", "another")) == "text"
    assert texts.read("none") is None
    for reads, name in ((elsewhere, "hub"), (Texts(store, Key.made(), "run 1/meeting 2"), "hub"), (texts, "end")):
        with pytest.raises(StrangeText):
            reads.read(name)


@pytest.mark.parametrize("key", [None, KEY], ids=["no key", "a key"])
def test_bytes_that_are_no_text_are_strange(key: Key | None) -> None:
    store = HashStore()
    store.set("hub", b"\xff\xfe")
    with pytest.raises(StrangeText):
        Texts(store, key).read("hub")


def test_a_key_file_is_private(tmp_path: Path) -> None:
    path = tmp_path / "key"
    KEY.write(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert key_from({"GRADWIRE_KEY_FILE": str(path)}) == KEY
    with pytest.raises(FileExistsError):
        KEY.write(path)
    for mode in (0o640, 0o604, 0o620, 0o660):
        path.chmod(mode)
        with pytest.raises(ValueError, match="private"):
            Key.read(path)


@pytest.mark.parametrize(
    "content", ["", "57", "57" * 31, "57" * 33, "zz" * 32, "57 " * 32, "57" * 32 + "\nmore", "57" * 32 + "\n \n#"]
)
def test_an_unusable_key_file_is_refused_without_its_content(tmp_path: Path, content: str) -> None:
    path = tmp_path / "key"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ValueError, match="key file") as caught:
        Key.read(path)
    assert "5757" not in str(caught.value)
    with pytest.raises(ValueError, match="cannot read"):
        Key.read(tmp_path / "none")


def test_a_world_of_one_process_refuses_a_key_that_it_would_not_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADWIRE_KEY_FILE", str(tmp_path / "none"))
    with pytest.raises(ValueError, match="key file"):
        hvd.init()
    assert not hvd.is_initialized()
    assert not dist.is_initialized()


def test_a_key_file_for_which_a_read_would_wait_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "key", 0o600)
    with pytest.raises(ValueError, match="regular file"):
        Key.read(tmp_path / "key")


def test_a_key_without_libcrypto_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise OSError("no such library")

    libcrypto.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(ctypes, "CDLL", missing)
            with pytest.raises(NoLibcrypto, match="cannot be encrypted"):
                KEY.seal("name", "text")
            KEY.write(tmp_path / "key")
            patch.setenv("GRADWIRE_KEY_FILE", str(tmp_path / "key"))
            with pytest.raises(UnusableKey, match="cannot be encrypted"):
                key_of_process()
    finally:
        libcrypto.cache_clear()


def test_without_a_key_file_there_is_no_key() -> None:
    assert key_from({}) is None
    assert "secret" not in repr(KEY)
    assert KEY.secret.hex() not in repr(KEY)
