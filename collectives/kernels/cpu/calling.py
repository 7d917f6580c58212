"""Calls of the codecs' kernels, with the addresses of tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, ClassVar

import numpy as np
import torch

from gradwire.collectives.kernels.cpu.compiling import compiled
from gradwire.collectives.kernels.cpu.object_files import CFunction

#: (values, residual, wire, numel, settings, seed), and (wire, out, numel, settings, add, scale), which returns how many indices
#: on the wire are outside of the result. Of a float32 each `values`, `residual` and `out`; residual may be 0.
ENCODES = "void(int64, int64, int64, int64, int64, int64)"
DECODES = "int64(int64, int64, int64, int64, int64, float32)"


@cache
def kernel_of(function: Callable[..., Any], signature: str = "") -> CFunction:
    """Return a function compiled, or loaded from the disk. signature: by default, `scale` and `decay` are float32, and all else
    and the result int64."""
    if not signature:
        names = inspect.signature(function).parameters
        signature = f"int64({', '.join('float32' if name in ('scale', 'decay') else 'int64' for name in names)})"
    return compiled(signature)(function)


def addresses(*tensors: torch.Tensor | None) -> list[int]:
    """Return the addresses of tensors; 0 for None."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


@lru_cache(maxsize=256)
def _words(*settings: int) -> tuple[int, np.ndarray]:
    """Return the address of settings as 64-bit words, and the words, which the caller keeps while a function uses them."""
    words = np.array(settings, dtype=np.int64)
    return words.ctypes.data, words


class CodecKernel:
    """A C function that encodes or decodes, compiled or loaded from the disk when it is first used.

    of_settings: returns the integers that the function takes, for the settings of its codec.
    """

    signature: ClassVar[str]

    def __init__(
        self, function: Callable[..., Any], of_settings: Callable[..., tuple[int, ...]] = lambda *settings: settings
    ) -> None:
        self._function = function
        self._of_settings = of_settings

    def bound(self, *settings: Any) -> tuple[int, np.ndarray]:
        """Return the address of the function, and the words whose address it takes as `settings`."""
        return kernel_of(self._function, self.signature).address, self._in_words(*settings)[1]

    def _call(self, *arguments: Any) -> Any:
        return kernel_of(self._function, self.signature).call(*arguments)

    def _in_words(self, *settings: Any) -> tuple[int, np.ndarray]:
        return _words(*self._of_settings(*settings))


class Encoder(CodecKernel):
    """<codec>_encode, with the arguments of the reference, for a kernel of the signature ENCODES.

    draws: whether the last argument is a seed; the kernel gets 0 otherwise.
    """

    signature = ENCODES

    def __init__(self, *kernel: Any, draws: bool = True) -> None:
        super().__init__(*kernel)
        self._draws = draws

    def __call__(
        self, values: torch.Tensor, residual: torch.Tensor | None, wire: torch.Tensor, *parameters: Any
    ) -> None:
        *settings, seed = parameters if self._draws else (*parameters, 0)
        place, _kept = self._in_words(*settings)
        self._call(*addresses(values, residual, wire), values.numel(), place, seed)


class Decoder(CodecKernel):
    """<codec>_decode, with the arguments of the reference, for a kernel of the signature DECODES.

    It raises ValueError if the kernel counts indices on the wire that are outside of the result.
    """

    signature = DECODES

    def __call__(self, wire: torch.Tensor, out: torch.Tensor, *parameters: Any) -> None:
        *settings, add, scale = parameters
        place, _kept = self._in_words(*settings)
        if self._call(*addresses(wire, out), out.numel(), place, add, scale):
            raise ValueError(
                f"the wire holds indices outside of [0, {out.numel()}): it was encoded from another number of elements"
            )
