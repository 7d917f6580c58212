"""Two bytes a number: half precision and bfloat16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from gradwire.collectives.compression.dense import Dense


@dataclass(frozen=True)
class Float16(Dense):
    """IEEE half precision, rounded to nearest even. The largest is 65504, so numbers are divided before codes are added.

    Biased by rounding only. Contraction: 1 - delta <= 2^-22 for magnitudes from 2^-14 to 65504 (relative error at most 2^-11);
    below, the error is at most 2^-25. What is too large becomes Inf, and leaves no residual.
    """

    name: ClassVar[str] = "fp16"
    summable: ClassVar[bool] = True
    wire_dtype: ClassVar[torch.dtype] = torch.float16
    bits: ClassVar[int] = 16

    def headroom(self, size: int) -> float:
        """Return a power of two of at most 1 / size. It costs numbers near half precision's smallest (6e-8, times the number
        of ranks) some of their bits, and the others none."""
        return 2.0 ** -(size - 1).bit_length()


@dataclass(frozen=True)
class BFloat16(Dense):
    """The upper half of a float32, rounded to nearest even: its range, 8 bits of precision.

    Biased by rounding only. Contraction: 1 - delta <= 2^-16 (relative error at most 2^-8).
    """

    name: ClassVar[str] = "bf16"
    summable: ClassVar[bool] = True
    wire_dtype: ClassVar[torch.dtype] = torch.bfloat16
    bits: ClassVar[int] = 16
