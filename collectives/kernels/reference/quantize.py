"""The dense codecs in plain torch: what every other kernel must write and read, byte for byte.

<codec>_encode(values, residual, wire, <parameters>, seed) and <codec>_decode(wire, out, <parameters>, add, scale), with
tensors as in gradwire.collectives.compression.codec; decoders take only the parameters that they need. All arithmetic is
float32, rounded to nearest even after every operation, none fused, denormals kept.

A wire is [codes][scales, one per block], each section filled up with zero bytes to a multiple of 16. A block with a
NaN, an Inf or a magnitude of 2^127 or more is *not finite*: its scale is NaN and its codes are 0, so that all of it
decodes to NaN. A block (of a codec that divides by the scale) whose largest magnitude is below 2^-100 is zero: scale
and codes are 0. The limits keep every scale, inverse and product below finite, and scales out of the denormals.

The residual becomes what the code lost, and 0 where what decodes is not finite: a lost step must not poison the next.
"""

from __future__ import annotations

from gradwire.collectives.kernels.reference.casts import bf16_decode, bf16_encode, fp16_decode, fp16_encode
from gradwire.collectives.kernels.reference.fp8 import fp8_decode, fp8_encode
from gradwire.collectives.kernels.reference.integers import int4_decode, int4_encode, int8_decode, int8_encode
from gradwire.collectives.kernels.reference.onebit import onebit_decode, onebit_encode
from gradwire.collectives.kernels.reference.stochastic import (
    natural_decode,
    natural_encode,
    qsgd_decode,
    qsgd_encode,
    terngrad_decode,
    terngrad_encode,
)
