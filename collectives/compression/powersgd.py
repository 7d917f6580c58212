"""Low-rank matrices: two thin factors are summed over the ranks instead of the gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from gradwire.collectives.compression.codec import MatrixCodec, MatrixState
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
    """The state between exchanges: the errors of this rank, and the last Q, which is the same on all ranks."""

    def __init__(self, codec: PowerSGD, shapes: Sequence[Sequence[int]], device: torch.device) -> None:
        self._shapes = [tuple(shape) for shape in shapes]
        self._rank = codec.rank
        self._kernels = kernels_for(device)
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
        shapes.
        """
        self._check(tensors)
        return self._sums(tensors)

    def _sums(self, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        rows = [batch.rows for batch in self._batches]
        whole = [tensors[index].numel() for index in self._whole]
        first, lefts = self._factors(rows, sum(whole), tensors)
        sums = first[first.numel() - sum(whole) :].split(whole)
        for index, part in zip(self._whole, sums, strict=True):
            part.copy_(tensors[index].view(-1))
        for batch, left in zip(self._batches, lefts, strict=True):
            for error, index in zip(batch.error, batch.members, strict=True):
                error.add_(tensors[index].view(error.shape))
            torch.bmm(batch.basis, batch.error.transpose(1, 2), out=left)
        yield first
        for index, part in zip(self._whole, sums, strict=True):
            tensors[index].view(-1).copy_(part)
        if not self._batches:
            return

        second, rights = self._factors([batch.columns for batch in self._batches], 0, tensors)
        for batch, left, right in zip(self._batches, lefts, rights, strict=True):
            self._kernels.powersgd_orthonormalize(left)
            torch.bmm(left, batch.error, out=right)
            batch.error.baddbmm_(left.transpose(1, 2), right, alpha=-1)
        yield second
        for batch, left, right in zip(self._batches, lefts, rights, strict=True):
            for index, p, q in zip(batch.members, left, right, strict=True):
                self._kernels.powersgd_multiply(p, q, tensors[index].view(batch.rows, batch.columns))
            self._begin_next(batch, right)

    def kept(self, index: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]] | None:
        """Return the error of a tensor, (rows, columns), and its "basis", (rank, columns); see MatrixState."""
        for batch in self._batches:
            if index in batch.members:
                place = batch.members.index(index)
                return batch.error[place], {"basis": batch.basis[place]}
        return None

    def _factors(
        self, lengths: list[int], more: int, tensors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return one buffer for a factor of every batch and `more` numbers, with views of the factors. They are transposed,
        (matrices, rank, length), since torch multiplies these several times faster.
        """
        shapes = [
            (len(batch.members), self._rank, length) for batch, length in zip(self._batches, lengths, strict=True)
        ]
        numels = [math.prod(shape) for shape in shapes]
        flat = (
            tensors[0].new_empty(sum(numels) + more) if tensors else torch.empty(0, dtype=torch.float32, device="cpu")
        )
        parts = flat[: sum(numels)].split(numels)
        return flat, [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _begin_next(self, batch: _Batch, right: torch.Tensor) -> None:
        """Make the factor orthonormal, so that its magnitude does not grow with each iteration; a lost factor restarts from
        the first one."""
        finite = right.isfinite().all(2).all(1)
        # On a GPU, reading `finite` would wait for the device, so the errors are always masked there.
        if right.is_cuda or not bool(finite.all()):
            batch.error.masked_fill_(~finite[:, None, None], 0)
        self._kernels.powersgd_orthonormalize(right)
        lives = ((right != 0) & right.isfinite()).any(2, keepdim=True) & finite[:, None, None]
        batch.basis = torch.where(lives, right, batch.first)

    def _check(self, tensors: Sequence[torch.Tensor]) -> None:
        if [tuple(tensor.shape) for tensor in tensors] != self._shapes:
            raise ValueError("powersgd: the tensors do not have the shapes for which the state was made")
        for tensor in tensors:
            if tensor.dtype != torch.float32 or not tensor.is_contiguous():
                raise ValueError(f"powersgd: tensors must be float32 and contiguous, not {tensor.dtype}")
