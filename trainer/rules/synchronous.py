"""The synchronous rule: every step is taken with the gradients of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.compression import Policy
from trainer.gradients.checkpoint import Resumption
from trainer.gradients.combination import Combination
from trainer.gradients.exchange import GradientExchange, Passes
from trainer.gradients.layout import Layout


class Synchronous:
    """Exchanges gradients in the last backward() before a step, which returns when that is done.

    optimizer: steps with these gradients. policy: what they travel as, in buckets of bucket_bytes. passes:
    how many calls of backward() come before a step.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, combination: Combination, policy: Policy, bucket_bytes: int, passes: int
    ) -> None:
        self.passes = Passes(passes)
        self.layout = Layout(combination, policy, bucket_bytes)
        self.exchange = GradientExchange(self.layout, combination, self.passes)
        self._resumption = Resumption(optimizer, self.layout, self.exchange, combination)

    @property
    def wait_s(self) -> float:
        return self.exchange.wait_s

    def add(self, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        self.exchange.add(names, parameters)

    def synchronize(self) -> None:
        self.exchange.flush()

    def renew(self, *, forget: bool = False) -> None:
        self.exchange.renew(forget=forget)

    def settle(self) -> None:
        self.layout.update()
        self.exchange.renew()

    def state_dict(self) -> dict[str, Any]:
        return self._resumption.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], also: Sequence[dict[str, Any]]) -> None:
        self._resumption.load(state_dict, also)

    def close(self) -> None:
        self.exchange.close()
