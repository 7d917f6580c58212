"""The sparse and low-rank codecs in plain torch: what every other kernel must write and read, byte for byte.

<codec>_encode(values, residual, wire, <parameters>) and <codec>_decode(wire, out, <parameters>, add, scale), with
tensors as in gradwire.collectives.compression.codec. c = values + residual, in float32. What is sent of c leaves the residual;
what is not finite leaves it too, sent or not, as it would come back in every later sum.

Magnitudes are compared by their bits, the *key* of a number: of two equal ones the lower index counts as larger, and a
NaN is larger than Inf, whatever its sign and payload. On the wire there is one NaN, 0x7FC00000.

Sections of a wire: int32 indices, ascending, then float32 values, each filled up with zero bytes to a multiple of 16.
"""

from __future__ import annotations

from gradwire.collectives.kernels.reference.chunks import chunktopk_decode, chunktopk_encode
from gradwire.collectives.kernels.reference.powersgd import powersgd_multiply, powersgd_orthonormalize
from gradwire.collectives.kernels.reference.randomk import randomk_decode, randomk_encode
from gradwire.collectives.kernels.reference.topk import (
    dgc_encode,
    threshold_decode,
    threshold_encode,
    topk_decode,
    topk_encode,
)
