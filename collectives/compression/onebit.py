"""One bit a number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradwire.collectives.compression.dense import Blocked


@dataclass(frozen=True)
class OneBit(Blocked):
    """Signs, with the mean magnitude of a block as scale (1-bit SGD, Seide et al. 2014; this scale: Karimireddy et al. 2019).

    Biased: converges with error feedback only. Contraction: delta = L1(c)^2 / (d * L2(c)^2) in a block of d elements, never
    below 1/d; 2/pi for gaussian numbers. Zero among other numbers counts as positive; a block of zeros stays zero.
    """

    name: ClassVar[str] = "onebit"
    needs_feedback: ClassVar[bool] = True
    bits: ClassVar[int] = 1
    block: int = 1024
