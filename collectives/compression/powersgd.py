"""Low-rank matrices: two thin factors are summed over the ranks instead of the gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from gradwire.collectives.compression.codec import NUMBERS, MatrixCodec, MatrixState
from gradwire.collectives.kernels import kernels_for

#: A tensor is compressed if it has at least this many times as many numbers as its factors.
_LEAST_GAIN = 2


@dataclass(frozen=True)
class PowerSGD(MatrixCodec):
    """Matrices as products P Q^T of rank `rank`, by one step of power iteration, which begins with the previous Q (Vogels
    et al. 2019, algorithms 1 and 2).

    PowerSGD does not encode single buffers: ranks sum P, then Q. So it has no encode and decode, but a state whose `exchange`
    yields the tensors to sum. A tensor of two or more dimensions is treated as a matrix: the first dimension gives the rows,
    and all others together give the columns. If it has fewer than 2 * rank * (rows + columns) numbers, it is summed
    uncompressed.

    Biased, with its own error feedback. Contraction: delta is the part of the matrix's squared Frobenius norm that lies in
    the span of P. If the gradient changes slowly, delta approaches the sum of the squares of the matrix's `rank` largest
    singular values, divided by the sum of the squares of all of them. seed: the seed of the random Q with which the first step
    begins.
    """

    name: ClassVar[str] = "powersgd"
    rank: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"powersgd: rank must be at least 1, not {self.rank}")

    def compresses(self, shape: Sequence[int]) -> bool:
        """Return whether a tensor of that shape is sent as factors."""
        if len(shape) < 2 or shape[0] == 0:
            return False
        rows, columns = shape[0], math.prod(shape[1:])
        return _LEAST_GAIN * self.rank * (rows + columns) <= rows * columns

    def wire_bytes(self, shapes: Sequence[Sequence[int]]) -> int:
        return 4 * sum(
            self.rank * (shape[0] + math.prod(shape[1:])) if self.compresses(shape) else math.prod(shape)
            for shape in shapes
        )

    def new_state(self, shapes: Sequence[Sequence[int]], device: torch.device) -> PowerSGDState:
        return PowerSGDState(self, shapes, device)


class _Batch:
    """Matrices of one shape.

    members: the indices of the matrices among the tensors. error: (matrices, rows, columns), this rank's errors. basis:
    (matrices, rank, columns), the transpose of the Q with which the next iteration begins, the same on all ranks.
    first: the basis with which the first iteration began.
    """

    def __init__(self, members: list[int], rows: int, columns: int, first: torch.Tensor) -> None:
        self.members, self.rows, self.columns = members, rows, columns
        self.first = first
        self.basis = first.clone()
        self.error = torch.zeros(len(members), rows, columns, device=first.device, dtype=torch.float32)


class PowerSGDState(MatrixState):
    """The state between exchanges: the errors of this rank, and the last Q, which is the same on all ranks.

    On a GPU, a step launches the same number of kernels for each shape of matrices, whatever their number and the rank, and the
    host reads nothing.
    """

    def __init__(self, codec: PowerSGD, shapes: Sequence[Sequence[int]], device: torch.device) -> None:
        self._shapes = [tuple(shape) for shape in shapes]
        self._rank = codec.rank
        self._device = torch.empty(0, dtype=torch.float32, device=device).device  # with its index
        self._kernels = kernels_for(self._device)
        alike: dict[tuple[int, int], list[int]] = {}
        self._whole: list[int] = []
        for index, shape in enumerate(self._shapes):
            if codec.compresses(shape):
                alike.setdefault((shape[0], math.prod(shape[1:])), []).append(index)
            else:
                self._whole.append(index)
        random = torch.Generator(device="cpu").manual_seed(codec.seed)  # on the CPU: the same numbers for any device
        self._batches = [
            _Batch(
                members,
                rows,
                columns,
                torch.randn(len(members), codec.rank, columns, generator=random, dtype=torch.float32, device="cpu").to(
                    device
                ),
            )
            for (rows, columns), members in alike.items()
        ]

    def exchange(self, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """See MatrixState. Yields two tensors to sum; one if no tensor is compressed.

        If the iterator does not end, the state must be restored. The error of a rank is that of projecting its own matrix onto
        the span of P, so that it stays small if the matrices of the ranks differ. If any rank has a NaN or Inf in a matrix, all
        of the matrix becomes NaN, its error is cleared, and its iteration restarts. Raises ValueError for tensors of other
        shapes, and for other tensors than those of MatrixState.
        """
        self._check(tensors)
        return self._sums(tensors)

    def _sums(self, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        batches, kernels = self._batches, self._kernels
        matrices = [[tensors[index] for index in batch.members] for batch in batches]
        whole = [tensors[index] for index in self._whole]
        first, lefts, parts = self._factors([batch.rows for batch in batches], whole)
        if whole:
            torch._foreach_copy_(parts, whole)
        for batch, gradients, left in zip(batches, matrices, lefts, strict=True):
            kernels.powersgd_accumulate(batch.error, gradients)
            torch.bmm(batch.basis, batch.error.transpose(1, 2), out=left)
        yield first
        if whole:
            torch._foreach_copy_(whole, parts)
        if not batches:
            return

        second, rights, _ = self._factors([batch.columns for batch in batches], [])
        for batch, left, right in zip(batches, lefts, rights, strict=True):
            kernels.powersgd_orthonormalize(left)
            torch.bmm(left, batch.error, out=right)
            kernels.powersgd_subtract(left, right, batch.error)
        yield second
        for batch, results, left, right in zip(batches, matrices, lefts, rights, strict=True):
            kernels.powersgd_multiply(left, right, results)
            kernels.powersgd_begin_next(right, batch.first, batch.basis, batch.error)

    def kept(self, index: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]] | None:
        """Return the error of a tensor, (rows, columns), and its "basis", (rank, columns); see MatrixState."""
        for batch in self._batches:
            if index in batch.members:
                place = batch.members.index(index)
                return batch.error[place], {"basis": batch.basis[place]}
        return None

    def _factors(
        self, lengths: list[int], whole: list[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """Return one buffer for a factor of every batch and the numbers of the tensors `whole`, with views of the factors and of
        these tensors. Factors are transposed, (matrices, rank, length), since torch multiplies these several times faster.
        """
        shapes: list[Sequence[int]] = [
            (len(batch.members), self._rank, length) for batch, length in zip(self._batches, lengths, strict=True)
        ]
        shapes += [tensor.shape for tensor in whole]
        numels = [math.prod(shape) for shape in shapes]
        flat = torch.empty(sum(numels), dtype=torch.float32, device=self._device)
        views = [part.view(shape) for part, shape in zip(flat.split(numels), shapes, strict=True)]
        return flat, views[: len(lengths)], views[len(lengths) :]

    def _check(self, tensors: Sequence[torch.Tensor]) -> None:
        if [tuple(tensor.shape) for tensor in tensors] != self._shapes:
            raise ValueError("powersgd: the tensors do not have the shapes for which the state was made")
        for tensor in tensors:
            if tensor.dtype not in NUMBERS or tensor.dtype != tensors[0].dtype or not tensor.is_contiguous():
                raise ValueError(
                    "powersgd: tensors must be contiguous, and all float32, all bfloat16 or all float16, "
                    f"not {tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()}"
                )
            if tensor.device != self._device:
                raise ValueError(f"powersgd: a tensor on {tensor.device}, the state on {self._device}")
