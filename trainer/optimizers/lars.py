"""LARS, which lets a large batch train as a small one does: each layer's rate follows the norm of its weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from gradwire.trainer.optimizers.foreach import ForeachOptimizer, check_range
from gradwire.trainer.optimizers.layerwise import trust_ratios


class LARS(ForeachOptimizer):
    """Steps as SGD with momentum does, with a rate for each parameter tensor (You, Gitman, Ginsburg 2017, algorithm 1):

        rate = lr * trust_coefficient * |w| / (|g| + weight_decay * |w|)
        v = momentum * v + rate * (g + weight_decay * w)
        w = w - v

    Where |w| or |g| is 0, or the group has adapt=False (as practice has it for biases and normalization
    layers), rate = lr. lr, weight_decay: at least 0. momentum: at least 0 and below 1. trust_coefficient: above 0.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        adapt: bool = True,
    ) -> None:
        check_range("lr", lr, 0)
        check_range("momentum", momentum, 0, 1)
        check_range("weight_decay", weight_decay, 0)
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "weight_decay": weight_decay,
                "trust_coefficient": trust_coefficient,
                "adapt": adapt,
            },
        )
        for coefficient in (group["trust_coefficient"] for group in self.param_groups):
            if not 0 < coefficient < float("inf"):  # a ratio of 0 would count as none, and the rate be lr
                raise ValueError(
                    f"trust_coefficient must be above 0, not {coefficient!r}; adapt=False steps at the rate lr"
                )

    def _update(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        decay = group["weight_decay"]
        updates = list(torch._foreach_add(gradients, parameters, alpha=decay))
        if group["adapt"]:
            weights, slopes = torch._foreach_norm(parameters), torch._foreach_norm(gradients)
            scaled = [weight * group["trust_coefficient"] for weight in weights]
            sums = [
                torch.where(slope > 0, slope + decay * weight, 0) for slope, weight in zip(slopes, weights, strict=True)
            ]
            torch._foreach_mul_(updates, trust_ratios(scaled, sums))
        torch._foreach_mul_(updates, group["lr"])
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, updates)
        torch._foreach_sub_(parameters, buffers)
