"""Launches of matrices.cu: the functions of reference.matrices on a GPU.

What all ranks compute has the same bits as the reference. Each function launches one kernel for up to _MEMBERS matrices.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.collectives.kernels.cuda.launch import NUMBERS, THREADS, KernelLaunch

# The same as in matrices.cu and factors.cuh.
_MEMBERS = 448
_PIECE = 16 * THREADS
_ROWS, _COLUMNS = 8, 128
_BATCH = np.dtype(
    [
        ("tensors", "u8", _MEMBERS),
        *[(name, "u8") for name in ("errors", "left", "right")],
        *[(name, "i8") for name in ("rows", "columns")],
        *[(name, "i4") for name in ("rank", "blocks")],
    ]
)
_FACTORS = np.dtype(
    [
        *[(name, "u8") for name in ("vectors", "out", "room", "first", "errors")],
        *[(name, "i8") for name in ("length", "numel")],
        ("rank", "i4"),
    ],
    align=True,
)


class MatrixKernels:
    """Runs the arithmetic of powersgd."""

    def __init__(self, launch: KernelLaunch) -> None:
        self._launch = launch

    def powersgd_accumulate(self, errors: Tensor, tensors: Sequence[Tensor]) -> None:
        rows, columns = errors.shape[1:]
        kernel, blocks = f"accumulate<{NUMBERS[tensors[0].dtype]}>", -(-rows * columns // _PIECE)
        for begin in range(0, len(tensors), _MEMBERS):
            some = slice(begin, begin + _MEMBERS)
            self._work_through(kernel, blocks, tensors[some], errors=errors[some], rows=rows, columns=columns)

    def powersgd_orthonormalize(self, factors: Tensor) -> None:
        self._orthonormalize("orthonormalize<false>", factors, factors)

    def powersgd_subtract(self, left: Tensor, right: Tensor, errors: Tensor) -> None:
        self._multiply("multiply<float, true>", left, right, errors=errors)

    def powersgd_multiply(self, left: Tensor, right: Tensor, tensors: Sequence[Tensor]) -> None:
        kernel = f"multiply<{NUMBERS[tensors[0].dtype]}, false>"
        for begin in range(0, len(tensors), _MEMBERS):
            some = slice(begin, begin + _MEMBERS)
            self._multiply(kernel, left[some], right[some], tensors[some])

    def powersgd_begin_next(self, factors: Tensor, first: Tensor, basis: Tensor, errors: Tensor) -> None:
        numel = errors[0].numel()
        self._orthonormalize("orthonormalize<true>", factors, basis, first=first, errors=errors, numel=numel)

    def _multiply(
        self, kernel: str, left: Tensor, right: Tensor, tensors: Sequence[Tensor] = (), **errors: Tensor
    ) -> None:
        (_, rank, rows), columns = left.shape, right.shape[2]
        blocks = -(-(-(-rows // _ROWS) * -(-columns // _COLUMNS)) // (THREADS // 32))
        sizes = {"rank": rank, "rows": rows, "columns": columns}
        self._work_through(kernel, blocks, tensors, left=left, right=right, **errors, **sizes)

    def _work_through(self, kernel: str, blocks: int, tensors: Sequence[Tensor], **others: Tensor | int) -> None:
        """Launch `blocks` blocks for each matrix."""
        batch: NDArray[np.void] = np.zeros((), _BATCH)
        batch["tensors"][: len(tensors)] = [tensor.data_ptr() for tensor in tensors]
        touched = [*tensors, *_set(batch, blocks=blocks, **others)]
        matrices = len(tensors) or len(touched[0])
        self._launch("matrices", kernel, matrices * blocks, batch.tobytes(), touched)

    def _orthonormalize(self, kernel: str, vectors: Tensor, out: Tensor, **others: Tensor | int) -> None:
        batch, rank, length = vectors.shape
        room = torch.empty(vectors.shape, dtype=torch.float64, device=vectors.device)
        factors: NDArray[np.void] = np.zeros((), _FACTORS)
        touched = _set(factors, vectors=vectors, out=out, room=room, length=length, rank=rank, **others)
        self._launch("matrices", kernel, batch, factors.tobytes(), touched)


def _set(parameters: NDArray[np.void], **given: Tensor | int) -> list[Tensor]:
    """Set parameters of a kernel, of tensors their addresses. Return the tensors."""
    for name, value in given.items():
        parameters[name] = value.data_ptr() if isinstance(value, Tensor) else value
    return [value for value in given.values() if isinstance(value, Tensor)]
