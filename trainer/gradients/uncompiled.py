"""Keeping torch.compile out of code that is not to be compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function run as it is written, with all that it calls, where compiled code or its backward() comes to it.

    Importing the compiler takes a second, so it is asked for at the first call: by then an optimizer has imported it
    anyway.
    """
    disabled: Callable[P, R] | None = None

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal disabled
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    return run
