"""What the sparse codecs have in common: numbers with their indices in a wire, and what a residual becomes."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.collectives.kernels.wire import pad16


def _one_nan(numbers: Tensor) -> Tensor:
    return torch.where(numbers.isnan(), torch.full_like(numbers, float("nan")), numbers)


def write_entries(wire: Tensor, entries: int, indices: Tensor, values: Tensor) -> None:
    """Write indices and values into a wire with room for so many entries."""
    wire.zero_()
    section = pad16(4 * entries)
    wire[:section].view(torch.int32)[: len(indices)] = indices.to(torch.int32)
    wire[section:].view(torch.float32)[: len(values)] = _one_nan(values)


def read_entries(wire: Tensor, entries: int, count: int) -> tuple[Tensor, Tensor]:
    section = pad16(4 * entries)
    return wire[:section].view(torch.int32)[:count].to(torch.int64), wire[section:].view(torch.float32)[:count]


def put_entries(out: Tensor, indices: Tensor, values: Tensor, add: bool, scale: float) -> None:
    if not add:
        out.zero_()
    out[indices] += values * scale


def keep_unsent(residual: Tensor | None, c: Tensor, sent: Tensor) -> None:
    """Set the residual to c, without what was sent and what is not finite."""
    if residual is not None:
        residual.copy_(torch.where(c.isfinite(), c, torch.zeros_like(c)))
        residual[sent] = 0
