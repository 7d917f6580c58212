"""The compression of pushes to a key-value store: MXNet's 2-bit codec, and the selection of a codec by MXNet's arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradwire.collectives.compression.codec import Codec, Raw, State
from gradwire.collectives.compression.registry import CODECS
from gradwire.collectives.kernels.layout import pad16

_SHIFTS = (0, 2, 4, 6)


@dataclass(frozen=True)
class TwoBit(Codec):
    """Encodes a number in two bits: as threshold if it is >= threshold, as -threshold if it is <= -threshold, else as 0.

    This is MXNet's "2bit", used with error feedback. It is not registered, since a user must know the size of the gradients to
    choose the threshold. A number that is not finite decodes to NaN, and its residual becomes 0. The implementation is plain
    torch, since the servers of a key-value store compute on the CPU.
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
            residual[codes == 3] = 0  # else the residual would stay NaN for ever

    def _decode(self, wire: Tensor, out: Tensor, add: bool, scale: float) -> None:
        numbers = self._numbers(wire, out.numel()) * scale
        out.add_(numbers) if add else out.copy_(numbers)

    def _numbers(self, wire: Tensor, numel: int) -> Tensor:
        codes = torch.stack([(wire >> shift) & 3 for shift in _SHIFTS], 1).flatten()[:numel]
        numbers = [0.0, self.threshold, -self.threshold, math.nan]
        meanings = torch.tensor(numbers, dtype=torch.float32, device=wire.device)
        return meanings[codes.long()]


def codec_of(params: Mapping[str, Any]) -> Codec:
    """Return the codec that a dict with a "type" and its settings describes, such as {"type": "2bit", "threshold": 0.5}.

    Raises ValueError, which lists what is known, for an unknown type or setting; ValueError or TypeError for invalid values.
    """
    known: dict[str, type[Codec]] = {TwoBit.name: TwoBit}
    known |= {name: codec for name, codec in CODECS.items() if codec is not Raw}
    kind = params.get("type") if isinstance(params, Mapping) else None
    if not isinstance(kind, str) or kind not in known:
        raise ValueError(f'a dict with a "type" is needed, one of {", ".join(map(repr, known))}, and settings of it')
    settings = {name: value for name, value in params.items() if name != "type"}
    own = list(signature(known[kind]).parameters)
    if unknown := [name for name in settings if name not in own]:
        raise ValueError(f"{kind!r} has no setting {unknown[0]!r}; it has {', '.join(own) or 'none'}")
    return known[kind](**settings)
