"""LARS and LAMB, which let a large batch train as a small one does: each layer's rate follows the norm of its weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from gradwire.trainer.optimizers.foreach import ForeachOptimizer, check_range


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
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "trust_coefficient": trust_coefficient, "adapt": adapt})
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
            pairs = zip(slopes, weights, strict=True)
            sums = [torch.where(slope > 0, slope + decay * weight, 0) for slope, weight in pairs]
            torch._foreach_mul_(updates, _trust_ratios(scaled, sums))
        torch._foreach_mul_(updates, group["lr"])
        buffers = [state["momentum_buffer"] for state in self._states(parameters, "momentum_buffer")]
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, updates)
        torch._foreach_sub_(parameters, buffers)


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
        states = self._states(parameters, "exp_avg", "exp_avg_sq", counts_steps=True)
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
            torch._foreach_mul_(updates, _trust_ratios(list(weights), list(lengths)))
        torch._foreach_add_(parameters, updates, alpha=-group["lr"])


def _trust_ratios(numerators: list[Tensor], denominators: list[Tensor]) -> list[Tensor]:
    """Return each numerator over its denominator, both of no dimension, and 1 where either is 0."""
    above, below = torch.stack(numerators), torch.stack(denominators)
    usable = (above > 0) & (below > 0)
    return list(torch.where(usable, above / torch.where(usable, below, 1), 1).unbind())
