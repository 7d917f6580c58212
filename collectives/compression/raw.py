"""Four bytes a number: no compression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.collectives.compression.codec import Codec, State
from gradwire.collectives.kernels.layout import pad16


@dataclass(frozen=True)
class Raw(Codec):
    """The plain numbers; a residual is added to them. Unbiased, omega = 0."""

    name: ClassVar[str] = "none"
    summable: ClassVar[bool] = True
    wire_dtype: ClassVar[torch.dtype] = torch.float32

    def wire_bytes(self, numel: int) -> int:
        return pad16(4 * numel)

    def _encode(self, values: Tensor, wire: Tensor, residual: Tensor | None, seed: int, state: State | None) -> None:
        numbers, n = wire.view(torch.float32), values.numel()
        numbers[n:] = 0
        if residual is None:
            numbers[:n].copy_(values)
        else:
            torch.add(values, residual, out=numbers[:n])
            residual.zero_()

    def _decode(self, wire: Tensor, out: Tensor, add: bool, scale: float) -> None:
        numbers = wire.view(torch.float32)[: out.numel()]
        if add:
            out.add_(numbers if scale == 1 else numbers * scale)
        else:
            torch.mul(numbers, scale, out=out)
