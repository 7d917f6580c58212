"""All numbers above a threshold, which follows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.collectives.compression.codec import State
from gradwire.collectives.compression.sparse import Sparse
from gradwire.collectives.kernels.wire import pad16


@dataclass(frozen=True)
class Threshold(Sparse):
    """All numbers of at least the magnitude tau (Strom 2015); tau is kept from one encoding to the next, and follows
    the numbers.

    With k = ceil(ratio * n), as many are sent as reach tau, if they are within 5 % of k; if not, and when there is no
    tau yet, the k largest, exactly, and tau becomes the smallest of these. If m were sent, tau is multiplied by 1 + (m
    - k) / (8 k): the count falls by the power tau * density(tau) * n / k of tau, about 7 for 1 % of gaussian numbers,
    and below 16 this settles.

    Contraction: delta >= (k - floor(k / 20)) / n, as what is sent are the largest numbers, however many.

    State: tau, one number. Without it (the owner of a shard may do so) it is topk on a wire that is 5 % longer.
    """

    name: ClassVar[str] = "threshold"
    needs_feedback: ClassVar[bool] = True
    ratio: float = 0.01

    def slack(self, numel: int) -> int:
        """Return by how much the number of those that are sent may differ from count(numel)."""
        return self.count(numel) // 20

    def wire_bytes(self, numel: int) -> int:
        return 16 + 2 * pad16(4 * (self.count(numel) + self.slack(numel)))

    def new_state(self, numel: int, device: torch.device) -> State:
        return {"tau": torch.zeros(1, dtype=torch.float32, device=device)}

    def _parameters(self, numel: int) -> tuple[int, ...]:
        return self.count(numel), self.slack(numel)

    def _encode(self, values: Tensor, wire: Tensor, residual: Tensor | None, seed: int, state: State | None) -> None:
        tau = None if state is None else state["tau"]
        self._kernels(wire).threshold_encode(values, residual, wire, *self._parameters(values.numel()), tau)
