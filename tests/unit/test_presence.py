"""Who has arrived, and what becomes known of those that go."""

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from gradwire.collectives.control import own_address
from gradwire.collectives.control.arrival import arrive
from gradwire.collectives.control.handshake import HANDSHAKE_BYTES, dial
from gradwire.collectives.control.hub import ANSWER_S, Admission, Card, Failure, Hub
from gradwire.collectives.control.membership import membership_from
from gradwire.collectives.control.notes import HubPlace
from gradwire.collectives.control.presence import Presence, TurnedAway
from gradwire.collectives.control.watch import Neighbour
from gradwire.collectives.errors import LinkError
from tests.harness import wait_until

SIZE = 3
DEADLINE_S = 20.0


def card_of(rank: int) -> Card:
    """Return the card of a rank whose environment names no host that is to be looked up."""
    return own_address.card_of(rank, "host", "machine", {}, deadline=0.0) | {"size": SIZE}


def hub_at(port: int) -> str:
    """Return the text by which the store names a hub of rank 0 on this host."""
    return HubPlace.of(card_of(0) | {"address": "127.0.0.1", "loopback": ""}, port, "earlier", "token").to_text()


@pytest.fixture
def arrived() -> list[Presence]:
    """What each rank knows of the others, all of which have arrived."""
    store = HashStore()

    def come(rank: int) -> Presence:
        return arrive(store, SIZE, card_of(rank), time.monotonic() + DEADLINE_S, hub_rank=0)

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(come, range(SIZE)))


def test_who_leaves_after_connecting_is_not_blamed_beside_one_that_has_ended(arrived: list[Presence]) -> None:
    keeper, leaver, ended = arrived
    leaver.close()
    wait_until(lambda: keeper.gone() == {1})
    membership = membership_from(keeper, HashStore(), ("cpu",), ())
    assert membership.cause(0.0) is None
    ended._neighbour.socket.close()  # as the end of its process does
    wait_until(lambda: keeper.gone() == {2})
    cause = membership.cause(0.0)
    assert cause is not None
    assert cause.awaited == {2}
    keeper.close()


def test_the_rank_that_keeps_the_hub_is_not_blamed_when_it_leaves(arrived: list[Presence]) -> None:
    keeper, ended, other = arrived
    ended._neighbour.socket.close()
    wait_until(lambda: other.gone() == {1})
    keeper.close()
    wait_until(lambda: bool(other.gone()) and other._ended)
    assert other.gone() == {1}


def test_a_rank_that_answers_late_does_not_blame_itself(arrived: list[Presence]) -> None:
    keeper, late, stopped = arrived
    assert keeper.silent() == [1, 2]
    keeper.report(Failure((1, 2), "ranks 1, 2 did not arrive", timed_out=True))
    assert late.silent() == [2]
    for presence in (stopped, late, keeper):
        presence.close()


def test_the_first_failure_of_a_scope_counts_on_all_ranks(arrived: list[Presence]) -> None:
    first, second = Failure((1,), "rank 1 raised it"), Failure((2,), "rank 2 raised it")
    arrived[1].report(first)
    wait_until(lambda: arrived[0].failure() is not None)
    arrived[2].report(second)
    arrived[2].report(second, "scope")
    wait_until(lambda: all(presence.failure("scope") == second for presence in arrived))
    assert [presence.failure() for presence in arrived] == [first] * SIZE
    for presence in reversed(arrived):
        presence.close()


class WatchedStore(HashStore):  # type: ignore[misc]
    """Lets a test publish a new hub only after a rank has read the address of the earlier one. was_read: set by then."""

    def __init__(self) -> None:
        super().__init__()
        self.was_read = threading.Event()

    def get(self, key: str) -> bytes:
        value: bytes = super().get(key)
        self.was_read.set()
        return value


def has_ended(program: socket.socket) -> None:
    program.close()


def is_cut_off(program: socket.socket) -> object:
    """Fill the queue, so that the kernel answers nobody, as if the host were gone."""
    return socket.create_connection(program.getsockname())


def ends_the_connection(program: socket.socket) -> None:
    program.accept()[0].close()


def says_nothing(program: socket.socket) -> object:
    return program.accept()


def challenges(program: socket.socket) -> None:
    """Send as many bytes as a hub does, but no proof."""
    program.accept()[0].sendall(bytes(HANDSHAKE_BYTES))


