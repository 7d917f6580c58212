"""Who has arrived, and what becomes known of those that go."""

import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from gradwire.collectives.control import own_address
from gradwire.collectives.control.channel import ANSWER_S
from gradwire.collectives.control.client import CoordinatorClient, TurnedAway
from gradwire.collectives.control.coordinator import Admission, Card, Coordinator
from gradwire.collectives.control.handshake import HANDSHAKE_BYTES
from gradwire.collectives.control.monitor import Monitor
from gradwire.collectives.control.neighbour import Neighbour
from gradwire.collectives.control.notes import CoordinatorPlace
from gradwire.collectives.control.rendezvous import rendezvous
from gradwire.collectives.errors import LinkError

SIZE = 3
DEADLINE_S = 20.0


def card_of(rank: int) -> Card:
    """Return the card of a rank whose environment names no host that is to be looked up."""
    return own_address.card_of(rank, "host", "machine", {}, deadline=0.0) | {"size": SIZE}


def hub_at(port: int) -> str:
    """Return the text by which the store names a coordinator of rank 0 on this host."""
    return CoordinatorPlace.of(
        card_of(0) | {"address": "127.0.0.1", "loopback": ""}, port, "earlier", "token"
    ).to_text()


class WatchedStore(HashStore):  # type: ignore[misc]
    """Lets a test publish a new coordinator only after a rank has read the address of the earlier one. was_read: set by then."""

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
    """Send as many bytes as a coordinator does, but no proof."""
    program.accept()[0].sendall(bytes(HANDSHAKE_BYTES))


def answers_in_json(program: socket.socket) -> None:
    Neighbour(program.accept()[0]).say(status="not found")


@pytest.mark.parametrize(
    "program_there", [has_ended, is_cut_off, ends_the_connection, says_nothing, challenges, answers_in_json]
)
def test_a_restarted_rank_waits_for_a_new_hub(program_there: Callable[[socket.socket], object]) -> None:
    """The store names an earlier coordinator, at whose address another program may listen by now."""
    store = WatchedStore()

    def come(rank: int) -> Monitor:
        return rendezvous(store, 2, card_of(rank), time.monotonic() + DEADLINE_S, coordinator_rank=0, by_agent=True)

    with socket.create_server(("127.0.0.1", 0), backlog=0) as program, ThreadPoolExecutor(SIZE) as pool:
        program.settimeout(DEADLINE_S)
        store.set("hub", hub_at(program.getsockname()[1]))
        acted = pool.submit(program_there, program)
        if program_there in (has_ended, is_cut_off):
            acted.result()
        other = pool.submit(come, 1)
        acted.result()
        assert store.was_read.wait(DEADLINE_S)
        arrived = pool.submit(come, 0).result(), other.result()
        assert [len(monitor.cards) for monitor in arrived] == [2, 2]
        for monitor in arrived:
            monitor.release()


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
            rendezvous(store, SIZE, card_of(rank), deadline, coordinator_rank=0)
        return caught.value

    with ThreadPoolExecutor(SIZE) as pool:
        assert [error.awaited for error in pool.map(come, range(2))] == [{2}, {2}]


def test_a_rank_whose_loss_is_noted_is_lost_also_while_it_is_dialled() -> None:
    """The queue of the coordinator is full, so that no connection comes about."""
    store, asked = HashStore(), 0
    with socket.create_server(("127.0.0.1", 0), backlog=0) as hub, socket.create_connection(hub.getsockname()):
        store.set("hub", hub_at(hub.getsockname()[1]))

        def lost() -> list[int]:
            nonlocal asked
            asked += 1
            return [0] if asked == 3 else []

        deadline = time.monotonic() + DEADLINE_S
        with pytest.raises(LinkError, match="lost rank 0") as caught:
            rendezvous(store, SIZE, card_of(1), deadline, coordinator_rank=0, lost=lost)
    assert (caught.value.awaited, caught.value.ended) == ({0}, True)


def test_a_rank_that_ends_right_after_its_card_is_lost() -> None:
    """Its card and the end of its connection reach the Coordinator at once. A rank that leaves is not lost."""
    coordinator = Coordinator(card_of(0) | {"size": 3}, Admission())
    pairs = [socket.socketpair() for _ in range(3)]
    for here, theirs in pairs:
        here.setblocking(False)
        theirs.setblocking(False)
        coordinator.add(theirs)
    first, ends, leaves = (Neighbour(here) for here, _ in pairs)
    for rank, each in enumerate((first, ends, leaves)):
        each.say(card=card_of(rank))
    leaves.say(kind="left")
    for each in (ends, leaves):
        each.socket.close()
    coordinator.serve({theirs.fileno() for _, theirs in pairs})
    said = [json.loads(message) for message in first.read()[0]]
    gone = {message["rank"]: message["left"] for message in said if message["kind"] == "gone"}
    assert gone == {1: False, 2: True}
    coordinator.disown()
    first.socket.close()


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_process_turned_away_between_two_looks_does_not_report_the_hub_as_lost(
    monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The coordinator refuses the process and closes the connection just before a look. A report that the coordinator is lost
    would end the job that turned the process away."""
    here, hub = socket.socketpair()
    presence = CoordinatorClient(card_of(1), 0, here)
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
