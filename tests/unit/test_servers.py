"""A server and its workers in one process: what pulls wait for, which errors travel, and how a worker takes leave."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwire.collectives import CollectiveError, CollectiveTimeout, PeerLost
from gradwire.trainer.servers.aggregator import Scheme
from gradwire.trainer.servers.messages import QuorumLost
from gradwire.trainer.servers.packing import ABSENT, DENSE, Packing
from gradwire.trainer.servers.server import Key, Server
from gradwire.trainer.servers.serving import Link, LocalLink, serve
from gradwire.trainer.servers.worker import Worker

FAR_S = 600.0  # longer than a test may take
ALONE = Scheme(quorum=1, grace_s=0.0, staleness=None, late="next")
SYNCHRONOUS = Scheme(quorum=3, grace_s=0.0, staleness=None, late="next")
STORE = Scheme(quorum=3, grace_s=0.0, staleness=None, late="next", sums=True, reads_own=True)


def key_of(*tensors: Tensor) -> Key:
    return Key("key 'w'", 0, 0, Packing(tensors, [None] * len(tensors)))


def server_of(
    scheme: Scheme, timeout_s: float = FAR_S, optimizer: torch.optim.Optimizer | None = None, workers: int = 3
) -> Server:
    """Return the server of rank 0, which serves three workers, as rank 2 does, with one key of zeros."""
    server = Server(0, range(workers), scheme, timeout_s, needed=(0, 2))
    value = torch.zeros(3) if optimizer is None else optimizer.param_groups[0]["params"][0]
    server.add(key_of(value), [value], optimizer, users=optimizer)
    return server


def push(server: Server, worker: int, *pushed: Tensor) -> None:
    """Push these tensors, or nothing."""
    server.perform(worker, {"push": [0, 0, 1.0, [DENSE if pushed else ABSENT]]}, pushed)


def pull(server: Server, worker: int, rows: Tensor | None = None) -> tuple[int, list[Tensor]]:
    answer = server.perform(worker, {"pull": [0, rows is not None]}, [] if rows is None else [rows])
    assert answer is not None
    return answer()


@pytest.mark.parametrize(
    ("scheme", "lost"),
    [
        (Scheme(quorum=1, grace_s=0.0, staleness=0, late="next"), [2]),  # rank 1 would wait for rank 0 by the bound
        (SYNCHRONOUS, [2, 0]),
    ],
)
def test_nobody_waits_when_a_serving_rank_is_lost_and_the_first_is_named(scheme: Scheme, lost: list[int]) -> None:
    """Have rank 1 take a step that needs another's, while these are lost in turn."""
    server, begin = server_of(scheme), threading.Barrier(2)

    def lose() -> None:
        begin.wait(FAR_S)
        for rank in lost:
            server.lose(rank, PeerLost([rank], rank=0, operation="serving parameters", has_left=False))

    thread = threading.Thread(target=lose)
    thread.start()
    begin.wait(FAR_S)
    push(server, 1)
    with pytest.raises(PeerLost) as caught:
        pull(server, 1)
    thread.join()
    assert caught.value.ranks == (2,)


@pytest.mark.parametrize("has_left", [False, True])
def test_a_quorum_that_is_lost_is_told_smaller_by_those_that_have_left(has_left: bool) -> None:
    server = server_of(SYNCHRONOUS)
    if has_left:
        server.perform(2, {"leave": True}, [])
    server.lose(1, PeerLost([1], rank=0, operation="serving parameters", has_left=False))
    push(server, 0)
    with pytest.raises(QuorumLost) as caught:
        pull(server, 0)
    assert (caught.value.ranks, caught.value.quorum) == ((1,), 3 - has_left)


def test_an_update_on_the_cpu_is_not_captured_in_a_graph() -> None:
    """As the settings of an optimizer on a GPU may want it, where also the learning rate may be a tensor."""
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([parameter], lr=torch.tensor(0.5), capturable=True)
    server = server_of(ALONE, optimizer=optimizer, workers=1)
    push(server, 0, torch.ones(3))
    version, (values,) = pull(server, 0)
    assert version == 1
    torch.testing.assert_close(values, torch.full((3,), -0.5))


