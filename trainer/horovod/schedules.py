"""Learning rates for large batches: scaled with the number of ranks, after a warm-up."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from gradwire.trainer.world.world import names_rank, size


class WarmupLR(LRScheduler):
    """Raises the learning rate linearly, step by step, to `factor` times its initial value.

    With it, a batch that is `factor` times as large trains in the same number of epochs (Goyal et al. 2017, "Accurate, Large
    Minibatch SGD", sections 2.1 and 2.2). Give the optimizer the learning rate of one rank, and call step() after every
    optimizer.step(). It can be combined with torch's chainable schedulers, such as StepLR: each multiplies the current rate.

    optimizer: a DistributedOptimizer, or the optimizer that it wraps.
    steps_per_epoch: the number of steps in an epoch.
    warmup_epochs: the number of epochs, possibly fractional, after which the full rate is reached; 0: from the start.
    factor: how many times as large the batch is as that of one rank; None: the number of ranks. With
    backward_passes_per_step > 1, pass the number of ranks times backward_passes_per_step.

    Raises ValueError for invalid arguments.
    """

    @names_rank
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        steps_per_epoch: int,
        warmup_epochs: float = 5.0,
        factor: float | None = None,
        last_epoch: int = -1,
    ) -> None:
        if not isinstance(steps_per_epoch, int) or steps_per_epoch < 1:
            raise ValueError(f"steps_per_epoch must be a whole number >= 1, not {steps_per_epoch!r}")
        if not (math.isfinite(warmup_epochs) and warmup_epochs >= 0):
            raise ValueError(f"warmup_epochs must be a finite number >= 0, not {warmup_epochs!r}")
        if factor is not None and not (math.isfinite(factor) and factor > 0):
            raise ValueError(f"factor must be a finite number > 0, or None for the number of ranks, not {factor!r}")
        self.warmup_steps = round(warmup_epochs * steps_per_epoch)
        self.factor = float(size() if factor is None else factor)
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Any]:  # list[float | Tensor]; in some versions of torch list[float]
        """Return the learning rate of each param group for the current step; step() calls this."""
        before = self._multiplier(self.last_epoch - 1) if self.last_epoch > 0 else 1.0
        change = self._multiplier(self.last_epoch) / before
        return [float(group["lr"]) * change for group in self.optimizer.param_groups]

    def _multiplier(self, step: int) -> float:
        """Return a step's rate as a multiple of the initial rate."""
        done = min(1.0, step / self.warmup_steps) if self.warmup_steps else 1.0
        return 1 + (self.factor - 1) * done
