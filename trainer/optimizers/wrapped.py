"""The base class of optimizers that wrap another one, and share its param groups, state and defaults."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def _shared(name: str) -> Any:
    """Return a property that reads and sets this attribute of the wrapped optimizer."""
    return property(
        lambda self: getattr(self.optimizer, name), lambda self, value: setattr(self.optimizer, name, value)
    )


class WrappingOptimizer(torch.optim.Optimizer):
    """Holds an optimizer as `.optimizer`, and shares its param groups, state and defaults. A subclass sets it and calls
    share_hooks() in place of torch's __init__."""

    optimizer: torch.optim.Optimizer
    param_groups: list[dict[str, Any]] = _shared("param_groups")
    state: defaultdict[Tensor, Any] = _shared("state")
    defaults: dict[str, Any] = _shared("defaults")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as torch does."""
        self.optimizer.zero_grad(set_to_none)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled: save its state_dict()")


def tensors_of(param_groups: list[dict[str, Any]]) -> list[Tensor]:
    """Return all parameters, each once, in order."""
    return list(dict.fromkeys(parameter for group in param_groups for parameter in group["params"]))


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that torch.compile does not compile, nor anything that it calls.

    Importing the compiler takes a second, so the first call does it: by then an optimizer has imported it anyway.
    """
    disabled: Callable[P, R] | None = None

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal disabled
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    return run
