"""The rendezvous of ranks that arrive on threads of this process, beside strangers, other builds, other jobs, and ranks that
fail."""

import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from gradwire.collectives.control.build import OtherBuild, build
from gradwire.collectives.control.client import TurnedAway
from gradwire.collectives.control.handshake import HANDSHAKE_BYTES, dial
from gradwire.collectives.control.monitor import TO_COORDINATOR, Monitor
from gradwire.collectives.control.neighbour import Neighbour
from gradwire.collectives.control.notes import CoordinatorPlace
from gradwire.collectives.control.rendezvous import rendezvous, withdraw_from
from gradwire.collectives.errors import LinkError
from tests.harness import wait_until
from tests.soak.strangers import NESTED, greeting, proof
from tests.unit.test_coordinator import DEADLINE_S, card_of

HTTP = b"GET / HTTP/1.1\r\n\r\n"
FLOOD_BYTES = 64 << 20  # more than the kernel keeps for a process that reads nothing


class Job:
    """Ranks that arrive in one store."""

    def __init__(self, pool: ThreadPoolExecutor, size: int) -> None:
        self.store = HashStore()
        self._pool, self._size = pool, size
        self.coming: list[Future[Monitor]] = []
        self._left: dict[int, set[str]] = {}

    def start(self, rank: int, **given: Any) -> Future[Monitor]:
        size, deadline = given.pop("size", self._size), time.monotonic() + DEADLINE_S
        given = {"coordinator_rank": 0, "left": self._left.setdefault(rank, set())} | given
        self.coming.append(self._pool.submit(rendezvous, self.store, size, card_of(rank), deadline, **given))
        return self.coming[-1]

    def hub(self) -> CoordinatorPlace:
        wait_until(lambda: self.store.check(["hub"]))
        return CoordinatorPlace.from_text(self.store.get("hub").decode())

    def stranger(self) -> socket.socket:
        hub = self.hub()
        return socket.create_connection((hub.address, hub.port), DEADLINE_S)

    def close(self) -> list[Monitor]:
        """Wait until all have arrived, and let them leave."""
        arrived = [each.result(DEADLINE_S) for each in self.coming]
        for monitor in arrived:
            monitor.release()
        for monitor in arrived:
            monitor.join()
        return arrived


@pytest.fixture
def job() -> Any:
    with ThreadPoolExecutor(8) as pool:
        yield lambda size: Job(pool, size)


def assert_fails_at_once(coming: Future[Monitor], *said: str) -> LinkError:
    """Not by the deadline."""
    with pytest.raises(LinkError) as caught:
        coming.result(DEADLINE_S / 2)
    assert not caught.value.timed_out
    for part in said:
        assert part in str(caught.value)
    return caught.value


@pytest.mark.parametrize("message", [NESTED, HTTP, bytes(FLOOD_BYTES), greeting(1) + bytes(FLOOD_BYTES)])
def test_strangers_end_their_connections_only(job: Callable[[int], Job], message: bytes) -> None:
    """Whatever they send, the coordinator reads a few hundred bytes of it."""
    two = job(2)
    two.start(0)
    with two.stranger() as stranger:
        with suppress(OSError):
            stranger.sendall(message)
        with suppress(OSError):
            assert len(stranger.recv(1 << 12, socket.MSG_WAITALL)) <= HANDSHAKE_BYTES
    two.start(1)
    assert [len(monitor.cards) for monitor in two.close()] == [2, 2]


@pytest.mark.parametrize("message", [NESTED, b"\0\0\0\2{}", b"\xff" * 100])
def test_who_knows_the_token_and_makes_no_sense_ends_its_connection_only(
    job: Callable[[int], Job], message: bytes
) -> None:
    two = job(2)
    two.start(0)
    place = two.hub()
    deadline = time.monotonic() + DEADLINE_S
    there, purpose = (place.address, place.port), TO_COORDINATOR + b"\0"
    with dial(1, 0, there, place.token.encode(), deadline, lambda: None, purpose=purpose) as odd:
        odd.setblocking(True)
        odd.sendall(message)
        with suppress(ConnectionResetError):
            assert odd.recv(1) == b""
    two.start(1)
    assert [len(monitor.cards) for monitor in two.close()] == [2, 2]


def test_a_member_that_makes_no_sense_is_lost(job: Callable[[int], Job]) -> None:
    three = job(3)
    members = [three.start(0)]
    place = three.hub()
    deadline = time.monotonic() + DEADLINE_S
    there, purpose = (place.address, place.port), TO_COORDINATOR + b"\0"
    with dial(2, 0, there, place.token.encode(), deadline, lambda: None, purpose=purpose) as odd:
        Neighbour(odd).say(card=card_of(2) | {"size": 3})
        odd.setblocking(True)
        odd.sendall(NESTED)
        members.append(three.start(1))
        for member in members:
            error = assert_fails_at_once(member, "lost rank 2")
            assert (error.awaited, error.ended) == ({2}, True)


