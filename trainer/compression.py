"""What gradients look like on the wire."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cast:
    """Floating-point tensors wider than `wire_dtype` travel as `wire_dtype`; all others, and with None all, as they are."""

    wire_dtype: torch.dtype | None

    def dtype_on_wire(self, dtype: torch.dtype) -> torch.dtype:
        """What a tensor of this dtype travels as."""
        narrows = self.wire_dtype is not None and dtype.is_floating_point and dtype.itemsize > self.wire_dtype.itemsize
        return self.wire_dtype if narrows and self.wire_dtype is not None else dtype

    def compress(self, tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        """The tensor to send, and the dtype that decompress() needs."""
        return tensor.to(self.dtype_on_wire(tensor.dtype)), tensor.dtype

    def decompress(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """The tensor received, as the dtype that was compressed."""
        return tensor.to(dtype)


class Compression:
    """Horovod's names: Compression.none, .fp16 (largest value 65504), .bf16 (float32's range, 8 bits of precision)."""

    none = Cast(None)
    fp16 = Cast(torch.float16)
    bf16 = Cast(torch.bfloat16)
