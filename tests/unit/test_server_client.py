"""How a worker takes leave of a server on another rank: by a message, or where one was broken off, by ending the Communicator."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from gradwire.collectives import Communicator, PeerLost
from gradwire.trainer.servers.key_value.keys import KeySpec
from gradwire.trainer.servers.key_value.messages import RemoteKeys
from gradwire.trainer.servers.serving import LEAVE, Client

SPEC = KeySpec("w", 0, torch.Size([2]), torch.float32, 1)


class Pair:
    """Stands for a Communicator of a worker and its server, in which receiving raises an error."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.sent: list[int] = []
        self.is_closed = False

    def send(self, tensor: Tensor, rank: int) -> None:
        self.sent.append(int(tensor[0]))

    def recv(self, tensor: Tensor, rank: int) -> None:
        raise self.error

    def close(self) -> None:
        self.is_closed = True


def client_of(pair: Any) -> RemoteKeys:
    return RemoteKeys(3, 1, cast(Communicator, pair))


def test_a_worker_says_that_it_leaves() -> None:
    client = client_of(pair := Pair(RuntimeError()))
    client.push(SPEC, torch.ones(2), None)
    client.leave()
    assert (pair.sent[-1], pair.is_closed) == (LEAVE, False)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), PeerLost([1], rank=0, operation="recv", has_left=False)])
def test_the_communicator_ends_where_an_answer_was_broken_off(error: BaseException) -> None:
    client: Client = client_of(pair := Pair(error))
    with pytest.raises(type(error)) as caught:
        client.counts()
    client.leave()
    assert (LEAVE in pair.sent, pair.is_closed) == (False, True)
    if isinstance(caught.value, PeerLost):
        assert "rank 3: report at the server on rank 1: lost rank 1" in str(caught.value)
