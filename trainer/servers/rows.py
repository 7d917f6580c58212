"""Gradients at a server, dense or sparse: what is sent of a sparse one, and sums of several."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.collectives.sparse import added

ABSENT, DENSE = -1, 0


def form_of(gradient: Tensor | None) -> list[int]:
    """Return the form of a gradient: its number of sparse dimensions, or DENSE, or ABSENT for None; and its number of rows, if
    it is sparse."""
    if gradient is None:
        return [ABSENT, 0]
    return [gradient.sparse_dim(), gradient._nnz()] if gradient.is_sparse else [DENSE, 0]


def coalesced(gradient: Tensor | None) -> Tensor | None:
    """Return a gradient detached from the autograd graph, and coalesced if it is sparse; None for None."""
    if gradient is None:
        return None
    gradient = gradient.detach()
    return gradient.coalesce() if gradient.is_sparse else gradient


def of_rows(indices: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    """Return the coalesced sparse tensor of these indices and values."""
    return torch.sparse_coo_tensor(indices, values, shape, device="cpu", is_coalesced=True, check_invariants=False)


def weighted_sum(tensors: Sequence[tuple[Tensor | None, float]], dtype: torch.dtype) -> Tensor | None:
    """Return the sum of tensors of one shape times their factors, in their order, as a tensor of dtype. A single dense tensor
    with factor 1 is returned without a copy.

    None counts as zeros; if all are None, the sum is None. It is sparse and coalesced if all others are sparse. Floating-point
    numbers are added in float32 or wider. For integers, all factors must be 1.
    """
    present = [(tensor, factor) for tensor, factor in tensors if tensor is not None]
    if not present:
        return None
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    dimensions = {tensor.sparse_dim() if tensor.is_sparse else 0 for tensor, _ in present}
    if len(dimensions) == 1 and 0 not in dimensions:
        shape = present[0][0].shape
        indices = torch.cat([tensor.indices() for tensor, _ in present], 1)
        values = torch.cat([tensor.values().to(wide) * factor for tensor, factor in present])
        return added(indices, values, shape).to(dtype)
    (first, factor), *others = present
    first = first.to_dense() if first.is_sparse else first
    if not others and factor == 1:
        return first.to(dtype)
    total = first.to(wide, copy=True)
    if factor != 1:
        total.mul_(factor)
    for tensor, factor in others:
        total.add_(tensor.to(wide), alpha=1 if factor == 1 else factor)
    return total.to(dtype)
