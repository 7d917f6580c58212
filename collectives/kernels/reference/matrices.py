"""The arithmetic of powersgd in plain torch, on a batch: matrices of one shape, (rows, columns).

errors: (batch, rows, columns). Factors: (batch, rank, length), of which left factors have one number for each row, and right
factors one for each column; torch multiplies these several times faster than their transposes. Both are float32 and contiguous.
tensors: for each matrix a contiguous tensor of rows * columns numbers, all of one dtype: float32, bfloat16 or float16.

All ranks orthonormalise and multiply the same sums, and must get the same bits. So every other kernel does this in the same
order, and rounds each operation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.collectives.kernels.reference.blocks import block_sums

#: A vector is mere rounding errors if at most this share of its squared norm remains after the projections.
LOST = 1e-12


def powersgd_accumulate(errors: Tensor, tensors: Sequence[Tensor]) -> None:
    """Add each tensor to its error."""
    for error, tensor in zip(errors, tensors, strict=True):
        error.add_(tensor.view(error.shape))


def powersgd_orthonormalize(factors: Tensor) -> None:
    """Make the vectors of each matrix orthonormal, in place.

    Use modified Gram-Schmidt in float64, in the order of the vectors, with sums in the order of blocks.block_sums. A vector
    in the span of earlier vectors becomes zero. If vectors have numbers that are not finite, some of them become NaN.
    """
    done: list[Tensor] = []
    for vector in factors.to(torch.float64).unbind(1):
        left = vector
        for other in done:
            left = left - block_sums(other * left) * other
        before, after = block_sums(vector * vector), block_sums(left * left)
        lost = (after <= LOST * before) & (before < float("inf"))
        done.append(torch.where(lost, torch.zeros_like(left), left / after.sqrt()))
    factors.copy_(torch.stack(done, 1))


def powersgd_subtract(left: Tensor, right: Tensor, errors: Tensor) -> None:
    """Subtract the product of each matrix, the transpose of its left factor times its right one, from its error. The order of
    operations is free, since only this rank has the errors."""
    errors.baddbmm_(left.transpose(1, 2), right, alpha=-1)


def powersgd_multiply(left: Tensor, right: Tensor, tensors: Sequence[Tensor]) -> None:
    """Set each tensor to its product, rounded once more if the tensor is not float32. Add in the order of the vectors."""
    for p, q, tensor in zip(left, right, tensors, strict=True):
        product = p[0][:, None] * q[0]
        for column, row in zip(p[1:], q[1:], strict=True):
            product.add_(column[:, None] * row)
        tensor.view(product.shape).copy_(product)


def powersgd_begin_next(factors: Tensor, first: Tensor, basis: Tensor, errors: Tensor) -> None:
    """Set `basis` to the orthonormal vectors of the factors, with the vector of `first` for one in the span of earlier vectors.

    If a factor has numbers that are not finite, its basis becomes `first`, and its error zero.
    """
    finite = factors.isfinite().all(2).all(1)[:, None, None]
    errors.masked_fill_(~finite, 0)
    basis.copy_(factors)
    powersgd_orthonormalize(basis)
    basis.copy_(torch.where(basis.any(2, keepdim=True) & finite, basis, first))
