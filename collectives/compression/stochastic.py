"""Unbiased codecs: numbers are rounded up or down at random so that they are right on average.

Not for error feedback where omega is 1 or more (QSGD and TernGrad with blocks as large as these): what is lost is then more than
what was there, and the residual grows from step to step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from gradwire.collectives.compression.dense import Blocked, Dense


@dataclass(frozen=True)
class QSGD(Blocked):
    """|c| in units of norm / levels, rounded stochastically, and the sign; norm: L2 of a block (Alistarh et al. 2017).

    Unbiased; omega <= min(d / levels^2, sqrt(d) / levels) for blocks of d elements (their Lemma 3.1).
    """

    name: ClassVar[str] = "qsgd"
    bits: ClassVar[int] = 4
    levels: int = 7
    block: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.levels <= 7:
            raise ValueError(f"qsgd: levels must be from 1 to 7, not {self.levels}")

    @property
    def omega(self) -> float:
        return min(self.block / self.levels**2, math.sqrt(self.block) / self.levels)

    def _encoder(self) -> tuple[Any, ...]:
        return (self.levels, self.block)


@dataclass(frozen=True)
class TernGrad(Blocked):
    """-m, 0 or m, m a block's largest magnitude: m * sign(c) with probability |c| / m (Wen et al. 2017).

    Unbiased; omega = m * L1(c) / L2(c)^2 - 1 <= sqrt(d) - 1 for blocks of d elements.
    """

    name: ClassVar[str] = "terngrad"
    bits: ClassVar[int] = 2
    block: int = 512

    @property
    def omega(self) -> float:
        return math.sqrt(self.block) - 1


@dataclass(frozen=True)
class Natural(Dense):
    """The power of two below or above |c|, rounded stochastically, and the sign: one byte (Horvath et al. 2019).

    Unbiased from 2^-76 to 2^49; omega <= 1/8 (their Theorem 1). Larger magnitudes become 2^49; smaller ones 2^-76 or zero.
    """

    name: ClassVar[str] = "natural"
    bits: ClassVar[int] = 8

    @property
    def omega(self) -> float:
        return 1 / 8
