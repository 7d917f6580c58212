"""The functions of reference, compiled for the CPU: the same bytes.

A kernel is compiled, or loaded from the disk, when it is first called. No Numba is imported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.collectives.kernels.cpu.library import kernel
from gradwire.collectives.kernels.layout import SELECT_AHEAD, SELECT_LEAST, SELECT_SAMPLES, pad16
from gradwire.collectives.kernels.reference.matrices import powersgd_accumulate as powersgd_accumulate
from gradwire.collectives.kernels.reference.matrices import powersgd_subtract as powersgd_subtract


def _addresses(*tensors: Tensor | None) -> list[int]:
    """Return the addresses of tensors; 0 for None."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


@lru_cache(maxsize=256)
def _words(*settings: Any) -> tuple[int, np.ndarray]:
    """Return the address of settings as at least two 64-bit words, and the words, which the caller keeps while a kernel uses
    them. A format of fp8 becomes whether it is e5m2."""
    numbers = [each == "e5m2" if isinstance(each, str) else each for each in settings]
    words = np.array([*numbers, 0, 0], dtype=np.int64)
    return words.ctypes.data, words


class CodecKernel:
    """A kernel that encodes or decodes, whose settings are words in memory.

    An encoder takes (values, residual, wire, numel, settings, seed), a decoder (wire, out, numel, settings, add, scale); it
    returns how many indices on the wire are outside of the result.
    """

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name

    def bound(self, *settings: Any) -> tuple[int, np.ndarray]:
        """Return the address of the C function, and the words whose address it takes as `settings`."""
        return kernel(self._module, self._name).address, _words(*settings)[1]

    def _call(self, tensors: Sequence[Tensor | None], numel: int, settings: Sequence[Any], *others: Any) -> int:
        place, _kept = _words(*settings)
        result: int = kernel(self._module, self._name).call(*_addresses(*tensors), numel, place, *others)
        return result


class Encoder(CodecKernel):
    """<codec>_encode, with the arguments of the reference."""

    def __call__(self, values: Tensor, residual: Tensor | None, wire: Tensor, *settings_and_seed: Any) -> None:
        *settings, seed = settings_and_seed
        self._call((values, residual, wire), values.numel(), settings, seed)


class Decoder(CodecKernel):
    """<codec>_decode, with the arguments of the reference. Raises ValueError for indices on the wire outside of the result."""

    def __call__(self, wire: Tensor, out: Tensor, *settings_and_how: Any) -> None:
        *settings, add, scale = settings_and_how
        if self._call((wire, out), out.numel(), settings, add, scale):
            raise _outside(out)


def _outside(out: Tensor) -> ValueError:
    return ValueError(
        f"the wire holds indices outside of [0, {out.numel()}): it was encoded from another number of elements"
    )


def _codec(module: str, name: str) -> tuple[Encoder, Decoder]:
    return Encoder(module, f"{name}_encode"), Decoder(module, f"{name}_decode")


fp16_encode, fp16_decode = _codec("quantize", "fp16")
bf16_encode, bf16_decode = _codec("quantize", "bf16")
fp8_encode, fp8_decode = _codec("quantize", "fp8")
int8_encode, int8_decode = _codec("quantize", "int8")
int4_encode, int4_decode = _codec("quantize", "int4")
onebit_encode, onebit_decode = _codec("onebit", "onebit")
qsgd_encode, qsgd_decode = _codec("stochastic", "qsgd")
terngrad_encode, terngrad_decode = _codec("stochastic", "terngrad")
natural_encode, natural_decode = _codec("stochastic", "natural")
randomk_encode, randomk_decode = _codec("sparse", "randomk")
chunktopk_encode, chunktopk_decode = _codec("chunks", "chunktopk")


