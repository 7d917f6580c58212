"""Nesterov momentum for gradients that come one by one, and late, as an asynchronous parameter server's do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from gradwire.trainer.optimizers.foreach import ForeachOptimizer, check_range


class DelayedNesterov(ForeachOptimizer):
    """Steps as SGD does, with a momentum that follows the average of `delay` gradients.

    This is Delayed Nesterov (Liu, Chhaparia, Douillard et al. 2024, algorithm 3, with N = delay and beta = momentum):

        s = s + g
        every delay-th step:    m = momentum * m + s / delay,  s = 0
                                w = w - lr * (g / delay + (1 - (delay - 1) * c) * momentum * m)
        any other step:         w = w - lr * (g / delay + c * momentum * m)

    Over `delay` steps it equals one step of Nesterov SGD with the average gradient; with delay=1 it is torch's SGD with
    nesterov=True. If every gradient is an update of its own, ordinary momentum would apply outdated gradients repeatedly.
    Steps are counted per parameter.

    lr: the learning rate, at least 0.
    momentum: at least 0 and below 1.
    delay: the number of gradients, at least 1; with an asynchronous server, at least the number of workers.
    c: the part of the momentum that every other step applies, from 0 to 1 / delay.
    """

    def __init__(self, params: ParamsT, lr: float, momentum: float = 0.9, delay: int = 1, c: float = 0.0) -> None:
        check_range("lr", lr, 0)
        check_range("momentum", momentum, 0, 1)
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
