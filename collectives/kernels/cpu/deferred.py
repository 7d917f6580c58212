"""Numba's names for the modules of kernels, which import Numba only when a kernel is compiled.

To import Numba and set it up takes most of a second on every rank; to load a compiled kernel needs no Numba. So in a process
that has compiled nothing, each of these names, and all that modules make from them, is a Deferred.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

if find_spec("numba") is None:
    raise ImportError("No module named 'numba'")

_PACKAGE = __name__.rpartition(".")[0]


class Deferred:
    """An attribute or a call of a name of Numba, evaluated once, when a kernel is compiled."""

    def __init__(self, evaluate: Callable[[], Any]) -> None:
        self._evaluate = evaluate
        self._value: list[Any] = []

    def __getattr__(self, name: str) -> Deferred:
        if name.startswith("__"):
            raise AttributeError(name)
        return Deferred(lambda: getattr(real(self), name))

    def __call__(self, *arguments: Any, **options: Any) -> Deferred:
        return Deferred(
            lambda: real(self)(*map(real, arguments), **{name: real(value) for name, value in options.items()})
        )

    def __bool__(self) -> bool:
        raise TypeError("a Deferred has no value before a kernel is compiled: use real()")


def real(value: Any) -> Any:
    """Return the value that a Deferred stands for; any other value itself."""
    if not isinstance(value, Deferred):
        return value
    if not value._value:
        value._value.append(value._evaluate())
    return value._value[0]


def use_numba(*others: dict[str, Any]) -> None:
    """Replace each Deferred by its value in all modules of kernels, and in other namespaces: Numba reads the names that a
    function uses from there."""
    modules = [vars(module) for name, module in list(sys.modules.items()) if name.startswith(f"{_PACKAGE}.")]
    for namespace in (*modules, *others):
        if namespace is not globals():
            for name, value in list(namespace.items()):
                if isinstance(value, Deferred):
                    namespace[name] = real(value)


def _module(name: str) -> Any:
    return Deferred(lambda: import_module(name))


numba = _module("numba")
cgutils = _module("numba.core.cgutils")
cfunc, intrinsic, njit, types = numba.cfunc, _module("numba.extending").intrinsic, numba.njit, numba.types
int8, int32, int64 = numba.int8, numba.int32, numba.int64
uint8, uint16, uint32, uint64 = numba.uint8, numba.uint16, numba.uint32, numba.uint64
float32, float64 = numba.float32, numba.float64