@pytest.mark.parametrize(
    "scheme", [STORE, Scheme(quorum=1, grace_s=0.0, staleness=None, late="next", sums=True, reads_own=True)]
)
def test_pushes_without_a_pull_wait_for_their_updates_and_are_summed(scheme: Scheme) -> None:
    """Have worker 0 push twice before the others, and leave; whole numbers are added, too."""
    value = torch.zeros(2, dtype=torch.int64)
    server = Server(0, range(3), scheme, 0.0)
    server.add(key_of(value), [value])

    def add(worker: int, number: int) -> None:
        push(server, worker, torch.tensor([number, 1]))

    add(0, 1)
    add(0, 2)
    server.perform(0, {"leave": True}, [])
    for worker in (1, 2):
        add(worker, 10)
    if scheme.quorum == 1:
        assert pull(server, 1)[1][0].tolist() == [10, 1]
        assert server.counts().updates == 4
        return
    assert pull(server, 1)[1][0].tolist() == [21, 3]
    add(1, 20)
    with pytest.raises(CollectiveTimeout) as caught:
        pull(server, 1)
    assert caught.value.waiting_for == (2,)
    add(2, 30)
    version, (newest,) = pull(server, 1)
    assert (version, newest.tolist()) == (2, [52, 3])
    add(1, 5)
    add(2, 6)
    assert pull(server, 2, torch.tensor([0]))[1][0].tolist() == [11]  # of those that remain


class Pair:
    """Stands for one end of a Communicator of two ranks in one process. fails: is called before each message."""

    def __init__(self, inbox: queue.Queue[Any], outbox: queue.Queue[Any]) -> None:
        self.timeout_s = FAR_S
        self.closed = False
        self.fails: Callable[[], None] = lambda: None
        self._inbox, self._outbox = inbox, outbox

    def send(self, tensor: Tensor, dst: int) -> None:
        self.fails()
        self._outbox.put(tensor.clone())

    def recv(self, tensor: Tensor, src: int) -> None:
        self.fails()
        try:
            arrived = self._inbox.get(timeout=self.timeout_s)
        except queue.Empty:
            raise CollectiveTimeout(self.timeout_s, [src], rank=0, operation="recv") from None
        if arrived is None:
            raise PeerLost([src], rank=0, operation="recv", has_left=False)
        tensor.copy_(arrived)

    def close(self) -> None:
        self.closed = True
        self._outbox.put(None)


@contextmanager
def connected(server: Server, worker: int = 1) -> Iterator[tuple[Link, Pair, Pair]]:
    """Yield the Link of a worker on rank 7 to a server that serves it on another thread, and both ends of their pair."""
    one, other = queue.Queue[Any](), queue.Queue[Any]()
    near, far = Pair(one, other), Pair(other, one)
    thread = threading.Thread(target=serve, args=("the server", server, worker, far))
    thread.start()
    yield Link("the server", 7, 0, near), near, far  # type: ignore[arg-type]
    near.close()
    thread.join(FAR_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("is_local", [True, False])
def test_a_worker_pushes_and_pulls_here_and_elsewhere(is_local: bool) -> None:
    """Push what is absent, dense, and more than fits the first part of a message; pull all, and some rows."""
    values = [torch.zeros(4, 2) for _ in range(200)]
    server = Server(0, [0], ALONE, FAR_S)
    server.add(key := key_of(*values), values)
    with connected(server, worker=0) as (remote, *_):
        worker = Worker({0: LocalLink(server) if is_local else remote})
        worker.add(key)
        for step in (1.0, 2.0, 3.0):
            gradients: list[Tensor | None] = [torch.full((4, 2), step) for _ in values]
            if step == 2:
                gradients[1:] = [None] * (len(values) - 1)
            worker.push(key, gradients, pulls=step < 3)
            gradients[0].zero_()  # type: ignore[union-attr]  # it is the caller's again
            version, newest = worker.pull(key)
            assert version == step
            assert [each[0, 0].item() for each in newest] == [step, *[1.0 if step == 2 else step] * (len(values) - 1)]
        (counts,) = worker.counts()
        assert (counts.updates, counts.contributions, counts.staleness) == (3, {0: 3}, {0: 3})
        worker.refuse("because")
        with pytest.raises(CollectiveError, match="because"):
            worker.pull(key)
        remote.leave(0.0)


@pytest.mark.parametrize(
    ("error", "attributes"),
    [
        (CollectiveTimeout(3.0, [2], rank=0, operation="pull"), {"waiting_for": (2,), "seconds": 3.0}),
        (QuorumLost([1, 2], 3, rank=0, operation="pull"), {"ranks": (1, 2), "quorum": 3}),
        (
            PeerLost([2], rank=0, operation="pull", has_left=True, reasons={2: "it says so"}),
            {"ranks": (2,), "has_left": True},
        ),
        (MemoryError("no room"), {}),
    ],
)
def test_a_worker_raises_the_error_of_its_server_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, error: Exception, attributes: dict[str, Any]
) -> None:
    server = server_of(ALONE, workers=2)

    def fail() -> None:
        raise error

    with connected(server) as (link, near, far):
        with monkeypatch.context() as patched:
            patched.setattr(server, "counts", fail)
            link.request("report", {"counts": True})
            with pytest.raises(CollectiveError, match=r"^rank 7: report at the server on rank 0") as caught:
                link.answer("report")
        assert {name: getattr(caught.value, name) for name in attributes} == attributes
        assert isinstance(caught.value, type(error) if attributes else CollectiveError)
        link.request("report", {"counts": True})
        assert link.answer("report")[0]["lost"] == []
        link.leave(0.0)
        assert not near.closed
        assert not far.closed