def _select(
    values: Tensor,
    residual: Tensor | None,
    k: int,
    places: int,
    entries: int,
    momentum: Tensor | None = None,
    decay: float = 0.0,
    tau: Tensor | None = None,
) -> int:
    """Select into the part of a wire that begins at an address and holds so many entries. Return how many were."""
    n, slots = values.numel(), pad16(4 * entries) // 4
    capacity = min(n, max(4 * k + SELECT_LEAST, SELECT_SAMPLES))
    gathered = torch.empty((2, capacity + SELECT_AHEAD), dtype=torch.int32, device="cpu")  # their indices, and they
    parts = places, places + 4 * slots, slots
    lists = gathered[0].data_ptr(), gathered[1].data_ptr(), capacity
    *numbers, threshold = _addresses(values, residual, momentum, tau)
    count: int = kernel("selection", "select").call(*numbers, decay, n, k, threshold, entries - k, *parts, *lists)
    return count


def _scatter(places: int, entries: int, count: int, out: Tensor, add: bool, scale: float) -> None:
    """Scatter from the part of a wire at an address that has room for so many entries, `count` of them used."""
    numbers = places + pad16(4 * entries)
    if kernel("sparse", "scatter").call(places, numbers, count, out.data_ptr(), out.numel(), add, scale):
        raise _outside(out)


def topk_encode(values: Tensor, residual: Tensor | None, wire: Tensor, k: int) -> None:
    _select(values, residual, k, wire.data_ptr(), k)


def topk_decode(wire: Tensor, out: Tensor, k: int, add: bool, scale: float) -> None:
    _scatter(wire.data_ptr(), k, k, out, add, scale)


def dgc_encode(values: Tensor, residual: Tensor, wire: Tensor, k: int, momentum: Tensor, decay: float) -> None:
    _select(values, residual, k, wire.data_ptr(), k, momentum, decay)


def threshold_encode(
    values: Tensor, residual: Tensor | None, wire: Tensor, k: int, slack: int, tau: Tensor | None
) -> None:
    if tau is None:
        tau = torch.zeros(1, dtype=torch.float32, device="cpu")
    count = _select(values, residual, k, wire.data_ptr() + 16, k + slack, tau=tau)
    wire[:16].view(torch.int32).copy_(torch.tensor([count, 0, 0, 0], dtype=torch.int32, device="cpu"))


def threshold_decode(wire: Tensor, out: Tensor, k: int, slack: int, add: bool, scale: float) -> None:
    count = int(wire[:4].view(torch.int32))
    if not 0 <= count <= k + slack:
        raise ValueError(f"the wire holds {count} numbers where there is room for {k + slack}")
    _scatter(wire.data_ptr() + 16, k + slack, count, out, add, scale)


def powersgd_orthonormalize(factors: Tensor) -> None:
    _orthonormalize(factors, factors)


def powersgd_begin_next(factors: Tensor, first: Tensor, basis: Tensor, errors: Tensor) -> None:
    _orthonormalize(factors, basis, first.data_ptr(), errors.data_ptr(), errors[0].numel())


def _orthonormalize(factors: Tensor, out: Tensor, first: int = 0, errors: int = 0, numel: int = 0) -> None:
    _, rank, length = factors.shape
    done = torch.zeros((rank, (length + 127) // 128 * 128), dtype=torch.float64, device="cpu")
    others = done.data_ptr(), first, errors, numel
    kernel("matrices", "orthonormalize").call(*_addresses(factors, out), *factors.shape, *others)


def powersgd_multiply(left: Tensor, right: Tensor, tensors: Sequence[Tensor]) -> None:
    sizes = *left.shape[1:], right.shape[2]
    for p, q, tensor in zip(left, right, tensors, strict=True):
        product = tensor if tensor.dtype == torch.float32 else torch.empty_like(tensor, dtype=torch.float32)
        kernel("matrices", "multiply").call(*_addresses(p, q, product), *sizes)
        if product is not tensor:
            tensor.copy_(product)


def add_pieces(sums: Tensor, pieces: Sequence[Tensor], target: Tensor | None = None) -> None:
    table = torch.tensor([(piece.data_ptr(), piece.nbytes) for piece in pieces], dtype=torch.int64, device="cpu")
    kernel("memory", "add_pieces").call(table.data_ptr(), len(table), *_addresses(target, sums))


def hash_words(words: Tensor, place: int = 1) -> int:
    number: int = kernel("memory", "hash_words").call(words.data_ptr(), words.numel(), place)
    return number % 2**64
