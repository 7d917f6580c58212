"""Ranks that watch over each other, all in this process: what each of them hears."""

import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import pytest

from gradwire.collectives.control import listener as listener_module
from gradwire.collectives.control.handshake import give_up_on_silence
from gradwire.collectives.control.listener import Listener, neighbours
from gradwire.collectives.control.watch import Neighbour, Watch
from gradwire.collectives.errors import LinkError
from tests.harness import wait_until

DEADLINE_S = 20.0
SECRET = secrets.token_bytes(32)


def joined(size: int, before: Callable[[list[str]], object] = lambda cards: None) -> list[dict[int, socket.socket]]:
    """The connections of every rank. before: called with all cards when everyone listens."""
    listeners = [Listener("127.0.0.1") for _ in range(size)]
    cards = [listener.card for listener in listeners]
    before(cards)
    made: list[dict[int, socket.socket]] = [{} for _ in range(size)]

    def join(rank: int) -> None:
        made[rank] = listeners[rank].join(
            rank, neighbours(rank, size), cards, SECRET, time.monotonic() + DEADLINE_S, lambda: None
        )

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made


@contextmanager
def watches(size: int) -> Iterator[list[Watch]]:
    made = [Watch(rank, size, connections) for rank, connections in enumerate(joined(size))]
    try:
        yield made
    finally:
        for watch in made:
            watch.close()
        for watch in made:
            watch.join()


def end_abruptly(watch: Watch) -> None:
    """As a process does that is killed: all connections at once, before it can say what it thinks of that."""
    with watch._changed:
        for neighbour in watch._neighbours.values():
            neighbour.socket.shutdown(socket.SHUT_RDWR)


def assert_all_see(seeing: Iterable[Watch], condition: Callable[[Watch], object]) -> None:
    """News make the condition true on every one of these ranks."""
    assert all(watch.wait_for(lambda watch=watch: bool(condition(watch)), DEADLINE_S) for watch in seeing)  # type: ignore[misc]


@pytest.mark.parametrize("size", [*range(1, 10), 13, 16, 33])
def test_the_ranks_are_connected_whoever_of_them_is_gone(size: int) -> None:
    for gone in range(size):
        reached, new = set[int](), {(gone + 1) % size} - {gone}
        while new:
            reached |= new
            new = {peer for rank in new for peer in neighbours(rank, size)} - reached - {gone}
        assert reached == set(range(size)) - {gone}
        assert all(rank in neighbours(peer, size) for rank in range(size) for peer in neighbours(rank, size))
        assert len(neighbours(gone, size)) <= 2 * (size - 1).bit_length()


@pytest.mark.parametrize("size", [2, 3, 8, 13])
def test_everyone_hears_of_a_rank_that_ends_without_a_word(size: int) -> None:
    with watches(size) as all_watches:
        end_abruptly(all_watches[1])
        others = all_watches[:1] + all_watches[2:]
        assert_all_see(others, lambda watch: watch.lost)
        assert all(set(watch.lost) == {1} and watch.has_news for watch in others)


def test_a_loss_that_a_launcher_has_noted_is_news_though_no_connection_ends() -> None:
    with watches(4) as all_watches:
        first, second, third, left = all_watches
        noted: list[int] = []
        first.look_at(lambda: noted)
        left.report_leaving(7)
        assert_all_see(all_watches, lambda watch: watch.left == {3: 7})
        noted += [0, 2, 3]  # this rank itself, one that would answer, and one that has left
        others = first, second, left
        assert_all_see(others, lambda watch: set(watch.lost) == {2} and watch.has_news and 3 in watch.done)
        assert third.wait_for(lambda: 3 in third.done, DEADLINE_S)
        end_abruptly(third)
        assert not first.wait_for(lambda: set(first.lost) != {2} or bool(first.cut), 0.5)


@pytest.mark.parametrize("size", [3, 8])
def test_a_connection_that_ends_between_two_living_ranks_makes_neither_lost(size: int) -> None:
    with watches(size) as all_watches:
        all_watches[0]._neighbours[1].socket.shutdown(socket.SHUT_RDWR)
        assert_all_see(all_watches, lambda watch: watch.cut == {(0, 1)} and not watch.lost)
        end_abruptly(all_watches[1])
        assert_all_see(all_watches[:1] + all_watches[2:], lambda watch: set(watch.lost) == {1})


def test_what_the_other_end_has_not_taken_is_unconfirmed() -> None:
    mine, theirs = (connections[1 - rank] for rank, connections in enumerate(joined(2)))
    with mine, theirs:
        neighbour = Neighbour(mine)
        wait_until(lambda: not neighbour.is_unconfirmed())  # the kernel may delay the acknowledgement of the handshake
        neighbour.outgoing += bytes(64 << 20)
        neighbour.write()
        assert neighbour.is_unconfirmed()
        neighbour.outgoing.clear()
        give_up = time.monotonic() + DEADLINE_S
        while neighbour.is_unconfirmed() and time.monotonic() < give_up:
            with suppress(BlockingIOError):
                theirs.recv(1 << 20)
        assert not neighbour.is_unconfirmed()


