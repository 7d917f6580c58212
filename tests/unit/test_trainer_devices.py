"""What groups of tensors are refused for lying on several devices; the meta device stands for a GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gradwire as hvd
from gradwire.trainer.reducer import arguments


@pytest.mark.parametrize(
    "verb",
    [
        hvd.grouped_allreduce,
        hvd.grouped_allreduce_,
        hvd.grouped_allreduce_async,
        hvd.grouped_allreduce_async_,
        hvd.grouped_allgather,
        hvd.grouped_allgather_async,
        hvd.grouped_reducescatter,
        hvd.grouped_reducescatter_async,
    ],
)
def test_a_group_on_two_devices(verb: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "refusal", lambda tensor: None)
    hvd.init()
    try:
        with pytest.raises(
            ValueError, match=r"needs all tensors on one device; given are some on cpu and on meta.*name='a'"
        ):
            verb([torch.ones(2), torch.ones(2, device="meta")], name="a")
        assert hvd.allreduce(torch.ones(2), name="a").tolist() == [1, 1]
    finally:
        hvd.shutdown()
