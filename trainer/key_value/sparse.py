"""Tensors of a caller, which may be sparse: made dense to be pushed, and filled with what is pulled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def is_sparse(tensor: Tensor) -> bool:
    """Return whether a tensor keeps its numbers in another way than one by one."""
    return tensor.layout is not torch.strided


def dense(tensor: Tensor) -> Tensor:
    """Return the tensor with all of its numbers, without a gradient."""
    tensor = tensor.detach()
    return tensor.to_dense() if is_sparse(tensor) else tensor


@torch.no_grad()
def fill(tensors: Sequence[Tensor], value: Tensor) -> None:
    """Copy a value into each of the tensors."""
    for tensor in tensors:
        tensor.copy_(value)


@torch.no_grad()
def fill_rows(tensor: Tensor, rows: Tensor, values: Tensor) -> None:
    """Write the values of some rows: a sparse tensor then consists of these; of a dense one the others are left alone."""
    if is_sparse(tensor):
        made = torch.sparse_coo_tensor(rows[None], values, tensor.shape, is_coalesced=True, check_invariants=False)
        tensor.copy_(made)
    else:
        tensor[rows.to(tensor.device)] = values.to(tensor.device)
