"""The process group of the backend "gradwire", without processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from gradwire.collectives.engine.point_to_point import MessageWork
from gradwire.collectives.errors import CollectiveError
from gradwire.collectives.torch_backend.group import GradwireGroup


class Cuda(torch.Tensor):
    """A tensor that claims to be on a GPU."""

    is_cuda = True


@pytest.mark.parametrize(
    ("verb", "older"),
    [("all_gather_single", "_allgather_base"), ("all_to_all_single", "alltoall_base"), ("broadcast", "broadcast")],
)
@pytest.mark.parametrize("is_older", [False, True])
def test_nccl_is_called_by_the_name_that_this_torch_has(verb: str, older: str, is_older: bool) -> None:
    called = older if is_older else verb
    nccl = SimpleNamespace(**{called: lambda *tensors: f"{called} of {len(tensors)}"})
    group = cast(Any, SimpleNamespace(nccl=lambda device: nccl))
    tensor = torch.ones(1).as_subclass(Cuda)  # type: ignore[no-untyped-call]
    assert getattr(GradwireGroup, verb)(group, tensor, tensor) == f"{called} of 2"
    assert getattr(GradwireGroup, older) is getattr(GradwireGroup, verb)


def test_a_message_of_a_broken_group_is_completed() -> None:
    """The thread that moves messages asks for this, and must survive that the group breaks meanwhile."""

    def fail(*_: Any) -> bool:
        raise CollectiveError("the group is broken", rank=0, operation="recv")

    operations = SimpleNamespace(usable=True, all_gone=lambda peers: False, try_message=fail)
    messages = cast(Any, SimpleNamespace(transport=SimpleNamespace(size=2, rank=0), operations=operations))
    assert MessageWork(
        messages, "recv", cast(Any, SimpleNamespace(flat=torch.ones(1))), 1, 0, sends=False
    ).is_completed()
