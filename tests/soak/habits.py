"""What programs do to gradients and to their model around a step, which must change nothing of what ranks have alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


class Habit:
    """Does nothing. before: called before backward(); between: after backward(), before step()."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.model = model
        self.optimizer = optimizer

    def before(self) -> None:
        self.optimizer.zero_grad()

    def between(self) -> None:
        pass

    def gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield the parameters that have gradients, with these."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                yield parameter, parameter.grad


class OtherData(Habit):
    """Clamps gradients by giving them other data, as old scripts do."""

    def between(self) -> None:
        for _, gradient in self.gradients():
            gradient.data = gradient.data.clamp(-1, 1)


class OtherGradients(Habit):
    """Replaces each gradient by another tensor."""

    def between(self) -> None:
        for parameter, gradient in list(self.gradients()):
            parameter.grad = gradient.clamp(-1, 1)


class Moves(Habit):
    """Converts the model to another dtype and back while it has gradients."""

    def before(self) -> None:
        super().before()
        self.model.double()
        self.model.float()

    def between(self) -> None:
        self.model.double()
        self.model.float()


class Detaches(Habit):
    """Zeroes gradients in place, after detaching them, as torch's first optimizers did."""

    def before(self) -> None:
        for _, gradient in self.gradients():
            gradient.detach_()
            gradient.zero_()


class Flat(Habit):
    """Keeps all gradients in one tensor of its own, and clamps that."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        super().__init__(model, optimizer)
        self._flat = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))

    def before(self) -> None:
        self._flat.zero_()
        parameters = list(self.model.parameters())
        parts = self._flat.split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)

    def between(self) -> None:
        self._flat.clamp_(-1, 1)


class Hooks(Habit):
    """Clips each gradient in a hook of its own."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        super().__init__(model, optimizer)
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-1, 1))


#: By what a fault prints of it.
HABITS: dict[str, Callable[[nn.Module, Any], Habit]] = {
    "none": Habit,
    "gives gradients other data": OtherData,
    "assigns other gradients": OtherGradients,
    "converts the model and back": Moves,
    "detaches gradients": Detaches,
    "keeps gradients in a tensor of its own": Flat,
    "clips in hooks": Hooks,
}
