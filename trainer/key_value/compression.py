"""What pushes to a key-value store travel as: codecs by MXNet's way of naming them, and the error feedback of a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from collectives.compression.codec import Codec, State
from collectives.compression.raw import Raw
from collectives.compression.registry import CODECS
from collectives.compression.seeds import rounding_seed
from trainer.key_value.entry import KeySpec
from trainer.key_value.two_bit import TwoBit


def codec_of(params: Mapping[str, Any]) -> Codec:
    """Return the codec that is meant by a "type" with its settings, such as {"type": "2bit", "threshold": 0.5}.

    Raises ValueError, which lists the types, or the settings of one; TypeError for a setting of a wrong type.
    """
    known: dict[Any, type[Codec]] = {
        TwoBit.name: TwoBit,
        **{name: codec for name, codec in CODECS.items() if codec is not Raw},
    }
    kind = params.get("type") if isinstance(params, Mapping) else None
    if not isinstance(kind, str) or kind not in known:
        raise ValueError(f'a dict with a "type" is needed, one of {", ".join(map(repr, known))}, and settings of it')
    settings = {name: value for name, value in params.items() if name != "type"}
    allowed = [field.name for field in fields(known[kind])]  # type: ignore[arg-type]
    if unknown := [name for name in settings if name not in allowed]:
        raise ValueError(f"{kind!r} has no setting {unknown[0]!r}; it has {', '.join(allowed) or 'none'}")
    return known[kind](**settings)


class Encoder:
    """Encodes what one worker pushes, and keeps, for each key, what that lost, until the next push."""

    def __init__(self, codec: Codec, rank: int) -> None:
        self._codec = codec
        self._rank = rank
        self._steps: dict[int, int] = {}
        self._residuals: dict[int, Tensor | None] = {}
        self._states: dict[int, State | None] = {}

    def encode(self, spec: KeySpec, value: Tensor) -> tuple[int, Tensor]:
        """Return how many pushes to this key came before, and the code."""
        values = value.to(torch.float32).reshape(-1).contiguous()
        numel, number = values.numel(), spec.number
        if number not in self._steps:
            self._steps[number] = 0
            self._residuals[number] = torch.zeros_like(values) if self._codec.needs_feedback else None
            self._states[number] = self._codec.new_state(numel, values.device)
        step = self._steps[number]
        self._steps[number] += 1
        codec = self._codec.at(step)
        wire = torch.empty(codec.wire_bytes(numel), dtype=torch.uint8)
        seed = rounding_seed(step, self._rank, 0, number, 0)
        codec.encode(values, wire, residual=self._residuals[number], seed=seed, state=self._states[number])
        return step, wire
