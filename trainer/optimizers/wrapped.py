"""What the optimizers that wrap another one share: its param groups, state and defaults are theirs."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor


class WrappingOptimizer(torch.optim.Optimizer):
    """Holds an optimizer as `.optimizer`, and shares what torch's optimizers keep. A subclass sets it, and calls
    share_hooks(), in place of torch's __init__."""

    optimizer: torch.optim.Optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        return self.optimizer.state

    @state.setter
    def state(self, value: defaultdict[Tensor, Any]) -> None:
        self.optimizer.state = value

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self.optimizer.defaults = value
