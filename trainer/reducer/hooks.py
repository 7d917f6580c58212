"""Hooks of parameters, modules and optimizers, which live longer than what the hooks serve."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch.utils.hooks import RemovableHandle

from gradwire.collectives.torch_internals import uncompiled


def remove_all(hooks: Iterable[RemovableHandle]) -> None:
    """Remove hooks, unless they are removed already."""
    for hook in hooks:
        hook.remove()


@dataclass(frozen=True, eq=False)
class Weakly:
    """A hook of a module or optimizer that calls a method. It does not keep the method's object alive, and does nothing in a copy
    of the hooked object."""

    method: weakref.WeakMethod[Callable[..., None]] | None = None

    @classmethod
    def of(cls, method: Callable[..., None]) -> Weakly:
        return cls(weakref.WeakMethod(method))

    @uncompiled
    def __call__(self, *args: object) -> None:
        method = self.method() if self.method is not None else None
        if method is not None:
            method(*args)

    def __reduce__(self) -> tuple[type[Weakly], tuple[()]]:
        return Weakly, ()