def test_another_build_is_named_on_all_ranks(job: Callable[[int], Job]) -> None:
    """By the rank of the coordinator, by one that has arrived, and by one that arrives later."""
    three = job(3)
    for rank in range(2):
        three.start(rank)
    place = three.hub()
    with three.stranger() as odd:
        theirs, mine = odd.recv(HANDSHAKE_BYTES - 32, socket.MSG_WAITALL), greeting(2, "gradwire 99.0")
        odd.sendall(mine + proof(place.token.encode(), b"dials", mine, theirs))
        for coming in three.coming:
            error = assert_fails_at_once(coming, "rank 2 runs gradwire 99.0", f"rank 0 {build()}")
            assert error.awaited == {0, 2}


@pytest.mark.parametrize("is_reached", [True, False])
def test_a_hub_of_another_build_is_named_before_its_card_is_parsed(job: Callable[[int], Job], is_reached: bool) -> None:
    """Its record is there before the rank, and the rest of it has a form that this build does not know."""
    two = job(2)
    with socket.create_server(("127.0.0.1", 0)) as program:
        place = CoordinatorPlace.of(card_of(0), program.getsockname()[1], "key", "token")
        other = replace(place, build="gradwire 99.0", address="127.0.0.1", text="a form of later versions")
        two.store.set("hub", other.to_text())
        coming = two.start(1)
        if is_reached:
            with program.accept()[0] as connection:
                connection.sendall(mine := greeting(0, "gradwire 99.0"))
                theirs = connection.recv(HANDSHAKE_BYTES - 32, socket.MSG_WAITALL)
                connection.sendall(proof(b"token", b"listens", mine, theirs))
                assert connection.recv(32, socket.MSG_WAITALL) == proof(b"token", b"dials", theirs, mine)
        else:
            program.accept()[0].close()
        error = assert_fails_at_once(coming, "rank 0 runs gradwire 99.0", f"rank 1 {build()}")
    assert isinstance(error, OtherBuild)


def test_a_record_of_an_unknown_form_is_an_error(job: Callable[[int], Job]) -> None:
    two = job(2)
    two.store.set("hub", '{"rank": 0, "address": "127.0.0.1"}')
    assert_fails_at_once(two.start(1), "is another version installed")


@pytest.mark.parametrize(("rank", "size"), [(1, 3), (2, 3), (1, 1)])
def test_a_rank_that_expects_another_number_of_ranks_is_named_by_all(
    job: Callable[[int], Job], rank: int, size: int
) -> None:
    two = job(2)
    first = two.start(0)
    assert_fails_at_once(two.start(rank, size=size), "rank 0 expects 2 ranks", f" {size}: give all ranks the same")
    error = assert_fails_at_once(first, "rank 0 expects 2 ranks", f"rank {rank} on host {socket.gethostname()} {size}:")
    assert error.awaited == {0, rank}


def test_a_world_that_has_begun_outlives_who_expects_another_number_of_ranks(job: Callable[[int], Job]) -> None:
    two = job(2)
    members = [two.start(rank) for rank in range(2)]
    for member in members:
        member.result(DEADLINE_S)
    with pytest.raises(TurnedAway):
        two.start(2, size=3).result(DEADLINE_S / 2)
    two.coming.pop()
    assert [monitor.lost for monitor in two.close()] == [{}, {}]


def fails() -> list[int]:
    raise ZeroDivisionError("its own")


def is_interrupted() -> list[int]:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("victim", "lost"), [(1, fails), (1, is_interrupted), (0, fails)])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_rank_that_fails_before_it_finds_the_hub_is_named_at_once(
    job: Callable[[int], Job], victim: int, lost: Callable[[], list[int]], is_first: bool
) -> None:
    """And all come the next time, when the note of its failure is still there."""
    two = job(2)
    other: Future[Monitor] | None = None
    if not is_first:
        other = two.start(1 - victim)
        if victim == 1:
            two.hub()
    with pytest.raises((ZeroDivisionError, KeyboardInterrupt)):
        two.start(victim, lost=lost).result(DEADLINE_S)
    error = assert_fails_at_once(other or two.start(1 - victim), f"rank {victim} raised ")
    assert (error.awaited, error.ended) == ({victim}, False)
    two.coming.clear()
    for rank in (victim, 1 - victim):
        two.start(rank, number=2)
    two.close()


@pytest.mark.parametrize("comes_first", [True, False])
def test_a_rank_that_withdraws_is_named_at_once(job: Callable[[int], Job], comes_first: bool) -> None:
    """Where the first rank that arrives runs the coordinator."""
    three = job(3)
    if comes_first:
        three.start(0, coordinator_rank=None)
        three.hub()
    withdraw_from(three.store, ValueError("no"), 2, 3, (), time.monotonic() + DEADLINE_S)
    for rank in range(comes_first, 2):
        three.start(rank, coordinator_rank=None)
    for coming in three.coming:
        assert assert_fails_at_once(coming, "rank 2 raised ValueError: no").awaited == {2}
