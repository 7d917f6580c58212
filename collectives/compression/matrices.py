"""What codecs of matrices do: approximate their sums over all ranks by sums of fewer numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.collectives.compression.codec import identity_of


class MatrixCodec(ABC):
    """A way to exchange tensors by sums over all ranks, of which each may depend on the one before: so without codes of a buffer.

    name: what users call it.
    """

    name: ClassVar[str]

    @property
    def identity(self) -> str:
        """Tell what a checkpoint is of: the name and all settings."""
        return identity_of(self.name, self)

    @abstractmethod
    def new_state(self, shapes: Sequence[Sequence[int]], device: torch.device) -> MatrixState:
        """Return the state of the exchanges of float32 tensors of these shapes, always given in this order."""

    @abstractmethod
    def wire_bytes(self, shapes: Sequence[Sequence[int]]) -> int:
        """Return what one exchange of float32 tensors of these shapes gives to allreduce, in bytes."""


class MatrixState(ABC):
    """What is kept from one exchange of the same tensors to the next, on one rank."""

    @abstractmethod
    def exchange(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        """Replace the tensors, in place, by an approximation of their sums over the ranks, bit for bit the same on all.

        tensors: contiguous float32, for this iterator alone until it ends. It yields one or more 1-D tensors: each is to be
        summed over the ranks, in place, to the same bits on all, before the next is asked for. If all sums are multiplied by a
        positive number, so is the result.
        """

    @abstractmethod
    def kept(self, index: int) -> tuple[Tensor, dict[str, Tensor]] | None:
        """Return this rank's error of a tensor, and by name what the codec remembers of it, the same on all ranks; to read or to
        write. None where the tensor is summed as it is."""
