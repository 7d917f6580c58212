"""Wrong orders, to see that they are found: calls that are left out, and calls that are added, in functions of gradwire."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch

from tests.simulated_gpu import cuda
from tests.simulated_gpu.clocks import where

_METHODS: dict[str, tuple[Any, str]] = {
    "wait_event": (cuda.Stream, "wait_event"),
    "wait_stream": (cuda.Stream, "wait_stream"),
    "record": (cuda.Event, "record"),
    "synchronize": (cuda.Event, "synchronize"),
    "record_stream": (torch.Tensor, "record_stream"),
    "stream": (cuda.StreamContext, "__enter__"),
}


#: What makes a wrong order in a with block.
Seed = Callable[[], AbstractContextManager[None]]


def without(method: str, place: str) -> Seed:
    """Leave out the calls of a stand-in's method that a function makes, or a helper which it calls. place: 'file.py function'."""
    return partial(_without, *_METHODS[method], *place.split())


@contextmanager
def _without(kind: Any, name: str, file: str, function: str) -> Iterator[None]:
    own = getattr(kind, name)

    @wraps(own)
    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(f"/{file}:" in line and line.endswith(f"({function})") for line in where(3).split(" < ")):
            if name == "__enter__":
                self._before = cuda.current.device, list(cuda.current.streams)
            return None
        return own(self, *args, **kwargs)

    with patch.object(kind, name, replaced):
        yield


def instead(target: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Seed:
    """Replace a function or method. target: 'module Class.method' or 'module function', below gradwire. change: returns what
    replaces it."""
    module, path = target.split()
    return partial(_instead, module, path, change)


@contextmanager
def _instead(module: str, path: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    holder: Any = import_module(f"gradwire.{module}")
    *outer, name = path.split(".")
    for each in outer:
        holder = getattr(holder, each)
    own = getattr(holder, name)
    with patch.object(holder, name, wraps(own)(change(own))):
        yield


def first(action: Callable[[], object]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a change for instead(): an action before each call."""

    def change(own: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            action()
            return own(*args, **kwargs)

        return run

    return change


def on_default_stream(own: Callable[..., Any]) -> Callable[..., Any]:
    """Change a function for instead(): it runs on the default stream."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.cuda.stream(torch.cuda.default_stream()):
            return own(*args, **kwargs)

    return run


def shared(own: Callable[..., Any]) -> Callable[..., Any]:
    """Change a method that returns memory, for instead(): all objects return the same for the same arguments."""
    made: dict[Any, Any] = {}

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return made.setdefault(args, own(self, *args, **kwargs))

    return run
