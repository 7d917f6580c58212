"""MXNet's compression of pushes, for programs that are ported."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from collectives.compression.codec import Codec, State
from collectives.kernels.wire import pad16

_SHIFTS = (0, 2, 4, 6)


@dataclass(frozen=True)
class TwoBit(Codec):
    """Sends threshold, 0 or -threshold, in two bits: the first from threshold on, the last from -threshold on.

    This is MXNet's "2bit"; what is lost is added to the next push, as everywhere with error feedback. It is not
    registered, since a fixed threshold needs a user who knows the size of the gradients. What is not finite decodes to
    NaN, once. In plain torch: the servers of a key-value store compute on the CPU.
    """

    name: ClassVar[str] = "2bit"
    needs_feedback: ClassVar[bool] = True
    threshold: float = 0.5

    def __post_init__(self) -> None:
        if not (isinstance(self.threshold, (int, float)) and math.isfinite(self.threshold) and self.threshold > 0):
            raise ValueError(f"2bit: threshold must be a finite number > 0, not {self.threshold!r}")

    def wire_bytes(self, numel: int) -> int:
        return pad16(-(-numel // len(_SHIFTS)))

    def _encode(self, values: Tensor, wire: Tensor, residual: Tensor | None, seed: int, state: State | None) -> None:
        wanted = values if residual is None else values + residual
        codes = (wanted >= self.threshold).byte() + 2 * (wanted <= -self.threshold).byte()
        codes[~wanted.isfinite()] = 3
        quads = torch.nn.functional.pad(codes, (0, len(_SHIFTS) * wire.numel() - codes.numel())).view(-1, len(_SHIFTS))
        wire.zero_()
        for place, shift in enumerate(_SHIFTS):
            wire |= quads[:, place] << shift
        if residual is not None:
            torch.sub(wanted, self._numbers(wire, wanted.numel()), out=residual)
            residual[codes == 3] = 0  # or it would be NaN for ever

    def _decode(self, wire: Tensor, out: Tensor, add: bool, scale: float) -> None:
        numbers = self._numbers(wire, out.numel()) * scale
        out.add_(numbers) if add else out.copy_(numbers)

    def _numbers(self, wire: Tensor, numel: int) -> Tensor:
        codes = torch.stack([(wire >> shift) & 3 for shift in _SHIFTS], 1).flatten()[:numel]
        numbers = [0.0, self.threshold, -self.threshold, math.nan]
        meanings = torch.tensor(numbers, dtype=torch.float32, device=wire.device)
        return meanings[codes.long()]
