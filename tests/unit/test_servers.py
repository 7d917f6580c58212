"""What servers tell who waits there, what they do with what no worker says, and how a worker takes leave of them."""

import threading
import time
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from gradwire.collectives import CollectiveError, CollectiveTimeout, PeerLost
from gradwire.trainer.gradients.compression import Policy
from gradwire.trainer.servers import messages
from gradwire.trainer.servers.aggregator import Scheme
from gradwire.trainer.servers.connection import QuorumLost
from gradwire.trainer.servers.key_value.keys import Entry, KeySpec
from gradwire.trainer.servers.key_value.messages import ROWS, RemoteKeys
from gradwire.trainer.servers.key_value.messages import answer as key_answer
from gradwire.trainer.servers.messages import REFUSE
from gradwire.trainer.servers.pushed import Packing
from gradwire.trainer.servers.serving import LEAVE, OWN, Serving
from gradwire.trainer.servers.updater import Updater
from gradwire.trainer.servers.worker import PushPullWorker

FAR_S = 600.0  # longer than a test may take
SYNCHRONOUS = Scheme(quorum=3, grace_s=0.0, staleness=None, late="next")


def updater_of(scheme: Scheme, timeout_s: float = FAR_S) -> Updater:
    """Return the updater of rank 0, which serves three workers, as rank 2 does."""
    parameter = nn.Parameter(torch.zeros(3))
    return Updater(0, range(3), (0, 2), [parameter], torch.optim.SGD([parameter], lr=1.0), scheme, timeout_s)


@pytest.mark.parametrize(
    ("scheme", "lost"),
    [
        (Scheme(quorum=1, grace_s=0.0, staleness=0, late="next"), [2]),  # rank 1 would wait for rank 0 by the bound
        (SYNCHRONOUS, [2, 0]),
    ],
)
def test_nobody_waits_when_a_serving_rank_is_lost_and_the_first_is_named(scheme: Scheme, lost: list[int]) -> None:
    """Have rank 1 take a step that needs another's, while these are lost in turn."""
    updater, begin = updater_of(scheme), threading.Barrier(2)

    def lose() -> None:
        begin.wait(FAR_S)
        for rank in lost:
            updater.lose(rank, PeerLost([rank], rank=0, operation="serving parameters", has_left=False))

    thread = threading.Thread(target=lose)
    thread.start()
    begin.wait(FAR_S)
    with pytest.raises(PeerLost) as caught:
        updater.exchange(1, 0, 1.0, [None])
    thread.join()
    assert caught.value.ranks == (2,)


@pytest.mark.parametrize("has_left", [False, True])
def test_a_quorum_that_is_lost_is_told_smaller_by_those_that_have_left(has_left: bool) -> None:
    updater = updater_of(SYNCHRONOUS)
    if has_left:
        updater.leave(2)
    updater.lose(1, PeerLost([1], rank=0, operation="serving parameters", has_left=False))
    with pytest.raises(QuorumLost, match=f"fewer than the quorum of {3 - has_left}") as caught:
        updater.exchange(0, 0, 1.0, [None])
    assert (caught.value.ranks, caught.value.quorum) == ((1,), 3 - has_left)


def test_who_holds_an_update_up_is_named() -> None:
    updater = updater_of(SYNCHRONOUS, timeout_s=0.0)
    with pytest.raises(CollectiveTimeout) as caught:
        updater.exchange(1, 0, 1.0, [None])
    assert caught.value.waiting_for == (0, 2)


def test_an_update_on_the_cpu_is_not_captured_in_a_graph() -> None:
    """As the settings of an optimizer on a GPU may want it, where also the learning rate may be a tensor."""
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([parameter], lr=torch.tensor(0.5), capturable=True)
    alone = Scheme(quorum=1, grace_s=0.0, staleness=None, late="next")
    updater = Updater(0, range(1), (0,), [parameter], optimizer, alone, FAR_S)
    version, (values,) = updater.exchange(0, 0, 1.0, [torch.ones(3)])
    assert version == 1
    torch.testing.assert_close(values, torch.full((3,), -0.5))


def test_the_quorum_of_a_key_that_is_lost_is_smaller_by_those_that_have_left() -> None:
    entry = Entry(KeySpec("w", 0, torch.Size([2]), torch.float32, 0), torch.zeros(2), range(3), SYNCHRONOUS)
    entry.leave(2)
    entry.lose(1)
    entry.push(0, torch.ones(2))
    with pytest.raises(QuorumLost, match="fewer than the quorum of 2") as caught:
        entry.pull(0, None, 60.0, 0)
    assert (caught.value.ranks, caught.value.quorum) == ((1,), 2)


def test_a_kind_that_nobody_says_is_not_taken_for_another() -> None:
    nothing: Any = None
    for answer, last in ((partial(messages.answer, nothing, nothing), REFUSE), (partial(key_answer, nothing), ROWS)):
        with pytest.raises(ValueError, match=f"rank 3 sent {last + 1}, which is n.* PUSH"):
            answer(3, nothing, last + 1, [0.0, 0.0, 0.0])


def pair_of(receives: Any) -> Mock:
    """Return what stands for a Communicator of a worker and its server. receives: the error that receiving raises, or a function
    that fills a tensor."""
    return Mock(**{"recv.side_effect": receives})


def kinds_sent(pair: Mock) -> list[int]:
    return [int(call.args[0][0]) for call in pair.send.call_args_list]


def lost_by(pair: Mock, answer: Mock) -> CollectiveError:
    """Return the error with which a server removes worker 1."""
    served = Mock(rank=0)
    assert Serving("server", served, answer, {1: pair}).join(time.monotonic() + FAR_S)
    ((worker, error),) = [call.args for call in served.lose.call_args_list]
    assert worker == 1
    return error


def test_a_server_that_fails_lets_its_worker_know_by_closing() -> None:
    pair = pair_of(lambda tensor, rank: tensor.fill_(OWN))
    error = lost_by(pair, Mock(side_effect=ZeroDivisionError))
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert pair.close.called


def test_a_server_that_loses_a_worker_keeps_the_error_of_their_communicator() -> None:
    late = CollectiveTimeout(3.0, [0], rank=1, operation="recv", detail="rank 0 is in load()")
    error = lost_by(pair_of(late), Mock())
    assert isinstance(error, CollectiveTimeout)
    assert (error.waiting_for, error.__cause__) == ((1,), late)


def test_a_worker_says_that_it_leaves() -> None:
    client = RemoteKeys(3, 1, pair := pair_of(RuntimeError()))
    client.push(KeySpec("w", 0, torch.Size([2]), torch.float32, 1), torch.ones(2), None)
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
        packing = Packing(["name"], [parameter], Policy("none"))
        clients.append((messages.RemoteUpdater(2, number, packing, pair), [number]))
    PushPullWorker(2, parameters, clients, timeout_s=8.0).step([None, None], 1.0, None)
    assert given == [8.0, 8.0, 2.0, 2.0]  # the head of each answer, and the parameters
    assert pair.timeout_s == FAR_S


@pytest.mark.parametrize("error", [KeyboardInterrupt(), PeerLost([1], rank=0, operation="recv", has_left=False)])
def test_the_communicator_ends_where_an_answer_was_broken_off(error: BaseException) -> None:
    client = RemoteKeys(3, 1, pair := pair_of(error))
    with pytest.raises(type(error)) as caught:
        client.counts()
    client.leave()
    assert (LEAVE in kinds_sent(pair), pair.close.called) == (False, True)
    if isinstance(caught.value, PeerLost):
        assert "rank 3: report at the server on rank 1: lost rank 1" in str(caught.value)
