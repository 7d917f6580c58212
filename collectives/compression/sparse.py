"""What the sparse codecs share: a fraction of the numbers is sent, the rest stays behind."""

from __future__ import annotations

import math
from types import ModuleType

import torch

from collectives.compression.codec import Codec
from collectives.compression.kernels_for import kernels_for


class Sparse(Codec):
    """ratio: of the numbers that are sent, at least one. Indices are 32 bits: a part has less than 2^31 numbers.

    Biased: meant for error feedback. A number that is not finite is never left in the residual.
    """

    ratio: float

    @property
    def alignment(self) -> int:
        return 16  # a cache line's: where results are of that many bytes, more of them can be written past the caches

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"{self.name}: ratio must be above 0 and at most 1, not {self.ratio}")

    def count(self, numel: int) -> int:
        """k, how many of numel numbers are sent."""
        return min(numel, max(1, math.ceil(self.ratio * numel)))

    def _kernels(self, wire: torch.Tensor, *numbers: torch.Tensor | None) -> ModuleType:
        """Kernels are given bare addresses: what they may touch is checked here. numbers: all of one length."""
        given = [tensor for tensor in numbers if tensor is not None]
        numel, device = given[0].numel(), wire.device
        for tensor in given:
            if tensor.dtype != torch.float32 or tensor.shape != (numel,) or not tensor.is_contiguous():
                raise ValueError(
                    f"{self.name}: numbers must be float32, 1-D, contiguous and {numel}, "
                    f"not {tensor.dtype} of shape {tuple(tensor.shape)}"
                )
            if tensor.device != device:
                raise ValueError(f"{self.name}: numbers on {tensor.device}, wire on {device}")
        nbytes = self.wire_bytes(numel)
        if wire.dtype != torch.uint8 or wire.shape != (nbytes,) or not wire.is_contiguous() or wire.data_ptr() % 16:
            raise ValueError(
                f"{self.name}: the wire of {numel} numbers is {nbytes} contiguous bytes (uint8) at a multiple of 16, "
                f"not {wire.dtype} of shape {tuple(wire.shape)} at {wire.data_ptr():#x}"
            )
        return kernels_for(device, "sparse")
