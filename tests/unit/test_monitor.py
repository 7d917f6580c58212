"""Ranks that watch over each other, all in this process: what each of them hears."""

import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest

from gradwire.collectives.control import channel as channel_module
from gradwire.collectives.control.channel import Channel, Failure
from gradwire.collectives.control.handshake import give_up_on_silence
from gradwire.collectives.control.key import Key
from gradwire.collectives.control.monitor import Monitor, neighbours
from gradwire.collectives.control.neighbour import Neighbour
from gradwire.collectives.errors import LinkError
from tests.unit.in_process import run_ranks

DEADLINE_S = 20.0
SECRET = secrets.token_bytes(32)


@contextmanager
def monitors(
    size: int, before: Callable[[Any], object] = lambda cards: None, secret: bytes | Key = SECRET
) -> Iterator[list[Monitor]]:
    """The Monitors of ranks that have met. before: called with all cards when everyone listens."""
    made = [Monitor(rank, size, "127.0.0.1") for rank in range(size)]
    cards: list[Mapping[str, Any]] = [{"address": each.address, "port": each.port} for each in made]
    for each in made:
        each.cards = cards
        each.start(secret)
    before(cards)
    run_ranks(size, lambda rank: made[rank].connect(time.monotonic() + DEADLINE_S, lambda: None))
    try:
        yield made
    finally:
        for each in made:
            each.release()
        for each in made:
            each.end()


@contextmanager
def channels(size: int) -> Iterator[list[Channel]]:
    """The Channels of all ranks that have met."""
    with monitors(size) as made:
        opened = [each.open(range(size), "test") for each in made]
        yield opened
        for channel in opened:
            channel.close()


def end_abruptly(channel: Channel) -> None:
    """As a process does that is killed: all connections at once, before it can say what it thinks of that."""
    monitor = channel._monitor
    assert monitor is not None
    with monitor.lock:
        for neighbour in monitor._neighbours.values():
            neighbour.socket.shutdown(socket.SHUT_RDWR)


def monitor_of(channel: Channel) -> Monitor:
    assert channel._monitor is not None
    return channel._monitor


def assert_all_see(seeing: Iterable[Channel], condition: Callable[[Channel], object]) -> None:
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
    with channels(size) as all_watches:
        end_abruptly(all_watches[1])
        others = all_watches[:1] + all_watches[2:]
        assert_all_see(others, lambda watch: watch.lost)
        assert all(set(watch.lost) == {1} and watch.has_news for watch in others)


def test_a_loss_that_a_launcher_has_noted_is_news_though_no_connection_ends() -> None:
    with channels(4) as all_watches:
        first, second, third, left = all_watches
        noted: list[int] = []
        monitor_of(first).look_at(lambda: noted)
        left.report_leaving(7)
        assert_all_see(all_watches, lambda watch: watch.left == {3: 7})
        noted += [0, 2, 3]  # this rank itself, one that would answer, and one that has left
        assert_all_see((first, second, left), lambda watch: set(watch.lost) == {2} and watch.has_news)
        assert_all_see((first, second), lambda watch: 3 in watch.done)
        assert third.wait_for(lambda: 3 in third.done, DEADLINE_S)
        end_abruptly(third)
        assert not first.wait_for(lambda: set(first.lost) != {2} or bool(first.cut), 0.5)


@pytest.mark.parametrize("size", [3, 8])
def test_a_connection_that_ends_between_two_living_ranks_makes_neither_lost(size: int) -> None:
    with channels(size) as all_watches:
        monitor_of(all_watches[0])._neighbours[1].socket.shutdown(socket.SHUT_RDWR)
        assert_all_see(all_watches, lambda watch: watch.cut == {(0, 1)} and not watch.lost)
        end_abruptly(all_watches[1])
        assert_all_see(all_watches[:1] + all_watches[2:], lambda watch: set(watch.lost) == {1})


def test_what_the_other_end_has_not_taken_is_unconfirmed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        mine = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    with mine, theirs:
        for each in (mine, theirs):
            each.setblocking(False)
        neighbour = Neighbour(mine)
        neighbour.outgoing += bytes(64 << 20)
        neighbour.write()
        assert neighbour.is_unconfirmed()
        neighbour.outgoing.clear()
        give_up = time.monotonic() + DEADLINE_S
        while neighbour.is_unconfirmed() and time.monotonic() < give_up:
            with suppress(BlockingIOError):
                theirs.recv(1 << 20)
        assert not neighbour.is_unconfirmed()
        # What is sent to a rank that computes for long stays in its connection, which must outlive that.
        assert mine.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
        give_up_on_silence(mine)
        assert mine.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) > 0


def test_everyone_hears_who_lives_but_confirms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with channels(3) as all_watches:
        first, _, third = all_watches
        monkeypatch.setattr(monitor_of(first)._neighbours[2], "is_unconfirmed", lambda: True)
        first.report_unreachable(0.05)
        third.report_failure({"sequence": 4})
        assert first.wait_for(lambda: 2 in first.reports, DEADLINE_S)
        assert not first.cut, "rank 2 may have ended, as far as rank 0 knew"
        first.report_unreachable(0.05)
        assert_all_see(all_watches, lambda watch: watch.cut == {(0, 2)} and not watch.lost)


