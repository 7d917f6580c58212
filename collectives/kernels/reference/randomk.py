"""The codec randomk: numbers at indices that are drawn from a seed."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.collectives.kernels.reference.blocks import corrected
from gradwire.collectives.kernels.reference.entries import keep_unsent, put_entries
from gradwire.collectives.kernels.reference.randomness import random_bits


def randomk_indices(n: int, k: int, seed: int, device: torch.device) -> Tensor:
    """Return (k,) indices: n places on a ring are divided into k parts, and one is drawn from each.

    With u(j) the 32 random bits of index j: the ring begins at floor(u(k) * n / 2^32), so that every index is drawn
    with the same probability, k / n; part j is [floor(j * n / k), floor((j + 1) * n / k)), of which element floor(u(j)
    * length / 2^32) is taken.
    """
    random = random_bits(k + 1, seed, device)
    ends = torch.arange(k + 1, device=device) * n // max(k, 1)
    drawn = ends[:-1] + (random[:-1] * ends.diff() >> 32) + (random[-1] * n >> 32)
    return torch.where(drawn < n, drawn, drawn - n)


def randomk_encode(values: Tensor, residual: Tensor | None, wire: Tensor, k: int, seed: int) -> None:
    """Send the numbers at randomk_indices, in that order; all NaN if any number, sent or not, is not finite."""
    c = corrected(values, residual)
    sent = randomk_indices(len(c), k, seed, c.device)
    wire.zero_()
    wire.view(torch.float32)[:k] = c[sent] if c.isfinite().all() else torch.full((k,), float("nan"), device=c.device)
    keep_unsent(residual, c, sent)


def randomk_decode(wire: Tensor, out: Tensor, k: int, seed: int, add: bool, scale: float) -> None:
    put_entries(out, randomk_indices(len(out), k, seed, out.device), wire.view(torch.float32)[:k], add, scale)
