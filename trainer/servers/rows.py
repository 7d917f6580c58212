"""Gradients at a server, dense or sparse: what is sent of a sparse one, and sums of several."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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


def weighted_sum(gradients: Sequence[tuple[Tensor | None, float]], dtype: torch.dtype) -> Tensor | None:
    """Return the sum of gradients of one shape times their factors, in their order, as a tensor of a floating-point dtype.

    None counts as zeros; if all are None, the sum is None. It is sparse and coalesced if all others are sparse. Numbers are
    added in float32 or wider.
    """
    present = [(gradient, factor) for gradient, factor in gradients if gradient is not None]
    if not present:
        return None
    shape, wide = present[0][0].shape, torch.promote_types(dtype, torch.float32)
    dimensions = {gradient.sparse_dim() if gradient.is_sparse else 0 for gradient, _ in present}
    if len(dimensions) == 1 and 0 not in dimensions:
        indices = torch.cat([gradient.indices() for gradient, _ in present], 1)
        values = torch.cat([gradient.values().to(wide) * factor for gradient, factor in present])
        return (
            torch.sparse_coo_tensor(indices, values, shape, device="cpu", check_invariants=False).coalesce().to(dtype)
        )
    total = torch.zeros(shape, dtype=wide, device="cpu")
    for gradient, factor in present:
        total.add_(gradient.to(wide), alpha=factor)
    return total.to(dtype)
