"""Run codecs on little data, so that their kernels compile before any deadline starts."""

from __future__ import annotations

import torch

from gradwire.collectives.compression.codec import Codec, MatrixCodec

#: The shape of a matrix that a matrix codec compresses.
_SHAPE = (256, 256)


def rehearse(codec: Codec | MatrixCodec, device: torch.device, *, with_feedback: bool) -> None:
    """Call every kernel that a codec has for tensors on `device`. Nothing is sent."""
    if isinstance(codec, MatrixCodec):
        matrix = torch.zeros(_SHAPE, device=device, dtype=torch.float32)
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
