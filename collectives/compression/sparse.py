"""What the sparse codecs share: a fraction of the numbers is sent, the rest stays behind."""

from __future__ import annotations

import math
from types import ModuleType

from torch import Tensor

from gradwire.collectives.compression.codec import Codec, State
from gradwire.collectives.compression.kernels_for import kernels_for
from gradwire.collectives.kernels.wire import pad16


class Sparse(Codec):
    """ratio: of the numbers that are sent, at least one. Indices are 32 bits: a part has less than 2^31 numbers. The kernels of
    the codec's name do the work; a wire is the indices, then the values, where the codec does not say otherwise.

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

    def wire_bytes(self, numel: int) -> int:
        return 2 * pad16(4 * self.count(numel))

    def _parameters(self, numel: int) -> tuple[int, ...]:
        """Return the parameters of the kernels for so many numbers."""
        return (self.count(numel),)

    def _encode(self, values: Tensor, wire: Tensor, residual: Tensor | None, seed: int, state: State | None) -> None:
        encode = getattr(self._kernels(wire), f"{self.name}_encode")
        encode(values, residual, wire, *self._parameters(values.numel()))

    def _decode(self, wire: Tensor, out: Tensor, add: bool, scale: float) -> None:
        getattr(self._kernels(wire), f"{self.name}_decode")(wire, out, *self._parameters(out.numel()), add, scale)

    def _kernels(self, wire: Tensor) -> ModuleType:
        return kernels_for(wire.device, "sparse")
