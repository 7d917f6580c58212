"""Who may connect to a rank, and to whom a rank connects, with raw sockets at the other end."""

import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import pytest

from gradwire.collectives.control import handshake
from gradwire.collectives.control.build import OtherBuild, build
from gradwire.collectives.control.handshake import HANDSHAKE_BYTES, Arrived, Door, NotARank, dial
from gradwire.collectives.control.ports import listen_in
from gradwire.collectives.control.private import PURPOSE_BYTES
from gradwire.collectives.errors import LinkError
from tests.harness import wait_until
from tests.soak.strangers import FLOOD_BYTES, NESTED, greeting, proof
from tests.unit.test_monitor import DEADLINE_S, SECRET, monitors

GREETING_BYTES = HANDSHAKE_BYTES - 32
PURPOSE = b"a purpose".ljust(PURPOSE_BYTES)
HTTP = b"GET / HTTP/1.1\r\n\r\n"


@pytest.fixture
def door() -> Iterator[Door]:
    """That of rank 2."""
    with closing(Door(listen_in("127.0.0.1", None, 16), 2, SECRET, most=3)) as made:
        yield made


def connect(door: Door) -> socket.socket:
    connection = socket.create_connection(door.socket.getsockname(), DEADLINE_S)
    door.accept()
    return connection


def receive(connection: socket.socket, nbytes: int) -> bytes:
    return connection.recv(nbytes, socket.MSG_WAITALL)


def is_closed(connection: socket.socket) -> bool:
    with suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


def arrivals(door: Door) -> list[Arrived]:
    return door.look(door.descriptors)


def prove(connection: socket.socket, rank: int, name: str = build()) -> None:
    """Do what a rank does that dials, by the format as it is written down."""
    theirs, mine = receive(connection, GREETING_BYTES), greeting(rank, name, secrets.token_bytes(32))
    purpose = PURPOSE if name == build() else b""
    connection.sendall(mine + proof(SECRET, b"dials", mine, theirs) + purpose)
    assert receive(connection, 32) == proof(SECRET, b"listens", theirs, mine)


def test_who_knows_the_secret_is_let_in_and_what_follows_is_left_to_read(door: Door) -> None:
    with connect(door) as connection:
        thread = threading.Thread(target=prove, args=(connection, 1))
        thread.start()
        found: list[Arrived] = []
        wait_until(lambda: found.extend(arrivals(door)) or found)
        thread.join()
        connection.sendall(NESTED)
        (arrived,) = found
        assert (arrived.rank, arrived.error, arrived.purpose) == (1, None, PURPOSE)
        arrived.connection.setblocking(True)
        assert receive(arrived.connection, len(NESTED)) == NESTED
        arrived.connection.close()


def test_strangers_are_dropped() -> None:
    """Some say nothing, some too little, some the wrong thing, some never pause, one knows a secret, but of another job, one
    repeats what it is told, and one has overheard how rank 0 proved itself before."""
    overheard = greeting(0, build(), bytes(32))
    overheard += proof(SECRET, b"dials", overheard, greeting(2, build(), bytes(32)))
    another = greeting(0, build()) + secrets.token_bytes(32)
    said = (
        b"",
        HTTP,
        bytes(5000),
        NESTED,
        bytes(FLOOD_BYTES),
        greeting(0)[:20],
        greeting(0) + bytes(5000),
        another,
        overheard,
    )
    strangers: list[socket.socket] = []

    def repeat(stranger: socket.socket) -> None:
        with suppress(OSError):
            while piece := stranger.recv(HANDSHAKE_BYTES):
                stranger.sendall(piece)

    def flood(stranger: socket.socket, message: bytes) -> None:
        with suppress(OSError):  # it ends as soon as the rank has seen enough
            stranger.sendall(message)

    def knock(cards: Any) -> None:
        for message in (*said, None):
            stranger = socket.create_connection((cards[2]["address"], cards[2]["port"]), DEADLINE_S)
            strangers.append(stranger)
            behaves = (repeat, (stranger,)) if message is None else (flood, (stranger, message))
            threading.Thread(target=behaves[0], args=behaves[1], daemon=True).start()

    with monitors(3, knock) as met:
        opened = [each.open(range(3), "channel") for each in met]
        opened[0].post("topic", 1)
        assert all(each.wait_for(lambda each=each: "topic" in each.posts, DEADLINE_S) for each in opened)  # type: ignore[misc]
    for stranger in strangers:
        with suppress(OSError):
            while stranger.recv(1 << 12):
                pass
        stranger.close()


