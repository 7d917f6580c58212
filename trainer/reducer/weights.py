"""How many samples the gradients of each rank stand for, so that their average is the gradient of the joint batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from gradwire.collectives import Communicator, PreparedOperation, Work
from gradwire.trainer.reducer.arguments import Average
from gradwire.trainer.reducer.setup import Combination

MESSAGE_NUMEL: Final = 2
"""The elements of the message in which the ranks sum their samples: the samples, and the ranks with a fault. The buckets of a
Reducer are larger."""

_MISSING: Final = "backward() without weigh(): call weigh() before each backward(), on all ranks, or never"


class Weights:
    """Counts the samples of this rank's gradients, and finds by what the rank multiplies its gradients in an exchange.

    The result of an exchange is the sum of samples * gradient over the ranks; with op="average", divided by the samples of all
    ranks. The ranks sum their samples before they send gradients, so everything that they send has the unit of the result:
    buckets, codecs, shards and residuals are the same as without weights, and residuals stay right when the samples change.

    Within a window, parameter.grad * unit is the sum of samples * gradient over the passes. To keep it so, weigh() multiplies
    accumulated gradients if a pass has more or fewer samples than the one before.

    is_used: whether weigh() was ever called; from then on, every pass needs it. factor: by what the last exchange multiplied this
    rank's gradients. loss_factor: by what the mean loss of this rank's samples is multiplied. Both are 1.0 without weights.
    samples: those of this rank in the last window. kept: while a pass stands for no samples, the gradients before it, by
    parameter; None in other passes. fault: text of the ValueError that all ranks will raise in the exchange.
    """

    def __init__(self) -> None:
        self.is_used = False
        self.factor = self.loss_factor = 1.0
        self.samples = 0.0
        self.fault = ""
        self._message: Tensor | None = None
        self._sum: PreparedOperation | None = None
        self._work: Work | None = None  # the running sum
        self._is_agreed = False
        self._next: float | None = None  # the samples of the next pass
        self._counted = self._unit = 0.0
        self._passes = 0
        self.kept: dict[int, Tensor] | None = None

    def weigh(self, samples: float | Tensor, accumulated: Mapping[int, Tensor]) -> None:
        """Set the samples of the next pass; the last call before a pass counts. accumulated: the gradients of the passes of this
        window, by parameter. Raises TypeError unless samples is a number; the exchange raises other faults, on all ranks."""
        if isinstance(samples, bool) or not isinstance(samples, int | float | Tensor):
            raise TypeError(f"samples must be a number, not {samples!r}")
        count = float(samples)
        self.is_used, self.kept = True, None
        if not (math.isfinite(count) and count >= 0):
            self.fail(f"weigh({samples!r}): the number of samples must be finite and at least 0")
            return
        if accumulated and not self._passes:
            self.fail(_MISSING)
        if not count:
            self.kept = {index: gradient.clone() for index, gradient in accumulated.items()}
        elif self._unit not in (0.0, count):
            for gradient in accumulated.values():
                gradient.mul_(self._unit / count)
        self._next, self._unit = count, count or self._unit

    def begin_pass(self) -> None:
        """Count the samples of a pass, which begins."""
        if self._next is None:
            self.fail(_MISSING)
        self._counted += self._next or 0.0
        self._next = None
        self._passes += 1

    def before_pass(self, index: int, gradient: Tensor) -> Tensor:
        """Return the gradient of a parameter as it was before a pass without samples, whose own gradient may be NaN."""
        before = None if self.kept is None else self.kept.get(index)
        if before is None:
            return gradient.zero_()
        return gradient.copy_(before) if gradient.layout is before.layout else before

    def fail(self, fault: str) -> None:
        """Let all ranks raise ValueError with this text in the exchange."""
        self.fault = self.fault or fault

    def begin(self, communicator: Communicator, *, awaited: bool = False) -> None:
        """Begin to sum the samples of all ranks, unless that has begun. It is the first operation of an exchange. awaited: see
        PreparedOperation.start()."""
        if self._work is not None or self._is_agreed:
            return
        if not (self._passes or self._next is not None):
            self.fail(_MISSING)
        self._counted += self._next or 0.0  # of a rank without a backward()
        self._next = None
        if self._message is None or self._sum is None:
            self._message = torch.zeros(MESSAGE_NUMEL, dtype=torch.float64, device=communicator.control_device)
            self._sum = communicator.prepare_allreduce(self._message)
        self._message.copy_(torch.tensor([self._counted, bool(self.fault)], dtype=torch.float64, device="cpu"))
        self._work = self._sum.start(awaited=awaited)

    @property
    def is_summing(self) -> bool:
        """Return whether the ranks sum their samples now."""
        return self._work is not None

    @property
    def are_known(self) -> bool:
        """Return whether agree() would return without waiting."""
        return self._is_agreed or (self._work is not None and self._work.is_completed())

    def agree(self, combination: Combination) -> None:
        """Wait until the samples of all ranks are summed, and set the factors. Raises ValueError on all ranks if a rank has a
        fault, or if no rank has samples."""
        if self._is_agreed:
            return
        self.begin(combination.communicator, awaited=True)
        assert self._work is not None
        assert self._message is not None
        work, self._work = self._work, None
        work.wait(math.inf if self._message.is_cuda else None)
        total, faults = self._message.tolist()
        self.samples, unit, fault = self._counted, self._unit if self._counted else 0.0, self.fault
        if faults or not total:
            self.close()
            if not faults:
                raise ValueError("weigh(): the samples of all ranks add up to 0")
            everyones = combination.communicator.allgather_record(fault)
            raise ValueError("; ".join(f"rank {rank}: {each}" for rank, each in enumerate(everyones) if each))
        self._is_agreed = True
        scale = combination.inputs / total if combination.op == Average else 1.0
        self.factor, self.loss_factor = unit * scale, self.samples * scale

    def forget(self) -> None:
        """Forget the passes so far, whose gradients are discarded. weigh() may have been called for the next one."""
        self._counted, self._passes, self._unit, self.fault = 0.0, 0, self._next or 0.0, ""
        if self.kept is not None:
            self.kept = {}

    def close(self) -> None:
        """End the window."""
        self._is_agreed, self._next, self.kept = False, None, None
        self.forget()


class WeightsByCall(Weights):
    """Weights where no hook sees every pass: a pass has come between two calls of weigh() if gradients have changed."""

    def __init__(self) -> None:
        super().__init__()
        self._marks: dict[int, tuple[int, int]] = {}

    def weigh(self, samples: float | Tensor, accumulated: Mapping[int, Tensor]) -> None:
        """See Weights.weigh(). accumulated: the gradients of all parameters, by parameter."""
        self.count(accumulated)
        super().weigh(samples, accumulated if self._passes else {})
        self._marks = _marks(accumulated)

    def count(self, gradients: Mapping[int, Tensor]) -> None:
        """Count the pass that has followed the last weigh(), if any, and undo its changes if it stands for no samples. Without
        gradients, there are no passes: they have been discarded."""
        if not gradients:
            self.forget()
        elif self._next is not None and _marks(gradients) != self._marks:
            self.begin_pass()
            if self.kept is not None:
                for index, gradient in gradients.items():
                    self.before_pass(index, gradient)

    def end(self, gradients: Mapping[int, Tensor]) -> float:
        """End a window whose gradients are not exchanged. Return by what to multiply them to get the mean over the samples of all
        passes."""
        self.count(gradients)
        if not (self._passes or self._next is not None):
            self.fail(_MISSING)
        self.samples = self._counted + (self._next or 0.0)
        factor, fault = self._unit / self.samples if self.samples else 0.0, self.fault
        self.close()
        self.fault = fault
        return factor


def _marks(gradients: Mapping[int, Tensor]) -> dict[int, tuple[int, int]]:
    """Return numbers that change with the gradients."""
    return {index: (id(gradient), gradient._version) for index, gradient in gradients.items()}