def test_everyone_hears_who_lives_but_confirms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with watches(3) as all_watches:
        first, _, third = all_watches
        monkeypatch.setattr(first._neighbours[2], "is_unconfirmed", lambda: True)
        first.report_unreachable(0.05)
        third.report_failure({"sequence": 4})
        assert first.wait_for(lambda: 2 in first.reports, DEADLINE_S)
        assert not first.cut, "rank 2 may have ended, as far as rank 0 knew"
        first.report_unreachable(0.05)
        assert_all_see(all_watches, lambda watch: watch.cut == {(0, 2)} and not watch.lost)


def test_a_rank_that_lives_is_not_lost() -> None:
    with watches(4) as all_watches:
        all_watches[0]._send("lost", 1, by=0)  # as when the connection between them ends
        assert_all_see(all_watches, lambda watch: watch.cut == {(0, 1)} and not watch.lost)


def test_a_watch_that_fails_says_so_and_does_not_stay_behind(caplog: pytest.LogCaptureFixture) -> None:
    def listener() -> float | None:
        raise ValueError("planted")

    with watches(2) as (mine, theirs):
        mine.on_news(listener)
        theirs.report_leaving(3)
        assert theirs.wait_for(lambda: bool(theirs.lost), DEADLINE_S)
        assert "planted" in mine.failure
    assert "no longer receives news of the other ranks" in caplog.text


@pytest.mark.parametrize("size", [2, 8])
def test_a_rank_that_leaves_is_not_lost(size: int) -> None:
    with watches(size) as all_watches:
        all_watches[0].report_leaving(7)
        assert_all_see(all_watches, lambda watch: 0 in watch.left)
        all_watches[0].close()  # without having said that it is done: an interpreter that exits
        assert_all_see(all_watches[1:], lambda watch: 0 in watch.done)
        assert all((watch.left, watch.lost) == ({0: 7}, {}) for watch in all_watches[1:])


def test_a_report_comes_before_the_end_of_who_made_it_however_long_it_is() -> None:
    size, long = 8, "x" * (1 << 20)
    with watches(size) as all_watches:
        all_watches[5].report_failure({"call": long})
        all_watches[5].close()
        others = all_watches[:5] + all_watches[6:]
        assert_all_see(others, lambda watch: watch.lost or watch.reports)
        assert all(watch.reports == {5: {"call": long}} for watch in others)


def test_every_listener_is_told_of_news_and_called_again_when_it_asks() -> None:
    called = [threading.Semaphore(0), threading.Semaphore(0)]

    def tell(listener: threading.Semaphore, answers: list[float]) -> float | None:
        listener.release()
        return answers.pop() if answers else None

    with watches(2) as (mine, theirs):
        for listener in called:
            mine.on_news(partial(tell, listener, [0.001, 0.001]))
        theirs.report_leaving(3)
        assert all(listener.acquire(timeout=DEADLINE_S) for listener in called for _ in range(3))


def test_only_connections_whose_reader_is_never_late_end_by_silence() -> None:
    """What is sent to a rank that computes for long stands in its connection, which must outlive that."""
    [mine], [theirs] = (connections.values() for connections in joined(2))
    with mine, theirs:
        assert mine.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
        give_up_on_silence(mine)
        assert mine.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) > 0


def test_a_rank_that_does_not_come_is_named() -> None:
    mine, theirs = Listener("127.0.0.1"), Listener("127.0.0.1")
    with pytest.raises(LinkError, match="rank 0 did not connect") as caught:
        mine.join(1, [0], [theirs.card, mine.card], SECRET, time.monotonic() + 0.1, lambda: None)
    assert caught.value.timed_out
    theirs.close()
    with pytest.raises(LinkError, match=r"rank 1 at 127\.0\.0\.1") as caught:
        mine.join(0, [1], ["", theirs.card], SECRET, time.monotonic() + DEADLINE_S, lambda: None)
    assert caught.value.peer == 1


def test_strangers_without_end_do_not_put_off_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "wait_ready", lambda *_: [])  # as where all that were ready have gone again
    listener = Listener("127.0.0.1")
    with pytest.raises(LinkError, match="rank 0 did not connect"):
        listener.join(1, [0], ["", listener.card], SECRET, time.monotonic() + 0.1, lambda: None)


def test_of_what_a_rank_posts_all_see_the_latest() -> None:
    with watches(5) as ranks:
        for number in range(3):
            for watch in ranks:
                watch.post("number", {"rank": watch.rank, "is": number})
        latest = {rank: {"rank": rank, "is": 2} for rank in range(5)}
        assert_all_see(ranks, lambda watch: watch.posts.get("number") == latest)
        assert not any(watch.has_news for watch in ranks)  # nothing that would stand in the way of an operation
        ranks[0].post("other", 1)
        assert ranks[3].wait_for(lambda: ranks[3].posts.get("other") == {0: 1}, DEADLINE_S)
