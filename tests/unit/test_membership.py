"""What ranks tell each other before there is a link between them, on threads and a store of this process."""

import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from gradwire.collectives.control import asking
from gradwire.collectives.control.membership import coming_together, device_types_of
from gradwire.collectives.errors import CollectiveError, CollectiveTimeout, LinkError, PeerLost
from gradwire.collectives.transports import Membership
from tests.harness import wait_until
from tests.unit.in_process import run_ranks

SIZE = 3
DEADLINE_S = 20.0


def members(lost: Sequence[int] = ()) -> list[Membership]:
    store = dist.HashStore()
    return [
        Membership(rank, SIZE, ((0, 1, 2),), store, ("cpu",), secret=b"", lost=lambda: lost) for rank in range(SIZE)
    ]


def test_everyone_gets_every_record_by_rank() -> None:
    memberships = members()
    records = [b"", bytes(range(256)), b"rank 2"]
    got: dict[tuple[str, int], list[bytes]] = {}

    def tell(rank: int) -> None:
        for name in ("first", "second"):
            mine = name.encode() + records[rank]
            got[name, rank] = memberships[rank].everyones(name, mine, time.monotonic() + DEADLINE_S)

    run_ranks(SIZE, tell)
    assert all(told == [name.encode() + record for record in records] for (name, _), told in got.items())
    assert len(got) == 2 * SIZE


def test_who_does_not_come_is_named() -> None:
    memberships = members()

    def tell(rank: int) -> None:
        if rank == 1:
            with pytest.raises(LinkError, match="ranks 0, 2 did not arrive") as caught:
                memberships[rank].everyones("name", b"", time.monotonic())
            assert caught.value.timed_out
            assert caught.value.awaited == {0, 2}

    run_ranks(SIZE, tell)


def test_only_ranks_that_compile_are_given_the_time_for_it() -> None:
    first, stopped, compiling = members()
    compiling.compiles("offers", time.monotonic() + DEADLINE_S)
    with pytest.raises(LinkError, match="rank 1 did not arrive") as caught:
        first.everyones("offers", b"", time.monotonic(), compile_s=DEADLINE_S)
    assert caught.value.awaited == {1}
    stopped.compiles("offers", time.monotonic() + DEADLINE_S)
    with pytest.raises(LinkError, match="ranks 1, 2 did not arrive"):
        first.everyones("offers", b"", time.monotonic() - 1, compile_s=1.0)


def test_a_rank_that_is_lost_is_not_waited_for() -> None:
    with pytest.raises(LinkError, match="lost rank 2") as caught:
        members(lost=(2,))[0].everyones("name", b"", time.monotonic() + DEADLINE_S)
    assert (caught.value.timed_out, caught.value.ended, caught.value.awaited) == (False, True, {2})


def test_the_end_of_the_process_waits_only_for_calls_of_the_store_that_still_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handlers: list[object] = []
    register = SimpleNamespace(register=lambda handler, *_: handlers.append(handler), unregister=handlers.remove)
    monkeypatch.setattr(asking, "atexit", register)
    monkeypatch.setattr(asking, "_LAST_ANSWER_S", 0.0)
    answers = threading.Event()
    with pytest.raises(LinkError, match="the store does not answer"):
        members()[0].ask(lambda: answers.wait(DEADLINE_S), time.monotonic())
    assert len(handlers) == 1
    answers.set()
    wait_until(lambda: not handlers)


