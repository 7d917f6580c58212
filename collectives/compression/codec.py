"""What every codec does: turn float32 numbers into fewer bytes, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch


class Codec(ABC):
    """A way to write n float32 numbers in `wire_bytes(n)` bytes.

    Codecs are values: frozen, without state, equal when their settings are. What an encoding lost is the caller's to keep, as the
    residual of error feedback. The same input, seed and settings give the same bytes on every device.

    name: in the registry. summable: whether codes may be added as they are.
    """

    name: ClassVar[str]
    summable: ClassVar[bool] = False

    @property
    def alignment(self) -> int:
        """Elements: a buffer that is encoded in parts is cut at multiples of this."""
        return 1

    @abstractmethod
    def wire_bytes(self, numel: int) -> int:
        """The size of the code of numel elements, in bytes."""

    @abstractmethod
    def encode(
        self, values: torch.Tensor, wire: torch.Tensor, *, residual: torch.Tensor | None = None, seed: int = 0
    ) -> None:
        """Write the code of `values` to `wire`.

        values: float32, 1-D, contiguous, (n,). wire: uint8, (wire_bytes(n),), its address a multiple of 16. residual: float32,
        (n,), contiguous: then the code is that of values + residual, and residual becomes what the code lost of it. seed: 32 bits,
        of stochastic rounding.
        """

    @abstractmethod
    def decode(self, wire: torch.Tensor, out: torch.Tensor, *, add: bool = False, scale: float = 1.0) -> None:
        """out (float32, 1-D, contiguous, (n,)) = scale * what `wire` stands for, or with add, out += that."""