def test_a_rank_that_lives_is_not_lost() -> None:
    with channels(4) as all_watches:
        monitor_of(all_watches[0]).send("", "lost", [1, 0])  # as when the connection between them ends
        assert_all_see(all_watches, lambda watch: watch.cut == {(0, 1)} and not watch.lost)


def test_a_listener_that_fails_ends_the_news_of_its_channel_alone(caplog: pytest.LogCaptureFixture) -> None:
    def listener() -> float | None:
        raise ValueError("planted")

    with channels(2) as (mine, theirs):
        others = [monitor_of(each).open((0, 1), "another") for each in (mine, theirs)]
        mine.on_news(listener)
        theirs.report_leaving(3)
        assert theirs.wait_for(lambda: "planted" in theirs.reasons.get(mine.rank, ""), DEADLINE_S)
        assert "planted" in mine.failure
        others[0].post("topic", 5)
        assert others[1].wait_for(lambda: others[1].posts.get("topic") == {mine.rank: 5}, DEADLINE_S)
        assert not theirs.lost
        for each in others:
            each.close()
    assert "no longer receives news" in caplog.text


@pytest.mark.parametrize("size", [2, 8])
def test_a_rank_that_leaves_is_not_lost(size: int) -> None:
    with channels(size) as all_watches:
        all_watches[0].report_leaving(7)
        assert_all_see(all_watches, lambda watch: 0 in watch.left)
        monitor_of(all_watches[0]).end()  # without having said that it is done
        assert_all_see(all_watches[1:], lambda watch: 0 in watch.done)
        assert all((watch.left, watch.lost) == ({0: 7}, {}) for watch in all_watches[1:])


def test_a_report_comes_before_the_end_of_who_made_it_however_long_it_is() -> None:
    size, long = 8, "x" * (1 << 20)
    with channels(size) as all_watches:
        all_watches[5].report_failure({"call": long})
        monitor_of(all_watches[5]).end()
        others = all_watches[:5] + all_watches[6:]
        assert_all_see(others, lambda watch: watch.lost or watch.reports)
        assert all(watch.reports == {5: {"call": long}} for watch in others)


def test_every_listener_is_told_of_news_and_called_again_when_it_asks() -> None:
    called = [threading.Semaphore(0), threading.Semaphore(0)]

    def tell(listener: threading.Semaphore, answers: list[float]) -> float | None:
        listener.release()
        return answers.pop() if answers else None

    with channels(2) as (mine, theirs):
        for listener in called:
            mine.on_news(partial(tell, listener, [0.001, 0.001]))
        theirs.report_leaving(3)
        assert all(listener.acquire(timeout=DEADLINE_S) for listener in called for _ in range(3))


def test_a_rank_that_does_not_connect_is_named() -> None:
    first, second = Monitor(0, 2, "127.0.0.1"), Monitor(1, 2, "127.0.0.1")
    first.cards = second.cards = [{"address": "127.0.0.1", "port": each.port} for each in (first, second)]
    second.start(SECRET)
    with pytest.raises(LinkError, match="rank 0 did not connect") as caught:
        second.connect(time.monotonic() + 0.1, lambda: None)
    assert caught.value.timed_out
    second.release()
    second.join()
    with pytest.raises(LinkError, match=r"rank 1 at 127\.0\.0\.1") as caught:
        first.connect(time.monotonic() + DEADLINE_S, lambda: None)
    assert caught.value.peer == 1
    first.release()


def test_of_what_a_rank_posts_all_see_the_latest() -> None:
    with channels(5) as ranks:
        for number in range(3):
            for watch in ranks:
                watch.post("number", {"rank": watch.rank, "is": number})
        latest = {rank: {"rank": rank, "is": 2} for rank in range(5)}
        assert_all_see(ranks, lambda watch: watch.posts.get("number") == latest)
        assert not any(watch.has_news for watch in ranks)  # nothing that would stand in the way of an operation
        ranks[0].post("other", 1)
        assert ranks[3].wait_for(lambda: ranks[3].posts.get("other") == {0: 1}, DEADLINE_S)


def test_channels_of_some_ranks_say_nothing_to_others() -> None:
    """Their numbers are those of the ranks in the channel, and what comes before a rank has opened it is kept."""
    with monitors(5) as made:
        first = made[4].open([4, 1], "pair")
        first.post("topic", "early")
        first.report_leaving(3, "why")
        elsewhere = made[0].open([0, 1], "pair")
        other = made[1].open([4, 1], "pair")
        assert_all_see(
            [other], lambda channel: channel.posts.get("topic") == {0: "early"} and channel.reasons == {0: "why"}
        )
        second = [made[place].open([4, 1], "pair") for place in (4, 1)]
        second[1].post("topic", "late")
        assert_all_see(second, lambda channel: channel.posts.get("topic") == {1: "late"})
        assert not second[0].left
        assert not elsewhere.posts
        assert not any(each._early for each in made)
        end_abruptly(first)
        assert_all_see([other], lambda channel: 0 in channel.done)
        assert_all_see([second[1]], lambda channel: set(channel.lost) == {0})
        assert not elsewhere.lost


