"""The functions of reference.sparse for the CPU: the same bytes.

Each is compiled, or loaded from the disk, when it is first called.
"""

from __future__ import annotations

from gradwire.collectives.kernels.cpu.chunks import chunktopk_decode, chunktopk_encode
from gradwire.collectives.kernels.cpu.powersgd import powersgd_multiply, powersgd_orthonormalize
from gradwire.collectives.kernels.cpu.randomk import randomk_decode, randomk_encode
from gradwire.collectives.kernels.cpu.topk import (
    dgc_encode,
    threshold_decode,
    threshold_encode,
    topk_decode,
    topk_encode,
)
