"""The process group of the backend "gradwire", without processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from gradwire.collectives.torch_backend.group import GradwireGroup


class Cuda(torch.Tensor):
    """A tensor that claims to be on a GPU."""

    is_cuda = True


@pytest.mark.parametrize(
    ("verb", "older"),
    [
        ("all_gather_single", "_allgather_base"),
        ("all_to_all_single", "alltoall_base"),
        ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
        ("broadcast", "broadcast"),
    ],
)
@pytest.mark.parametrize("is_older", [False, True])
def test_nccl_is_called_by_the_name_that_this_torch_has(verb: str, older: str, is_older: bool) -> None:
    called = older if is_older else verb
    nccl = SimpleNamespace(**{called: lambda *tensors: f"{called} of {len(tensors)}"})
    group = cast(Any, SimpleNamespace(nccl=lambda device: nccl))
    tensor = torch.ones(1).as_subclass(Cuda)  # type: ignore[no-untyped-call]
    assert getattr(GradwireGroup, verb)(group, tensor, tensor) == f"{called} of 2"
    assert getattr(GradwireGroup, older) is getattr(GradwireGroup, verb)
