"""An entry of a key-value store: what is told where too few workers are left for another update."""

from __future__ import annotations

import pytest
import torch

from gradwire.trainer.servers.aggregator import Scheme
from gradwire.trainer.servers.connection import QuorumLost
from gradwire.trainer.servers.key_value.keys import Entry, KeySpec


def test_the_quorum_that_is_lost_is_smaller_by_those_that_have_left() -> None:
    spec = KeySpec("w", 0, torch.Size([2]), torch.float32, 0)
    entry = Entry(spec, torch.zeros(2), range(3), Scheme(quorum=3, grace_s=0.0, staleness=None, late="next"))
    entry.leave(2)
    entry.lose(1)
    entry.push(0, torch.ones(2))
    with pytest.raises(QuorumLost, match="fewer than the quorum of 2") as caught:
        entry.pull(0, None, 60.0, 0)
    assert (caught.value.ranks, caught.value.quorum) == ((1,), 2)
