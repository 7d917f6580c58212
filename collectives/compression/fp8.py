"""One byte a number: 8-bit floats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from gradwire.collectives.compression.dense import Blocked


@dataclass(frozen=True)
class Float8(Blocked):
    """8-bit floats, scaled so that a block's largest magnitude becomes the format's (448 for e4m3, 57344 for e5m2).

    Rounded to nearest even: biased by rounding only. Contraction: relative error at most 2^-4 (e4m3; e5m2: 2^-3), so
    1 - delta <= 2^-8 (2^-6), but for subnormals, whose error is at most 2^-10 (2^-17) of a unit: under 1e-8 in all.
    Formats: Micikevicius et al. 2022 (e4m3 without infinities).
    """

    name: ClassVar[str] = "fp8"
    bits: ClassVar[int] = 8
    format: Literal["e4m3", "e5m2"] = "e4m3"
    block: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format not in ("e4m3", "e5m2"):
            raise ValueError(f"fp8: format must be 'e4m3' or 'e5m2', not {self.format!r}")

    def _encoder(self) -> tuple[Any, ...]:
        return (self.format, self.block)

    def _decoder(self) -> tuple[Any, ...]:
        return (self.format, self.block)
