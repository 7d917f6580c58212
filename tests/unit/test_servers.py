"""What servers tell who waits there, what they do with what no worker says, and how a worker takes leave of them."""

import threading
import time
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from gradwire.collectives import CollectiveError, CollectiveTimeout, PeerLost
from gradwire.trainer.servers.aggregator import Scheme
from gradwire.trainer.servers.connection import QuorumLost
from gradwire.trainer.servers.pushed import Packing
from gradwire.trainer.servers.server import Key, Server
from gradwire.trainer.servers.serving import COUNTS, LEAVE, REFUSE, Client, Serving
from gradwire.trainer.servers.worker import PushPullWorker

FAR_S = 600.0  # longer than a test may take
SYNCHRONOUS = Scheme(quorum=3, grace_s=0.0, staleness=None, late="next")


STORE = Scheme(quorum=3, grace_s=0.0, staleness=None, late="next", sums=True, reads_own=True)


def key_of(*tensors: Tensor) -> Key:
    return Key("key 'w'", 0, 1, Packing(tensors, [None] * len(tensors)))


def server_of(
    scheme: Scheme, timeout_s: float = FAR_S, optimizer: torch.optim.Optimizer | None = None, workers: int = 3
) -> Server:
    """Return the server of rank 0, which serves three workers, as rank 2 does, with one key of zeros."""
    server = Server(0, range(workers), scheme, timeout_s, needed=(0, 2))
    value = torch.zeros(3) if optimizer is None else optimizer.param_groups[0]["params"][0]
    server.add(key_of(value), [value], optimizer, users=optimizer)
    return server


def exchange(server: Server, worker: int, *pushed: Tensor) -> tuple[int, list[Tensor]]:
    """Push these tensors, or nothing, and pull."""
    forms = torch.zeros(1, 2, dtype=torch.int64) if pushed else torch.tensor([[-1, 0]])
    server.push(worker, 0, [forms, *pushed], 0, 1.0)
    return server.pull(worker, 0)


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
    with pytest.raises(PeerLost) as caught:
        exchange(server, 1)
    thread.join()
    assert caught.value.ranks == (2,)


@pytest.mark.parametrize("has_left", [False, True])
def test_a_quorum_that_is_lost_is_told_smaller_by_those_that_have_left(has_left: bool) -> None:
    server = server_of(SYNCHRONOUS)
    if has_left:
        server.leave(2)
    server.lose(1, PeerLost([1], rank=0, operation="serving parameters", has_left=False))
    with pytest.raises(QuorumLost, match=f"fewer than the quorum of {3 - has_left}") as caught:
        exchange(server, 0)
    assert (caught.value.ranks, caught.value.quorum) == ((1,), 3 - has_left)


def test_who_holds_an_update_up_is_named() -> None:
    server = server_of(SYNCHRONOUS, timeout_s=0.0)
    with pytest.raises(CollectiveTimeout) as caught:
        exchange(server, 1)
    assert caught.value.waiting_for == (0, 2)


def test_an_update_on_the_cpu_is_not_captured_in_a_graph() -> None:
    """As the settings of an optimizer on a GPU may want it, where also the learning rate may be a tensor."""
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([parameter], lr=torch.tensor(0.5), capturable=True)
    alone = Scheme(quorum=1, grace_s=0.0, staleness=None, late="next")
    version, (values,) = exchange(server_of(alone, optimizer=optimizer, workers=1), 0, torch.ones(3))
    assert version == 1
    torch.testing.assert_close(values, torch.full((3,), -0.5))


