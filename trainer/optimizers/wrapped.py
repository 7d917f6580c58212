"""The base class of optimizers that wrap another one, and share its param groups, state and defaults."""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor


def shared(name: str) -> Any:
    """Return a property that reads, sets and deletes this attribute of the wrapped optimizer."""
    return property(
        lambda self: getattr(self.optimizer, name),
        lambda self, value: setattr(self.optimizer, name, value),
        lambda self: delattr(self.optimizer, name),
    )


class WrappingOptimizer(torch.optim.Optimizer):
    """Holds an optimizer as `.optimizer`, and shares its param groups, state and defaults. A subclass sets it and calls
    share_hooks() in place of torch's __init__.

    Public attributes and methods that only the wrapped optimizer has, such as first_step() of SAM, are those of the wrapped
    optimizer. Private ones are not shared: by them torch finds out what step() itself can do, such as to unscale gradients.
    """

    optimizer: torch.optim.Optimizer
    param_groups: list[dict[str, Any]] = shared("param_groups")
    state: defaultdict[Tensor, Any] = shared("state")
    defaults: dict[str, Any] = shared("defaults")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as torch does."""
        self.optimizer.zero_grad(set_to_none)

    def _before_method(self, name: str) -> None:
        """Prepare for the call of a method of the wrapped optimizer. Raises RuntimeError if the result would be wrong."""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped optimizer; this class has none of this name."""
        if name.startswith("_") or "optimizer" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        value = getattr(self.optimizer, name)
        if not inspect.ismethod(value):
            return value

        @functools.wraps(value)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._before_method(name)
            return value(*args, **kwargs)

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the wrapped optimizer if only that has it, or else of this object."""
        is_own = (
            name.startswith("_") or name in vars(self) or hasattr(type(self), name) or "optimizer" not in vars(self)
        )
        if is_own or not hasattr(self.optimizer, name):
            super().__setattr__(name, value)
        else:
            setattr(self.optimizer, name, value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled: save its state_dict()")


def tensors_of(param_groups: list[dict[str, Any]]) -> list[Tensor]:
    """Return all parameters, each once, in order."""
    return list(dict.fromkeys(parameter for group in param_groups for parameter in group["params"]))