@pytest.mark.parametrize("message", [HTTP, NESTED, bytes(FLOOD_BYTES), greeting(1) + bytes(FLOOD_BYTES)])
def test_who_says_the_wrong_thing_is_dropped_after_a_few_bytes(door: Door, message: bytes) -> None:
    """Also if it does not pause: a rank reads no more of it than a rank would send."""
    with connect(door) as stranger, ThreadPoolExecutor(1) as pool:
        sent = pool.submit(lambda: stranger.sendall(message))
        wait_until(lambda: not arrivals(door) and len(door.descriptors) == 1)
        with suppress(OSError):
            sent.result(DEADLINE_S)
        with suppress(OSError):
            assert len(receive(stranger, 1 << 12)) <= HANDSHAKE_BYTES


def test_of_too_many_the_oldest_is_dropped(door: Door) -> None:
    silent = [connect(door) for _ in range(5)]
    for connection in silent[:2]:
        assert len(receive(connection, GREETING_BYTES)) == GREETING_BYTES
        assert is_closed(connection)
    assert len(door.descriptors) == 1 + 3
    for connection in silent:
        connection.close()


def test_who_takes_too_long_is_dropped(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    with connect(door):
        due = door.due()
        assert due is not None
        assert due > time.monotonic()
        monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.0)
        with connect(door) as late:
            late.sendall(greeting(1))
            assert door.look([]) == []
            assert len(door.descriptors) == 1 + 1
            receive(late, GREETING_BYTES)
            assert is_closed(late)
        assert door.due() == due


def dialled(behave: Callable[[socket.socket], object]) -> LinkError:
    """The error of rank 0 that dials rank 2, at whose place a program behaves in some way."""

    def serve() -> None:
        with program.accept()[0] as connection:
            connection.settimeout(DEADLINE_S)
            behave(connection)
            with suppress(OSError):
                while connection.recv(1 << 12):
                    pass

    with socket.create_server(("127.0.0.1", 0)) as program, ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve)
        with pytest.raises(LinkError) as caught:
            dial(0, 2, program.getsockname(), SECRET, time.monotonic() + DEADLINE_S, lambda: None)
        served.result(DEADLINE_S)
    return caught.value


def closes(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_RDWR)


def repeats(connection: socket.socket) -> None:
    """As if the dialling rank talked to itself."""
    for _ in range(2):
        with suppress(OSError):
            connection.sendall(connection.recv(HANDSHAKE_BYTES))


def knows_another_secret(connection: socket.socket) -> None:
    connection.sendall(greeting(2, build()))
    theirs = receive(connection, GREETING_BYTES)
    connection.sendall(proof(secrets.token_bytes(32), b"listens", greeting(2, build()), theirs))


def is_another_rank(connection: socket.socket) -> None:
    connection.sendall(greeting(1, build()))
    theirs = receive(connection, GREETING_BYTES)
    connection.sendall(proof(SECRET, b"listens", greeting(1, build()), theirs))


def serves_the_web(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(5000))


@pytest.mark.parametrize("behave", [closes, repeats, knows_another_secret, is_another_rank, serves_the_web])
def test_a_rank_does_not_talk_to_who_only_listens_at_the_right_place(behave: Callable[[socket.socket], object]) -> None:
    error = dialled(behave)
    assert (error.peer, error.timed_out) == (2, False)
    assert isinstance(error.__cause__, NotARank)


def has_another_build(connection: socket.socket) -> None:
    connection.sendall(mine := greeting(2, "gradwire 99.0"))
    theirs = receive(connection, GREETING_BYTES)
    connection.sendall(proof(SECRET, b"listens", mine, theirs))
    assert receive(connection, 32) == proof(SECRET, b"dials", theirs, mine)


def test_both_ends_know_of_another_build(door: Door) -> None:
    error = dialled(has_another_build)
    assert isinstance(error, OtherBuild)
    assert error.awaited == {0, 2}
    with connect(door) as connection:
        thread = threading.Thread(target=prove, args=(connection, 1, "gradwire 99.0"))
        thread.start()
        found: list[Arrived] = []
        wait_until(lambda: found.extend(arrivals(door)) or found)
        thread.join()
        (arrived,) = found
        arrived.connection.close()
    assert arrived.error is not None
    assert arrived.error.awaited == {1, 2}
    for each in (error, arrived.error):
        assert "gradwire 99.0" in str(each)
        assert build() in str(each)
