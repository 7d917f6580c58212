"""LAMB, which does for Adam what LARS does for SGD."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from gradwire.trainer.optimizers.foreach import ForeachOptimizer, check_range
from gradwire.trainer.optimizers.layerwise import trust_ratios


class LAMB(ForeachOptimizer):
    """Steps as Adam does, with a rate for each parameter tensor (You et al. 2019, algorithm 2, phi(z) = z):

        m = beta1 * m + (1 - beta1) * g,    v = beta2 * v + (1 - beta2) * g * g
        r = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * w
        w = w - lr * |w| / |r| * r

    Where |w| or |r| is 0, or the group has adapt=False (as practice has it for biases and normalization
    layers), the ratio is 1. t counts the steps of a parameter. lr, eps, weight_decay: at least 0. betas: each at least 0
    and below 1.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adapt: bool = True,
    ) -> None:
        check_range("lr", lr, 0)
        check_range("betas[0]", betas[0], 0, 1)
        check_range("betas[1]", betas[1], 0, 1)
        check_range("eps", eps, 0)
        check_range("weight_decay", weight_decay, 0)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt": adapt})

    def _update(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        beta1, beta2 = group["betas"]
        states = [self.state[parameter] for parameter in parameters]
        for state, parameter in zip(states, parameters, strict=True):
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            state["step"] += 1
        means = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        steps = [float(state["step"]) for state in states]
        roots = list(torch._foreach_div(squares, [1 - beta2**step for step in steps]))
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        updates = list(torch._foreach_div(means, [1 - beta1**step for step in steps]))
        torch._foreach_div_(updates, roots)
        torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
        if group["adapt"]:
            weights, lengths = torch._foreach_norm(parameters), torch._foreach_norm(updates)
            torch._foreach_mul_(updates, trust_ratios(list(weights), list(lengths)))
        torch._foreach_add_(parameters, updates, alpha=-group["lr"])
