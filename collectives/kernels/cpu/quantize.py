"""The functions of reference.quantize for the CPU: the same bytes.

Each works block by block, and passes several times over a block, which stays in the first-level cache: memory is read
and written once. Error feedback is fused in: every pass adds the residual to the values, and the last one writes what
was lost. A function is compiled, or loaded from the disk, when it is first called.
"""

from __future__ import annotations

from gradwire.collectives.kernels.cpu.casts import bf16_decode, bf16_encode, fp16_decode, fp16_encode
from gradwire.collectives.kernels.cpu.fp8 import fp8_decode, fp8_encode
from gradwire.collectives.kernels.cpu.integers import int4_decode, int4_encode, int8_decode, int8_encode
from gradwire.collectives.kernels.cpu.onebit import onebit_decode, onebit_encode
from gradwire.collectives.kernels.cpu.stochastic import (
    natural_decode,
    natural_encode,
    qsgd_decode,
    qsgd_encode,
    terngrad_decode,
    terngrad_encode,
)
