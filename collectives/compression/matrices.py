"""The base classes of matrix codecs, which approximate sums over all ranks with sums of fewer numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.collectives.compression.codec import identity_of


class MatrixCodec(ABC):
    """Exchanges tensors by a sequence of sums over all ranks, not by codes of a buffer. Each sum may depend on the one before.

    name: the name that users give.
    """

    name: ClassVar[str]

    @property
    def identity(self) -> str:
        """Return the text that checkpoints contain: the name and all settings."""
        return identity_of(self.name, self)

    @abstractmethod
    def new_state(self, shapes: Sequence[Sequence[int]], device: torch.device) -> MatrixState:
        """Return the state of the exchanges of float32 tensors of these shapes, always given in this order."""

    @abstractmethod
    def wire_bytes(self, shapes: Sequence[Sequence[int]]) -> int:
        """Return how many bytes one exchange of float32 tensors of these shapes passes to allreduce."""


class MatrixState(ABC):
    """The state between exchanges of the same tensors, on one rank."""

    @abstractmethod
    def exchange(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        """Replace the tensors, in place, with an approximation of their sums over the ranks, bit for bit the same on all ranks.

        tensors: contiguous float32. Do not use them until the iterator ends. The iterator yields one or more 1-D tensors. The
        caller sums each over the ranks, in place, to the same bits on all ranks, before it takes the next. If all sums are
        multiplied by a positive number, so is the result.
        """

    @abstractmethod
    def kept(self, index: int) -> tuple[Tensor, dict[str, Tensor]] | None:
        """Return this rank's error of a tensor, and the codec's state for the tensor by name, which is the same on all ranks.
        The caller may read and write both. None for a tensor that is summed uncompressed."""
