"""What the dense codecs share: one code for every number, written by the kernels of the codec's name."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from collectives.compression.codec import Codec, State
from collectives.compression.kernels_for import kernels_for
from collectives.kernels.wire import pad16


class Dense(Codec):
    """bits: of a code. A wire is the codes, filled up with zeros to 16 bytes."""

    bits: ClassVar[int]

    def wire_bytes(self, numel: int) -> int:
        return pad16((numel * self.bits + 7) // 8)

    def _encoder(self) -> tuple[Any, ...]:
        """The encoding kernel's parameters."""
        return ()

    def _decoder(self) -> tuple[Any, ...]:
        """The decoding kernel's parameters."""
        return ()

    def encode(
        self,
        values: torch.Tensor,
        wire: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
        seed: int = 0,
        state: State | None = None,
    ) -> None:
        self._check(values, wire)
        if residual is not None:
            self._check(residual, wire)
            if residual.numel() != values.numel():
                raise ValueError(f"{self.name}: {values.numel()} values, but {residual.numel()} residuals")
        encode = getattr(kernels_for(values.device), f"{self.name}_encode")
        encode(values, residual, wire, *self._encoder(), seed)

    def decode(self, wire: torch.Tensor, out: torch.Tensor, *, add: bool = False, scale: float = 1.0) -> None:
        self._check(out, wire)
        getattr(kernels_for(out.device), f"{self.name}_decode")(wire, out, *self._decoder(), add, scale)

    def _check(self, numbers: torch.Tensor, wire: torch.Tensor) -> None:
        """Kernels are given bare addresses: what they may touch is checked here."""
        if numbers.dtype != torch.float32 or numbers.dim() != 1 or not numbers.is_contiguous():
            raise ValueError(
                f"{self.name}: numbers must be float32, 1-D and contiguous, not {numbers.dtype}, {numbers.dim()}-D"
            )
        nbytes = self.wire_bytes(numbers.numel())
        if wire.dtype != torch.uint8 or wire.shape != (nbytes,) or not wire.is_contiguous():
            raise ValueError(
                f"{self.name}: the wire of {numbers.numel()} numbers is {nbytes} contiguous bytes (uint8), "
                f"not {wire.dtype} of shape {tuple(wire.shape)}"
            )
        if wire.data_ptr() % 16:
            raise ValueError(f"{self.name}: a wire's address must be a multiple of 16")
        if wire.device != numbers.device:
            raise ValueError(f"{self.name}: numbers on {numbers.device}, wire on {wire.device}")


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
