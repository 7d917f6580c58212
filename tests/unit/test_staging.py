"""Buffers: what they share with the tensors, and what store() brings back."""

import pytest
import torch

from gradwire.collectives.engine.buffers import Buffer


def of_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.arange(6.0)


LAYOUTS = {
    "contiguous": lambda: [torch.arange(6.0).view(2, 3)],
    "strided": lambda: [torch.arange(6.0).view(2, 3).T],
    "several": lambda: [torch.arange(4.0), torch.empty(0), torch.arange(6.0).view(2, 3).T],
    "empty": lambda: [torch.empty(0, 3)],
    "one element of stride 2": lambda: [torch.arange(4.0)[::2][:1]],
    "negated": lambda: [torch._neg_view(torch.arange(6.0))],
    "negated and strided": lambda: [torch._neg_view(torch.arange(6.0).view(2, 3).T)],
    "several, one negated": lambda: [torch.arange(4.0), torch._neg_view(torch.arange(6.0))],
    "of inference mode": lambda: [of_inference_mode()],
    "negated, of inference mode": lambda: [torch._neg_view(of_inference_mode())],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fill", [True, False])
def test_flat_holds_the_tensors_and_store_brings_it_back(layout: str, fill: bool) -> None:
    tensors = LAYOUTS[layout]()
    elements = torch.cat([tensor.reshape(-1) for tensor in tensors])
    buffer = Buffer(tensors, fill=fill)
    assert buffer.flat.stride() == (1,)
    assert not buffer.flat.is_neg()
    assert not buffer.flat.is_inference()
    if fill:
        assert torch.equal(buffer.flat, elements)
    buffer.flat.copy_(elements + 1)
    buffer.store()
    assert torch.equal(torch.cat([tensor.reshape(-1) for tensor in tensors]), elements + 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_expendable_shares_nothing(layout: str) -> None:
    tensors = LAYOUTS[layout]()
    before = [tensor.clone() for tensor in tensors]
    Buffer(tensors).expendable().zero_()
    assert all(map(torch.equal, tensors, before))


def test_one_contiguous_tensor_is_not_copied() -> None:
    tensor = torch.ones(2, 3, requires_grad=True)
    flat = Buffer([tensor]).flat
    assert flat.data_ptr() == tensor.data_ptr()
    assert not flat.requires_grad