def test_a_rank_that_closes_one_channel_is_not_lost_in_the_others() -> None:
    with monitors(3) as made:
        closed, kept = ([each.open(range(3), scope) for each in made] for scope in ("closed", "kept"))
        closed[0].close()
        assert_all_see(closed[1:], lambda channel: channel.done == {0})
        kept[0].post("topic", 1)
        assert_all_see(kept, lambda channel: channel.posts.get("topic") == {0: 1})
        assert not any(channel.has_news for channel in kept)
        for each in made:
            each.release()  # the last channel ends them
        kept[0].post("topic", 2)
        assert_all_see(kept, lambda channel: channel.posts.get("topic") == {0: 2})


def test_everyone_gets_every_record_by_rank() -> None:
    with channels(3) as all_channels:
        got: dict[tuple[str, int], list[Any]] = {}

        def tell(rank: int) -> None:
            for topic in ("first", "second"):
                got[topic, rank] = all_channels[rank].exchange(topic, [topic, rank], time.monotonic() + DEADLINE_S)

        run_ranks(3, tell)
        assert got == {
            (topic, rank): [[topic, each] for each in range(3)] for topic in ("first", "second") for rank in range(3)
        }


def test_who_does_not_come_is_named_unless_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "_CHECK_S", 0.001)
    with channels(3) as (first, stopped, compiling):
        with pytest.raises(LinkError, match="ranks 1, 2 did not arrive") as caught:
            first.exchange("cards", 0, time.monotonic())
        assert (caught.value.timed_out, caught.value.awaited) == (True, {1, 2})
        compiling.compiles()
        assert_all_see([first], lambda channel: channel.posts.get("compiles"))
        with pytest.raises(LinkError, match="rank 1 did not arrive"):
            first.exchange("cards", 0, time.monotonic(), DEADLINE_S)
        with pytest.raises(LinkError, match="ranks 1, 2 did not arrive"):
            first.exchange("cards", 0, time.monotonic() - 1, 1.0)
        assert first.silent() == set()
        stopped.refuse(Failure((1,), "rank 1 raised it"))
        compiling.refuse(Failure((2,), "rank 2 raised it"))
        with pytest.raises(LinkError, match=r"rank \d raised it"):
            first.exchange("connected", 0, time.monotonic() + DEADLINE_S)


def test_a_rank_that_is_lost_is_not_waited_for() -> None:
    with channels(3) as (first, _, lost):
        end_abruptly(lost)
        with pytest.raises(LinkError, match="lost rank 2") as caught:
            first.exchange("cards", 0, time.monotonic() + DEADLINE_S)
        assert (caught.value.timed_out, caught.value.ended, caught.value.awaited) == (False, True, {2})


def test_channels_connect_their_ranks_by_connections_of_their_own() -> None:
    """The path between two processes is tested once."""
    with monitors(3) as made:
        for scope in ("one", "other"):
            opened = [made[place].open([2, 0], scope) for place in (2, 0)]
            ends: dict[int, socket.socket] = {}

            def connect(rank: int, opened: list[Channel] = opened, ends: dict[int, socket.socket] = ends) -> None:
                channel = opened[rank]
                ends[rank] = channel.connect([1 - rank], time.monotonic() + DEADLINE_S)[1 - rank]

            run_ranks(2, connect)
            ends[0].sendall(scope.encode())
            ends[1].setblocking(True)
            assert ends[1].recv(100) == scope.encode()
            for end in ends.values():
                end.close()


def test_ranks_whose_connections_have_ended_with_others_connect_again() -> None:
    """Of eight ranks, 0 and 5 are connected by the others only."""
    with monitors(8) as made:
        pair = [made[place].open([0, 5], "pair") for place in (0, 5)]
        pair[0].post("topic", "before")
        assert_all_see(pair, lambda channel: channel.posts.get("topic") == {0: "before"})
        for place in (1, 2, 3, 4, 6, 7):
            made[place].end()
        pair[1].post("topic", "after")
        assert_all_see(pair, lambda channel: channel.posts.get("topic") == {0: "before", 1: "after"})
        assert not any(channel.lost for channel in pair)
        end_abruptly(pair[1])
        assert_all_see(pair[:1], lambda channel: set(channel.lost) == {1})


def test_what_is_sent_in_the_middle_of_another_message_comes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a Communicator that is deleted, which the garbage collector does at any place."""
    with channels(2) as (first, second):
        doomed = [monitor_of(channel).open(range(2), "doomed") for channel in (first, second)]
        forward, monitor = monitor_of(first)._forward, monitor_of(first)

        def collect(*arguments: Any) -> None:
            monkeypatch.undo()
            doomed[0].report_leaving(3)
            doomed[0].close()
            forward(*arguments)

        monkeypatch.setattr(monitor, "_forward", collect)
        first.post("topic", 1)
        assert_all_see([second], lambda channel: channel.posts.get("topic") == {0: 1})
        assert_all_see([doomed[1]], lambda channel: channel.left == {0: 3} and channel.done == {0})