def fail_by(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    "request_", [{"push": [5, 0, 1.0, None]}, {"push": [0, 0, 1.0, None]}], ids=["an unknown key", "no tensors"]
)
def test_a_server_that_fails_without_an_answer_due_loses_its_worker_and_closes(request_: dict[str, Any]) -> None:
    server = server_of(ALONE, workers=2)
    with connected(server) as (link, _, far):
        link.request("push", request_)
        link.request("report", {"counts": True})
        with pytest.raises(PeerLost):
            link.answer("report")
        assert far.closed
        assert server.counts().lost == (1,)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), PeerLost([1], rank=0, operation="recv", has_left=False)])
def test_the_communicator_ends_where_a_message_was_broken_off(error: BaseException) -> None:
    server = server_of(ALONE, workers=2)
    with connected(server) as (link, near, _):
        link.request("report", {"counts": True})
        near.fails = fail_by(error)
        with pytest.raises(type(error)) as caught:
            link.answer("report")
        if isinstance(caught.value, PeerLost):
            assert caught.value.ranks == (0,)
        near.fails = lambda: None
        link.leave(0.0)
        assert near.closed
    assert server.counts().lost == (1,)


def test_an_answer_that_is_due_is_not_waited_for_beyond_the_deadline() -> None:
    server = server_of(SYNCHRONOUS)
    with connected(server) as (link, near, _):
        link.request("push", {"push": [0, 0, 1.0, None], "pull": [0, False]}, [torch.ones(3)])
        assert link.is_answer_due
        link.leave(time.monotonic() + 0.1)
        assert near.closed
        server.perform(0, {"leave": True}, [])
        server.perform(2, {"leave": True}, [])  # so that the update is made, and the thread ends


def test_all_messages_of_a_step_have_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    server = server_of(ALONE, workers=2)
    now, given = 100.0, list[float]()
    with connected(server) as (link, near, _), monkeypatch.context() as patched:
        link.request("report", {"counts": True})
        patched.setattr(time, "monotonic", lambda: now)
        near.fails = lambda: given.append(near.timeout_s)
        link.answer("report", deadline=102.0)
        now = 101.5
        link.request("report", {"counts": True}, deadline=102.0)
        now = 103.0
        link.answer("report", deadline=102.0)  # what has arrived by then
        assert given[0] == 2.0
        assert given[1] == 0.5
        assert 0 < given[-1] < 0.1
        assert near.timeout_s == FAR_S


def test_settings_of_a_worker_are_used_from_the_next_update_on() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    server = server_of(ALONE, optimizer=optimizer, workers=2)
    with connected(server) as (link, *_):
        mine = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=torch.tensor(1.0), weight_decay=0.0)
        worker, key = Worker({0: link}, {0: mine}), key_of(parameter)
        worker.add(key)
        for lr, wanted in ((1.0, -1.0), (1.0, -2.0), (0.5, -2.5)):
            mine.param_groups[0]["lr"] = torch.tensor(lr)
            worker.push(key, [torch.ones(3)], pulls=True)
            assert worker.pull(key)[1][0].tolist() == [wanted] * 3
        mine.param_groups[0]["lr"] = [torch.zeros(2)]
        with pytest.raises(TypeError):
            worker.push(key, [torch.ones(3)])
        link.leave(0.0)
