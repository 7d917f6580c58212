"""Running codecs once on a little, so that their kernels are compiled before anyone's deadline runs."""

from __future__ import annotations

import torch

from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.compression.matrices import MatrixCodec
from gradwire.collectives.kernels.first_use import FIRST_USE

#: A matrix that a codec of matrices finds worth compressing.
_SHAPE = (256, 256)


def rehearse(codec: Codec | MatrixCodec, device: torch.device, *, with_feedback: bool) -> None:
    """Call every kernel that a codec has for tensors on `device`. Nothing is sent."""
    with FIRST_USE.together("some seconds"):
        if isinstance(codec, MatrixCodec):
            matrix = torch.zeros(_SHAPE, device=device)
            for _ in codec.new_state([_SHAPE], device).exchange([matrix]):
                pass
            return
        numbers = torch.zeros(1, dtype=torch.float32, device=device)
        wire = torch.zeros(codec.wire_bytes(1), dtype=torch.uint8, device=device)
        residual = numbers.clone() if with_feedback else None
        codec.encode(numbers, wire, residual=residual, state=codec.new_state(1, device) if with_feedback else None)
        codec.encode(numbers, wire, residual=residual)
        codec.decode(wire, numbers)
        codec.decode(wire, numbers, add=True)
