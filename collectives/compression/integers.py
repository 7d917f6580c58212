"""Integers of 8 and 4 bits with a scale a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from gradwire.collectives.compression.dense import Blocked


@dataclass(frozen=True)
class Int8(Blocked):
    """round(c * 127 / m), m a block's largest magnitude.

    Nearest (half to even): biased by rounding only; no error above m / 254, so 1 - delta <= block / (4 * 127^2): 0.004.
    Stochastic: unbiased, omega <= block / (4 * 127^2) (a fraction's variance is at most 1/4).
    """

    name: ClassVar[str] = "int8"
    bits: ClassVar[int] = 8
    block: int = 256
    stochastic: bool = False

    @property
    def omega(self) -> float:
        return self.block / (4 * 127**2) if self.stochastic else 0.0

    def _encoder(self) -> tuple[Any, ...]:
        return (self.block, self.stochastic)


@dataclass(frozen=True)
class Int4(Blocked):
    """round(c / s), where s = m / 7 is rounded up to bfloat16 so that nothing has to be clipped; m: largest magnitude.

    Nearest (half to even): biased by rounding only; 1 - delta <= block * (1 + 2^-7)^2 / (4 * 7^2): 0.332.
    Stochastic: unbiased, omega <= the same.
    """

    name: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4
    scale_bytes: ClassVar[int] = 2
    block: int = 64
    stochastic: bool = False

    @property
    def omega(self) -> float:
        return self.block * (1 + 2**-7) ** 2 / (4 * 7**2) if self.stochastic else 0.0

    def _encoder(self) -> tuple[Any, ...]:
        return (self.block, self.stochastic)