def test_each_call_of_a_store_has_its_own_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that has failed leaves the next one its time, and a deadline that has passed leaves time for a last answer."""
    answers = threading.Event()
    with closing(asking.Asking(dist.HashStore())) as store:
        with monkeypatch.context() as patch:
            patch.setattr(asking, "_LAST_ANSWER_S", 0.0)
            with pytest.raises(LinkError, match="the store does not answer"):
                store.ask(lambda: answers.wait(DEADLINE_S), time.monotonic())
        threading.Timer(0.2, answers.set).start()
        assert store.ask(lambda: 3, time.monotonic() + DEADLINE_S) == 3  # after the first call has returned
        assert store.ask(lambda: time.sleep(0.2), time.monotonic() - DEADLINE_S) is None


def test_a_rank_that_ended_before_it_could_say_that_all_had_come() -> None:
    """All records are there, so nobody is missing."""
    memberships = members()
    for rank in (1, 2):
        memberships[rank].store.set(f"name/{rank}", f"{rank}".encode().hex())
    assert memberships[0].everyones("name", b"0", time.monotonic()) == [b"0", b"1", b"2"]


@pytest.mark.parametrize(
    ("error", "kind", "said", "ranks"),
    [
        (OSError("refused"), CollectiveError, "could not connect: refused", (2,)),
        (RuntimeError("refused"), CollectiveError, "could not connect: refused", (2,)),
        (LinkError(1, timed_out=False, detail="reset"), CollectiveError, "could not connect: reset", (1,)),
        (LinkError(1, timed_out=False, detail="lost rank 1", ended=True), PeerLost, "lost rank 1", (1,)),
        (LinkError(1, timed_out=True, detail="why"), CollectiveTimeout, "not done after 5 s waiting for rank 1: .*: why", (1,)),
        (TimeoutError("why"), CollectiveTimeout, "not done after 5 s: the ranks did not meet: why", ()),
    ],
)  # fmt: skip
def test_what_fails_at_once_is_not_said_to_have_taken_long(
    error: Exception, kind: type[CollectiveError], said: str, ranks: tuple[int, ...]
) -> None:
    with pytest.raises(CollectiveError, match=said) as caught, coming_together(2, 5.0):
        raise error
    assert type(caught.value) is kind
    assert caught.value.ranks == ranks
    assert caught.value.__cause__ is error


def test_an_error_that_another_rank_has_caused_leads_to_both() -> None:
    first, own = LinkError(1, timed_out=False, detail="rank 1 has ended", ended=True), OSError("refused")
    membership = Mock(**{"cause.return_value": first})
    with pytest.raises(PeerLost, match="lost rank 1") as caught, coming_together(2, 5.0, membership):
        raise own
    assert (caught.value.__cause__, first.__cause__) == (first, own)


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_gpu_is_only_used_where_there_is_one(monkeypatch: pytest.MonkeyPatch, has_gpu: bool) -> None:
    """PyPI's torch is built for CUDA, and registers the backend for both devices."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gradwire,cuda:gradwire")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert device_types_of(Mock()) == (("cpu", "cuda") if has_gpu else ("cpu",))


def test_the_secret_is_not_printed() -> None:
    assert "secret" not in repr(members()[0])


def test_a_subset_is_a_membership_of_its_own() -> None:
    """In an order of its own; its ranks come together without the others, under names that these may use too."""
    store = dist.HashStore()
    hosts = ((0, 3), (1, 2), (4,))
    everyone = [
        Membership(rank, 5, hosts, store, ("cpu",), b"s", lost=lambda: (0, 3), global_ranks=(10, 11, 12, 13, 14))
        for rank in range(5)
    ]
    subsets = {rank: everyone[rank].subset([3, 1, 2], "name") for rank in (1, 2, 3)}
    assert [subsets[rank].rank for rank in (3, 1, 2)] == [0, 1, 2]
    assert subsets[3].hosts == ((0,), (1, 2))
    assert subsets[3].global_ranks == (13, 11, 12)
    assert list(subsets[3].lost()) == [0]
    assert len({subsets[3].secret, everyone[3].subset([3, 1, 2], "other").secret, b"s"}) == 3
    assert members()[0].subset([0], "name").global_ranks == ()

    got: list[list[bytes]] = []

    def tell(rank: int) -> None:
        mine = f"{rank}".encode()
        for memberships in (everyone, [subsets[rank] for rank in (3, 1, 2)]):
            if rank < len(memberships):
                membership = replace(memberships[rank], lost=tuple)
                got.append(membership.everyones("same", mine, time.monotonic() + DEADLINE_S))

    run_ranks(5, tell)
    assert sorted(got) == sorted([[b"0", b"1", b"2"]] * 3 + [[b"0", b"1", b"2", b"3", b"4"]] * 5)
