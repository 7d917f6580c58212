"""Deep gradient compression: top-k of what a momentum has gathered."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from gradwire.collectives.compression.codec import State
from gradwire.collectives.compression.sparse import Sparse

#: Of the numbers, sent in the first stage of the ramp; each later stage sends a quarter of the one before.
_FIRST_RATIO = 0.25


@dataclass(frozen=True)
class DGC(Sparse):
    """Top-k with momentum correction, momentum factor masking and a ramp of the ratio (Lin et al. 2018, sections 3.1
    to 3.3).

    On each rank u = momentum * u + gradient; v += u; the largest of v are sent, and cleared in v and u. v is the
    residual of error feedback, u the state. The momentum is thereby the codec's: the optimizer must have none. They
    also clip gradients on each rank, to 1 / sqrt(ranks) of the usual norm, before this.

    Only what a rank has computed has a momentum. Without state, as the owner of a shard must encode the sum, it is
    topk.

    ratio: after the ramp. ramp_steps: in that many steps the ratio falls from 25 %, by a factor of 4 in stages of
    equal length. The size of a code depends on the codec alone, so `at(step)` gives the codec of a step; state and
    residual serve all. Contraction: of v, delta >= k / n.
    """

    name: ClassVar[str] = "dgc"
    needs_feedback: ClassVar[bool] = True
    remembers: ClassVar[tuple[str, ...]] = ("momentum",)
    ratio: float = 0.001
    momentum: float = 0.9
    ramp_steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ValueError(f"dgc: momentum must be at least 0 and below 1, not {self.momentum}")
        if self.ramp_steps < 0:
            raise ValueError(f"dgc: ramp_steps must not be negative, not {self.ramp_steps}")

    def at(self, step: int) -> DGC:
        """Return the codec of the step of that number, from 0, on all ranks: without a ramp, with the ratio it has reached."""
        ratio = self.ratio
        if step < self.ramp_steps and ratio < _FIRST_RATIO:
            stages = math.ceil(math.log(_FIRST_RATIO / ratio, 4))
            ratio = max(ratio, _FIRST_RATIO / 4 ** (step * stages // self.ramp_steps))
        return replace(self, ratio=ratio, ramp_steps=0)

    def _encode(self, values: Tensor, wire: Tensor, residual: Tensor | None, seed: int, state: State | None) -> None:
        momentum = None if state is None else state["momentum"]
        self._check(wire, values, momentum)
        kernels, k = self._kernels(wire), self.count(values.numel())
        if momentum is None:
            kernels.topk_encode(values, residual, wire, k)
        elif residual is None:
            raise ValueError("dgc: needs error feedback: what is not sent is gathered in the residual")
        else:
            kernels.dgc_encode(values, residual, wire, k, momentum, self.momentum)

    def _decode(self, wire: Tensor, out: Tensor, add: bool, scale: float) -> None:
        self._kernels(wire).topk_decode(wire, out, self.count(out.numel()), add, scale)