def answers_in_json(program: socket.socket) -> None:
    Neighbour(program.accept()[0]).say(status="not found")


@pytest.mark.parametrize(
    "program_there", [has_ended, is_cut_off, ends_the_connection, says_nothing, challenges, answers_in_json]
)
def test_a_restarted_rank_waits_for_a_new_hub(program_there: Callable[[socket.socket], object]) -> None:
    """The store names an earlier hub, at whose address another program may listen by now."""
    store = WatchedStore()

    def come(rank: int) -> Presence:
        return arrive(store, 2, card_of(rank), time.monotonic() + DEADLINE_S, hub_rank=0, by_agent=True)

    with socket.create_server(("127.0.0.1", 0), backlog=0) as program, ThreadPoolExecutor(SIZE) as pool:
        program.settimeout(DEADLINE_S)
        store.set("hub", hub_at(program.getsockname()[1]))
        acted = pool.submit(program_there, program)
        if program_there in (has_ended, is_cut_off):
            acted.result()
        other = pool.submit(come, 1)
        acted.result()
        assert store.was_read.wait(DEADLINE_S)
        for presence in (come(0), other.result()):
            assert len(presence.cards) == 2
            presence.close()


class StuckAtFailures(HashStore):  # type: ignore[misc]
    """Answers questions about failures as late as a store whose process is stopped."""

    def compare_set(self, key: str, *values: str) -> bytes:
        if key.startswith("failure"):
            time.sleep(3 * ANSWER_S)
        answer: bytes = super().compare_set(key, *values)
        return answer


def test_a_rank_that_waits_for_a_stopped_store_at_the_deadline_is_not_blamed() -> None:
    store = StuckAtFailures()

    def come(rank: int) -> LinkError:
        deadline = time.monotonic() + 2 * ANSWER_S + 2 * rank * ANSWER_S
        with pytest.raises(LinkError) as caught:
            arrive(store, SIZE, card_of(rank), deadline, hub_rank=0)
        return caught.value

    with ThreadPoolExecutor(SIZE) as pool:
        assert [error.awaited for error in pool.map(come, range(2))] == [{2}, {2}]


def test_a_rank_whose_loss_is_noted_is_lost_also_while_it_is_dialled() -> None:
    """The queue of the hub is full, so that no connection comes about."""
    store, asked = HashStore(), 0
    with socket.create_server(("127.0.0.1", 0), backlog=0) as hub, socket.create_connection(hub.getsockname()):
        store.set("hub", hub_at(hub.getsockname()[1]))

        def lost() -> list[int]:
            nonlocal asked
            asked += 1
            return [0] if asked == 3 else []

        deadline = time.monotonic() + DEADLINE_S
        with pytest.raises(LinkError, match="lost rank 0") as caught:
            arrive(store, SIZE, card_of(1), deadline, hub_rank=0, lost=lost)
    assert (caught.value.awaited, caught.value.ended) == ({0}, True)


def test_a_rank_that_ends_right_after_its_card_is_lost() -> None:
    """Its card and the end of its connection reach the hub at once."""
    hub = Hub(card_of(0), Admission())
    here, theirs = socket.socketpair()
    with here:
        for each in (here, theirs):
            each.setblocking(False)
        hub.start(theirs)
        place = card_of(0)["address"], hub.port
        deadline = time.monotonic() + DEADLINE_S
        with dial(1, 0, place, hub.token.encode(), deadline, lambda: None) as ends:
            Neighbour(ends).say(card=card_of(1))
        first = Neighbour(here)
        first.say(card=card_of(0))
        wait_until(lambda: {"kind": "gone", "rank": 1, "left": False} in first.read()[0])
    hub.join()


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_process_turned_away_between_two_looks_does_not_report_the_hub_as_lost(
    monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The hub refuses the process and closes the connection just before a look. A report that the hub is lost would end the job
    that turned the process away."""
    here, hub = socket.socketpair()
    presence = Presence(card_of(1), 0, here)
    looks, look = 0, presence._look

    def look_after_refusal() -> None:
        nonlocal looks
        looks += 1
        if looks == at:
            Neighbour(hub).say(kind="refused", why="a stranger", again=False)
            hub.close()
        look()

    monkeypatch.setattr(presence, "_look", look_after_refusal)
    here.setblocking(False)
    with pytest.raises(TurnedAway, match="a stranger"):
        list(presence.await_all(time.monotonic() + DEADLINE_S))
