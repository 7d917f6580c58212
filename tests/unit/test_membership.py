"""What ranks tell each other before there is a link between them, on threads and a store of this process."""

import threading
import time
from contextlib import closing
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

SIZE = 3
DEADLINE_S = 20.0


def member() -> Membership:
    return Membership(0, SIZE, ((0, 1, 2),), dist.HashStore(), ("cpu",), secret=b"s")


def test_the_end_of_the_process_waits_only_for_calls_of_the_store_that_still_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handlers: list[object] = []
    register = SimpleNamespace(register=lambda handler, *_: handlers.append(handler), unregister=handlers.remove)
    monkeypatch.setattr(asking, "atexit", register)
    monkeypatch.setattr(asking, "_LAST_ANSWER_S", 0.0)
    answers = threading.Event()
    with pytest.raises(LinkError, match="the store does not answer"):
        asking.Asking(dist.HashStore()).ask(lambda: answers.wait(DEADLINE_S), time.monotonic())
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
    assert caught.value.__cause__ is (None if isinstance(error, LinkError) else error)


def test_an_error_that_another_rank_has_caused_names_it_and_leads_to_the_own_one() -> None:
    first, own = LinkError(1, timed_out=False, detail="rank 1 has ended", ended=True), OSError("refused")
    channel = Mock(**{"cause.return_value": first})
    with pytest.raises(PeerLost, match="lost rank 1") as caught, coming_together(2, 5.0, channel):
        raise own
    assert caught.value.__cause__ is own


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_gpu_is_only_used_where_there_is_one(monkeypatch: pytest.MonkeyPatch, has_gpu: bool) -> None:
    """PyPI's torch is built for CUDA, and registers the backend for both devices."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gradwire,cuda:gradwire")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert device_types_of(Mock()) == (("cpu", "cuda") if has_gpu else ("cpu",))


def test_the_secret_is_not_printed() -> None:
    assert "secret" not in repr(member())


def test_a_subset_is_a_membership_of_its_own() -> None:
    """In an order of its own, of the same meeting, and with names that others may use too."""
    hosts, store = ((0, 3), (1, 2), (4,)), dist.HashStore()
    everyone = [
        Membership(rank, 5, hosts, store, ("cpu",), b"s", global_ranks=(10, 11, 12, 13, 14), places=(0, 1, 2, 3, 4))
        for rank in range(5)
    ]
    subsets = {rank: everyone[rank].subset([3, 1, 2], "name") for rank in (1, 2, 3)}
    assert [subsets[rank].rank for rank in (3, 1, 2)] == [0, 1, 2]
    assert subsets[3].hosts == ((0,), (1, 2))
    assert (subsets[3].global_ranks, subsets[3].places) == ((13, 11, 12), (3, 1, 2))
    assert len({subsets[3].secret, everyone[3].subset([3, 1, 2], "other").secret, b"s"}) == 3
    assert len({subsets[3].scope, everyone[3].subset([3, 1, 2], "other").scope, ""}) == 3
    assert member().subset([0], "name").global_ranks == ()