@pytest.mark.parametrize(
    "scheme", [STORE, Scheme(quorum=1, grace_s=0.0, staleness=None, late="next", sums=True, reads_own=True)]
)
def test_pushes_without_a_pull_wait_for_their_updates_and_are_summed(scheme: Scheme) -> None:
    """Have worker 0 push twice before the others, and leave; whole numbers are added, too."""
    value = torch.zeros(2, dtype=torch.int64)
    server = Server(0, range(3), scheme, 0.0)
    server.add(key := key_of(value), [value])

    def push(worker: int, number: int) -> None:
        server.push(worker, 0, [key.packing.dense_forms(), torch.tensor([number, 1])], 0, 1.0)

    push(0, 1)
    push(0, 2)
    server.leave(0)
    for worker in (1, 2):
        push(worker, 10)
    if scheme.quorum == 1:
        assert server.pull(1, 0)[1][0].tolist() == [10, 1]
        assert server.counts().updates == 4
        return
    assert server.pull(1, 0)[1][0].tolist() == [21, 3]
    push(1, 20)
    with pytest.raises(CollectiveTimeout) as caught:
        server.pull(1, 0)
    assert caught.value.waiting_for == (2,)
    push(2, 30)
    version, (newest,) = server.pull(1, 0)
    assert (version, newest.tolist()) == (2, [52, 3])
    push(1, 5)
    push(2, 6)
    assert server.pull(2, 0, torch.tensor([0]))[1][0].tolist() == [11]  # of those that remain


def pair_of(receives: Any) -> Mock:
    """Return what stands for a Communicator of a worker and its server. receives: the error that receiving raises, or a function
    that fills a tensor."""
    return Mock(**{"recv.side_effect": receives})


def kinds_sent(pair: Mock) -> list[int]:
    return [int(call.args[0][0]) for call in pair.send.call_args_list]


def lost_by(pair: Mock, **methods: Any) -> CollectiveError:
    """Return the error with which a server removes worker 1."""
    served = Mock(rank=0, **methods)
    assert Serving("server", served, {1: pair}).join(time.monotonic() + FAR_S)
    ((worker, error),) = [call.args for call in served.lose.call_args_list]
    assert worker == 1
    return error


def test_a_server_that_fails_lets_its_worker_know_by_closing() -> None:
    pair = pair_of(lambda tensor, rank: tensor.fill_(COUNTS))
    pair.send.side_effect = ZeroDivisionError
    assert isinstance(lost_by(pair).__cause__, ZeroDivisionError)
    assert pair.close.called


def test_a_kind_that_nobody_says_is_not_taken_for_another() -> None:
    pair = pair_of(lambda tensor, rank: tensor.fill_(REFUSE + 1))
    assert isinstance(lost_by(pair).__cause__, ValueError)
    assert not pair.send.called


def test_a_server_that_loses_a_worker_keeps_the_error_of_their_communicator() -> None:
    late = CollectiveTimeout(3.0, [0], rank=1, operation="recv", detail="rank 0 is in load()")
    error = lost_by(pair_of(late))
    assert isinstance(error, CollectiveTimeout)
    assert (error.waiting_for, error.__cause__) == ((1,), late)


def test_a_worker_says_that_it_leaves() -> None:
    client = Client("the server", 3, 1, pair := pair_of(RuntimeError()))
    key = key_of(torch.zeros(2))
    client.push(key, [key.packing.dense_forms(), torch.ones(2)], 0)
    client.leave()
    assert (kinds_sent(pair)[-1], pair.close.called) == (LEAVE, False)


def test_all_servers_together_have_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the first of two servers answer when almost all time has passed."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    given: list[float] = []
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    clients = []
    for number, parameter in enumerate(parameters):
        pair = Mock(timeout_s=FAR_S)

        def receive(tensor: Tensor, rank: int, pair: Mock = pair) -> None:
            nonlocal now
            given.append(pair.timeout_s)
            tensor.zero_()
            now += 3.0

        pair.recv.side_effect = receive
        clients.append((Client("the server", 2, number, pair), key_of(parameter), [number]))
    PushPullWorker(2, parameters, clients, timeout_s=8.0).step([None, None], 1.0, None)
    assert given == [8.0, 8.0, 2.0, 2.0]  # the head of each answer, and the parameters
    assert pair.timeout_s == FAR_S


@pytest.mark.parametrize("error", [KeyboardInterrupt(), PeerLost([1], rank=0, operation="recv", has_left=False)])
def test_the_communicator_ends_where_an_answer_was_broken_off(error: BaseException) -> None:
    client = Client("the server", 3, 1, pair := pair_of(error))
    with pytest.raises(type(error)) as caught:
        client.counts()
    client.leave()
    assert (LEAVE in kinds_sent(pair), pair.close.called) == (False, True)
    if isinstance(caught.value, PeerLost):
        assert "rank 3: report at the server on rank 1: lost rank 1" in str(caught.value)
