"""What LARS, LAMB and DelayedNesterov share: a step over lists of tensors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class ForeachOptimizer(torch.optim.Optimizer):
    """Steps all parameters of a group by a few calls over lists of tensors (torch's foreach functions).

    Raises ValueError, from the constructor, for options out of range, and RuntimeError for sparse gradients.
    """

    @abstractmethod
    def _update(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """Step the parameters of a group that have gradients, none of which is sparse."""

    def _states(self, parameters: list[Tensor], *names: str, counts_steps: bool = False) -> list[dict[str, Any]]:
        """Return the state of each parameter, in which tensors like the parameter have these names; they begin as zeros.
        counts_steps: whether "step" counts the calls."""
        states = [self.state[parameter] for parameter in parameters]
        for state, parameter in zip(states, parameters, strict=True):
            if counts_steps and not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
            for name in names:
                if name not in state:
                    state[name] = torch.zeros_like(parameter)
            if counts_steps:
                state["step"] += 1
        return states

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step. closure: computes the loss and its gradients anew; its result is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            gradients = [parameter.grad for parameter in parameters]
            for gradient in gradients:
                if gradient.is_sparse:
                    raise RuntimeError(f"{type(self).__name__} takes dense gradients only, not sparse ones")
            if parameters:
                self._update(group, parameters, gradients)
        return loss


def check_range(name: str, value: float, least: float, below: float = float("inf")) -> None:
    """Raise ValueError unless least <= value < below."""
    if not least <= value < below:
        upper = "" if below == float("inf") else f" and below {below:g}"
        raise ValueError(f"{name} must be at least {least:g}{upper}, not {value!r}")
