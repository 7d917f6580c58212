"""Launches of matrices.cu: the functions of reference.matrices on a GPU.

What all ranks compute has the same bits as the reference. Each function launches one kernel for up to _MEMBERS matrices.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.collectives.kernels.cuda.launch import NUMBERS, THREADS, KernelLaunch

# The same as in matrices.cu and factors.cuh.
_MEMBERS = 448
_PIECE = 16 * THREADS
_ROWS, _COLUMNS = 8, 128
_BATCH = "3P2q2i"  # before the addresses of tensors
_BATCH_BYTES = struct.calcsize(f"{_BATCH}{_MEMBERS}P")
_FACTORS = struct.Struct("5P2qi4x")


class MatrixKernels:
    """Runs the arithmetic of powersgd."""

    def __init__(self, launch: KernelLaunch) -> None:
        self._launch = launch

    def powersgd_accumulate(self, errors: Tensor, tensors: Sequence[Tensor]) -> None:
        rows, columns = errors.shape[1:]
        kernel, blocks = f"accumulate<{NUMBERS[tensors[0].dtype]}>", -(-rows * columns // _PIECE)
        for begin in range(0, len(tensors), _MEMBERS):
            some = slice(begin, begin + _MEMBERS)
            self._launch_batch(kernel, blocks, 0, rows, columns, tensors[some], errors=errors[some])

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
        self._orthonormalize("orthonormalize<true>", factors, basis, first, errors)

    def _multiply(
        self, kernel: str, left: Tensor, right: Tensor, tensors: Sequence[Tensor] = (), errors: Tensor | None = None
    ) -> None:
        (_, rank, rows), columns = left.shape, right.shape[2]
        warps = -(-rows // _ROWS) * -(-columns // _COLUMNS)
        blocks = -(-warps // (THREADS // 32))
        self._launch_batch(kernel, blocks, rank, rows, columns, tensors, errors=errors, left=left, right=right)

    def _launch_batch(
        self,
        kernel: str,
        blocks: int,
        rank: int,
        rows: int,
        columns: int,
        tensors: Sequence[Tensor],
        *,
        errors: Tensor | None = None,
        left: Tensor | None = None,
        right: Tensor | None = None,
    ) -> None:
        """Launch a kernel with that many blocks for each matrix."""
        floats = (errors, left, right)
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in floats]
        members = [tensor.data_ptr() for tensor in tensors]
        parameters = struct.pack(f"{_BATCH}{len(members)}P", *addresses, rows, columns, rank, blocks, *members)
        present = [tensor for tensor in floats if tensor is not None]
        grid = len(present[0]) * blocks
        self._launch("matrices", kernel, grid, parameters.ljust(_BATCH_BYTES, b"\0"), [*present, *tensors])

    def _orthonormalize(
        self, kernel: str, vectors: Tensor, out: Tensor, first: Tensor | None = None, errors: Tensor | None = None
    ) -> None:
        batch, rank, length = vectors.shape
        tensors = (vectors, out, torch.empty(vectors.shape, dtype=torch.float64, device=vectors.device), first, errors)
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        numel = 0 if errors is None else errors[0].numel()
        parameters = _FACTORS.pack(*addresses, length, numel, rank)
        present = [tensor for tensor in tensors if tensor is not None]
        self._launch("matrices", kernel, batch, parameters, present)
