"""What the layerwise optimizers share: the ratio of a layer's norm to that of its update."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class LayerwiseOptimizer(torch.optim.Optimizer):
    """Steps all parameters of a group by a few calls over lists of tensors (torch's foreach functions).

    A group may have an option `adapt` of its own: False for biases and normalization layers, whose rate practice leaves
    alone. Raises ValueError, from the constructor, for options out of range, and RuntimeError for sparse gradients.
    """

    @abstractmethod
    def _update(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """Step the parameters of a group that have gradients, none of which is sparse."""

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


def trust_ratios(numerators: list[Tensor], denominators: list[Tensor]) -> list[Tensor]:
    """Return each numerator over its denominator, both of no dimension, and 1 where either is 0."""
    above, below = torch.stack(numerators), torch.stack(denominators)
    usable = (above > 0) & (below > 0)
    return list(torch.where(usable, above / torch.where(usable, below, 1), 1).unbind())


def check_range(name: str, value: float, least: float, below: float = float("inf")) -> None:
    """Raise ValueError unless least <= value < below."""
    if not least <= value < below:
        upper = "" if below == float("inf") else f" and below {below:g}"
        raise ValueError(f"{name} must be at least {least:g}{upper}, not {value!r}")
