"""Optimizers that step over lists of tensors: LARS and LAMB, which adapt each layer's rate to the norm of its weights, for
large batches; and Nesterov momentum for gradients that arrive one by one, and late, as at an asynchronous parameter server."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT


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
                state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
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


class LARS(ForeachOptimizer):
    """Steps as SGD with momentum does, with a rate for each parameter tensor (You, Gitman, Ginsburg 2017, algorithm 1):

        rate = lr * trust_coefficient * |w| / (|g| + weight_decay * |w|)
        v = momentum * v + rate * (g + weight_decay * w)
        w = w - v

    If |w| or |g| is 0, or the group has adapt=False (usual for biases and normalization layers), rate = lr. lr,
    weight_decay: at least 0. momentum: at least 0 and below 1. trust_coefficient: above 0.
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
        _check_range("lr", lr, 0)
        _check_range("momentum", momentum, 0, 1)
        _check_range("weight_decay", weight_decay, 0)
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

    If |w| or |r| is 0, or the group has adapt=False (usual for biases and normalization layers), 1 replaces
    |w| / |r|. t counts the steps of a parameter. lr, eps, weight_decay: at least 0. betas: each at least 0 and below 1.
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
        _check_range("lr", lr, 0)
        _check_range("betas[0]", betas[0], 0, 1)
        _check_range("betas[1]", betas[1], 0, 1)
        _check_range("eps", eps, 0)
        _check_range("weight_decay", weight_decay, 0)
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


class DelayedNesterov(ForeachOptimizer):
    """Steps as SGD does, with a momentum that follows the average of `delay` gradients.

    This is Delayed Nesterov (Liu, Chhaparia, Douillard et al. 2024, algorithm 3, with N = delay and beta = momentum):

        s = s + g
        every delay-th step:    m = momentum * m + s / delay,  s = 0
                                w = w - lr * (g / delay + (1 - (delay - 1) * c) * momentum * m)
        any other step:         w = w - lr * (g / delay + c * momentum * m)

    With c=0, `delay` steps equal one step of Nesterov SGD with the average gradient; with delay=1 this is torch's SGD with
    nesterov=True. If an asynchronous server makes an update from each gradient, ordinary momentum applies outdated gradients
    repeatedly. Steps are counted per parameter.

    lr: the learning rate, at least 0.
    momentum: at least 0 and below 1.
    delay: the number of gradients, at least 1; with an asynchronous server, at least the number of workers.
    c: the part of the momentum that a step applies if it is not a delay-th step, from 0 to 1 / delay.
    """

    def __init__(self, params: ParamsT, lr: float, momentum: float = 0.9, delay: int = 1, c: float = 0.0) -> None:
        _check_range("lr", lr, 0)
        _check_range("momentum", momentum, 0, 1)
        if not isinstance(delay, int) or delay < 1:
            raise ValueError(f"delay must be a whole number >= 1, not {delay!r}")
        if not 0 <= c <= 1 / delay:
            raise ValueError(f"c must be from 0 to 1 / delay = {1 / delay:g}, not {c!r}")
        super().__init__(params, {"lr": lr, "momentum": momentum, "delay": delay, "c": c})

    def _update(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        delay, momentum, c = group["delay"], group["momentum"], group["c"]
        states = self._states(parameters, "gradient_sum", "momentum_buffer", counts_steps=True)
        torch._foreach_add_([state["gradient_sum"] for state in states], gradients)
        torch._foreach_add_(parameters, gradients, alpha=-group["lr"] / delay)
        due = [parameter for parameter in parameters if int(self.state[parameter]["step"]) % delay == 0]
        if due:
            sums = [self.state[parameter]["gradient_sum"] for parameter in due]
            buffers = [self.state[parameter]["momentum_buffer"] for parameter in due]
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, sums, alpha=1 / delay)
            torch._foreach_zero_(sums)
            torch._foreach_add_(due, buffers, alpha=-group["lr"] * momentum * (1 - (delay - 1) * c))
        others = [parameter for parameter in parameters if int(self.state[parameter]["step"]) % delay]
        if others and c > 0:
            buffers = [self.state[parameter]["momentum_buffer"] for parameter in others]
            torch._foreach_add_(others, buffers, alpha=-group["lr"] * momentum * c)


def _check_range(name: str, value: float, least: float, below: float = float("inf")) -> None:
    """Raise ValueError unless least <= value < below."""
    if not least <= value < below:
        upper = "" if below == float("inf") else f" and below {below:g}"
        raise ValueError(f"{name} must be at least {least:g}{upper}, not {value!r}")


def _trust_ratios(numerators: list[Tensor], denominators: list[Tensor]) -> list[Tensor]:
    """Return each numerator over its denominator, both of no dimension, and 1 where either is 0."""
    above, below = torch.stack(numerators), torch.stack(denominators)
    usable = (above > 0) & (below > 0)
    return list(torch.where(usable, above / torch.where(usable, below, 1), 1).unbind())
