"""How many samples the gradients of each rank stand for, so that their average is the gradient of the joint batch."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from gradwire.collectives import Communicator, Mismatch, PreparedOperation, Work
from gradwire.collectives.errors import ranks_text
from gradwire.trainer.reducer.arguments import Average
from gradwire.trainer.reducer.setup import Combination

MESSAGE_NUMEL: Final = 2
"""The elements of the message in which the ranks sum their samples: the samples, and the ranks with a fault. The buckets of a
Reducer are larger, since gradients are aligned."""

_SUM: Final = f"allreduce(float64[{MESSAGE_NUMEL}], sum"
"""How the call begins that sums the samples."""

_MISSING: Final = (
    "backward() without weigh(): either all ranks call it before each backward(), or none does. Checkpoints with "
    "use_reentrant=True call backward() several times, and do not support it"
)


@dataclass
class _Window:
    """The passes of a rank from one exchange to the next.

    passes: their number. samples: those of all of them. unit: by what parameter.grad must be multiplied to get the sum of
    samples * gradient over the passes. next: the samples of the next pass, once they are known. before: the gradients from before
    the present pass, by parameter, if it stands for no samples. left: the gradients that the passes have left, by parameter, with
    their versions; None after a pass that has failed. fault: text of the ValueError that all ranks raise in the exchange. sum:
    the running sum of the samples of all ranks. is_agreed: whether the factors are those of this window.
    """

    passes: int = 0
    samples: float = 0.0
    unit: float = 0.0
    next: float | None = None
    before: dict[int, Tensor] | None = None
    left: dict[int, tuple[TensorWeakRef, int]] | None = None
    fault: str = ""
    sum: Work | None = None
    is_agreed: bool = False


class Weights:
    """Counts the samples of this rank's gradients, and finds by what the rank multiplies its gradients in an exchange.

    The result of an exchange is the sum of samples * gradient over the ranks; with op="average", divided by the samples of all
    ranks. The ranks sum their samples before they send gradients, so everything that they send has the unit of the result:
    buckets, codecs, shards and residuals are the same as without weights, and residuals stay right when the samples change.

    backward() adds gradients of mean losses to parameter.grad. So if a pass has other samples than the one before, weigh()
    multiplies the accumulated gradients, so that samples of both passes count alike.

    is_used: whether weigh() was ever called; from then on, every pass needs it. may_be_empty: whether no rank needs to have
    samples. factor: by what the last exchange multiplied this rank's gradients. loss_factor: by what the mean loss of this rank's
    samples is multiplied. Both are 1.0 without weights. samples: those of this rank in the last exchange.
    """

    def __init__(self) -> None:
        self.is_used = self.may_be_empty = False
        self.factor = self.loss_factor = 1.0
        self.samples = 0.0
        self._window = _Window()
        self._message: Tensor | None = None
        self._operation: PreparedOperation | None = None

    # Before and during passes

    def weigh(self, samples: float | Tensor, accumulated: Mapping[int, Tensor]) -> None:
        """Set the samples of the next pass; the last call before a pass counts. accumulated: the gradients of the passes of this
        window, by parameter. If the program has set them to None or 0 since, it has discarded these passes. Torch does not notice
        changes through grad.data. Raises TypeError unless samples is a number; the exchange raises other faults, on all ranks."""
        given: object = samples.item() if isinstance(samples, Tensor) and samples.numel() == 1 else samples
        if isinstance(given, bool) or not isinstance(given, numbers.Real):
            raise TypeError(f"samples must be a number, not {samples!r}")
        count = float(given)
        self.is_used = True
        if self._window.is_agreed:  # the exchange has failed
            self._window = _Window()
        if self._window.passes and not (self._is_as_left(accumulated) or _any(accumulated)):
            self.forget()
            accumulated = {}
        window = self._window
        window.before = None
        if not (math.isfinite(count) and count >= 0):
            self.fail(f"weigh({samples!r}): the number of samples must be finite and at least 0")
            return
        if accumulated and not window.passes:
            self.fail(_MISSING)
        if not count:
            window.before = {index: gradient.clone() for index, gradient in accumulated.items()}
        elif window.unit not in (0.0, count):
            for gradient in accumulated.values():
                gradient.mul_(window.unit / count)
            self.end_pass(accumulated)
        window.next, window.unit = count, count or window.unit

    def begin_pass(self) -> None:
        """Count the samples of a pass, which begins."""
        window = self._window
        if window.next is None:
            self.fail(_MISSING)
        window.samples += window.next or 0.0
        window.next = None
        window.left = None
        window.passes += 1

    def end_pass(self, accumulated: Mapping[int, Tensor]) -> None:
        """Note the gradients of the passes so far, at the end of one. There are none if the exchange has ended the window."""
        noted = {index: (TensorWeakRef(gradient), gradient._version) for index, gradient in accumulated.items()}
        self._window.left = noted or None

    def _is_as_left(self, accumulated: Mapping[int, Tensor]) -> bool:
        """Return whether the gradients are those that the last pass has left, unchanged. They may be 0, as those of a hinge
        loss."""
        return self._window.left is not None and all(
            (gradient := accumulated.get(index)) is not None and left() is gradient and gradient._version == version
            for index, (left, version) in self._window.left.items()
        )

    @property
    def passes(self) -> int:
        """Return the number of passes in this window."""
        return self._window.passes

    @property
    def discards_pass(self) -> bool:
        """Return whether the present pass stands for no samples, so that undo_pass() is needed for each of its gradients."""
        return self._window.before is not None

    def undo_pass(self, index: int, gradient: Tensor) -> Tensor:
        """Return the gradient of a parameter as it was before the present pass, in which it may have become NaN."""
        before = None if self._window.before is None else self._window.before.get(index)
        if before is None:
            return gradient.zero_()
        return gradient.copy_(before) if gradient.layout is before.layout else before

    def fail(self, fault: str) -> None:
        """Let all ranks raise ValueError with this text in the exchange."""
        self._window.fault = self._window.fault or fault

    # In an exchange

    def begin(self, communicator: Communicator, *, awaited: bool = False) -> None:
        """Begin to sum the samples of all ranks, unless that has begun. It is the first operation of an exchange. awaited: see
        PreparedOperation.start()."""
        window = self._window
        if window.sum is not None or window.is_agreed:
            return
        if not window.passes and window.next is None:
            self.fail(_MISSING)
        window.samples += window.next or 0.0  # of a rank without a backward()
        window.next = None
        if self._message is None or self._operation is None:
            self._message = torch.zeros(MESSAGE_NUMEL, dtype=torch.float64, device=communicator.control_device)
            self._operation = communicator.prepare_allreduce(self._message)
        self._message.copy_(torch.tensor([window.samples, bool(window.fault)], dtype=torch.float64, device="cpu"))
        window.sum = self._operation.start(awaited=awaited)

    @property
    def sum(self) -> Work | None:
        """Return the sum of the samples, from begin() to agree()."""
        return self._window.sum

    @property
    def are_known(self) -> bool:
        """Return whether agree() would return without waiting."""
        window = self._window
        return window.is_agreed or (window.sum is not None and window.sum.is_completed())

    def agree(self, combination: Combination) -> None:
        """Wait until the samples of all ranks are summed, and set the factors. Raises ValueError on all ranks if a rank has a
        fault, or if no rank has samples."""
        window = self._window
        if window.is_agreed:
            return
        self.begin(combination.communicator, awaited=True)
        assert window.sum is not None
        assert self._message is not None
        try:
            # On a GPU, wait() without a limit would only enqueue the wait.
            window.sum.wait(math.inf if self._message.is_cuda else None)
        except Mismatch as error:
            explain(error)
            raise
        total, faults = self._message.tolist()
        if faults or not (total or self.may_be_empty):
            self.close()
            if not faults:
                raise ValueError("weigh(): the samples of all ranks add up to 0. Leave out this batch on all ranks")
            everyones = combination.communicator.allgather_record(window.fault)
            raise ValueError("; ".join(f"rank {rank}: {each}" for rank, each in enumerate(everyones) if each))
        window.sum, window.is_agreed, self.samples = None, True, window.samples
        scale = combination.inputs / (total or 1.0) if combination.op == Average else 1.0
        self.factor = window.unit * scale if self.samples else 0.0
        self.loss_factor = self.samples * scale

    def forget(self) -> None:
        """Forget the passes of this window, whose gradients are discarded; not the samples of the next one. A running sum, of a
        backward() that has failed, goes on."""
        given, before = self._window.next, self._window.before
        self._window = _Window(
            next=given, unit=given or 0.0, before=None if before is None else {}, sum=self._window.sum
        )

    def close(self) -> None:
        """End the window."""
        self._window = _Window()


def _any(gradients: Mapping[int, Tensor]) -> bool:
    """Return whether any gradient has a number other than 0."""
    return any(bool(gradient.any()) for gradient in gradients.values())


def explain(error: Mismatch) -> None:
    """Say in an error that only some ranks have called weigh(), if that is its cause."""
    weighed = {rank for rank, call in error.calls.items() if call.startswith(_SUM)}
    if weighed and (others := error.calls.keys() - weighed):
        cause = (
            f"{ranks_text(weighed)} called weigh() before backward(), and {ranks_text(others)} did not: either all ranks call it "
            "before each backward(), or none does"
        )
        error.args = (f"{error}. {cause}", *error.args[1:])
