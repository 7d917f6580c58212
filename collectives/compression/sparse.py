"""What the sparse codecs share: a fraction of the numbers is sent, the rest stays behind."""

from __future__ import annotations

import math
from types import ModuleType

from torch import Tensor

from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.kernels_for import kernels_for


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
        """Return k, how many of numel numbers are sent."""
        return min(numel, max(1, math.ceil(self.ratio * numel)))

    def _kernels(self, wire: Tensor) -> ModuleType:
        return kernels_for(wire.device, "sparse")
