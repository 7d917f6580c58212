"""The codec powersgd: vectors made orthonormal, and the product of two factors."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.collectives.kernels.reference.blocks import block_sums

#: A vector of which so little is left once others are taken away from it is rounding errors: in squares of norms.
LOST = 1e-12


def powersgd_orthonormalize(vectors: Tensor) -> None:
    """Make the vectors of each set, (batch, rank, length) float32 and contiguous, orthonormal, in place.

    Modified Gram-Schmidt in float64, in the order of the vectors, sums in the order of reference.block_sums. A vector
    that lies in the span of those before it becomes zero. A set that is not finite becomes NaN somewhere.
    """
    done: list[Tensor] = []
    for vector in vectors.to(torch.float64).unbind(1):
        left = vector
        for other in done:
            left = left - block_sums(other * left) * other
        before, after = block_sums(vector * vector), block_sums(left * left)
        lost = (after <= LOST * before) & (before < float("inf"))
        done.append(torch.where(lost, torch.zeros_like(left), left / after.sqrt()))
    vectors.copy_(torch.stack(done, 1))


def powersgd_multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Set out (rows, columns) to the transpose of left (rank, rows) times right (rank, columns), all contiguous.

    The products are added in the order of the rank, each rounded: the same bits on every machine.
    """
    out.copy_(left[0][:, None] * right[0])
    for p, q in zip(left[1:], right[1:], strict=True):
        out.add_(p[:, None] * q)
