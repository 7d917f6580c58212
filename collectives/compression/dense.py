"""What the dense codecs share: one code for every number, written by the kernels of the codec's name."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from gradwire.collectives.compression.codec import Codec, State
from gradwire.collectives.compression.kernels_for import kernels_for
from gradwire.collectives.kernels.wire import pad16


class Dense(Codec):
    """bits: of a code. A wire is the codes, filled up with zeros to 16 bytes."""

    bits: ClassVar[int]

    def wire_bytes(self, numel: int) -> int:
        return pad16((numel * self.bits + 7) // 8)

    def _encoder(self) -> tuple[Any, ...]:
        """Return the encoding kernel's parameters."""
        return ()

    def _decoder(self) -> tuple[Any, ...]:
        """Return the decoding kernel's parameters."""
        return ()

    def _encode(self, values: Tensor, wire: Tensor, residual: Tensor | None, seed: int, state: State | None) -> None:
        encode = getattr(kernels_for(values.device), f"{self.name}_encode")
        encode(values, residual, wire, *self._encoder(), seed)

    def _decode(self, wire: Tensor, out: Tensor, add: bool, scale: float) -> None:
        getattr(kernels_for(out.device), f"{self.name}_decode")(wire, out, *self._decoder(), add, scale)


class Blocked(Dense):
    """Dense, with a scale for every block of `block` elements, a multiple of 16. Scales follow the codes on the wire.

    A block with a NaN or Inf decodes to NaN, all of it. Magnitudes of 2^127 and more count as Inf.
    """

    scale_bytes: ClassVar[int] = 4
    block: int

    def __post_init__(self) -> None:
        if self.block <= 0 or self.block % 16:
            raise ValueError(f"{self.name}: block must be a positive multiple of 16, not {self.block}")

    @property
    def alignment(self) -> int:
        return self.block

    def wire_bytes(self, numel: int) -> int:
        return super().wire_bytes(numel) + pad16(self.scale_bytes * -(-numel // self.block))

    def _encoder(self) -> tuple[Any, ...]:
        return (self.block,)

    def _decoder(self) -> tuple[Any, ...]:
        return (self.block,)
