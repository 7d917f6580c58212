"""Launches of quantize.cu: the functions of reference.quantize on a GPU. They write the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from gradwire.collectives.kernels.cuda.launch import NUMBERS, THREADS, KernelLaunch, literal
from gradwire.collectives.kernels.reference import quantize as reference

_TENSOR = np.dtype(
    [("values", "u8"), ("residual", "u8"), ("wire", "u8"), ("numel", "i8"), ("seed", "u4"), ("scale", "f4")]
)
_FRACTION = {"e4m3": 3, "e5m2": 2}  # bits of the mantissa
_WARPS = THREADS // 32
_BLOCKS = (16, 32, 64, 128, 256, 512, 1024)  # lengths that a warp holds in registers


@lru_cache(maxsize=None, typed=True)
def _instance(name: str, template: str, block_at: int, *settings: Any) -> tuple[str, int] | None:
    """Return the type of a codec as C++ text, and the number of elements that a warp processes (Layout::TILE of codecs.cuh).
    Return None if a block is too long for a warp."""
    block = settings[block_at] if settings else 512
    if block not in _BLOCKS:
        return None
    written = [literal(value) if isinstance(value, bool) else _FRACTION.get(value, value) for value in settings]
    return template.format(*written), 1024 if block > 512 or name == "onebit" else 512


def _codec(name: str, template: str, block_at: int = 0) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return <name>_encode and <name>_decode, with the arguments of the functions of reference.quantize.

    template: the codec's type in codecs.cuh, with the places of its settings. block_at: the place of `block` among them.
    """

    def encode(self: Quantizers, values: Tensor, residual: Tensor | None, wire: Tensor, *given: Any) -> None:
        *settings, seed = given
        if instance := _instance(name, template, block_at, *settings):
            codec, tile = instance
            kernel = f"encode<{codec}, {literal(residual is not None)}, {NUMBERS[values.dtype]}>"
            self.work_through(kernel, tile, values, residual, wire, seed=seed)
        else:
            getattr(reference, f"{name}_encode")(values, residual, wire, *given)

    def decode(self: Quantizers, wire: Tensor, out: Tensor, *given: Any) -> None:
        *settings, add, scale = given
        if instance := _instance(name, template, block_at, *settings):
            codec, tile = instance
            kernel = f"decode<{codec}, {literal(add)}, {NUMBERS[out.dtype]}>"
            self.work_through(kernel, tile, out, None, wire, scale=scale)
        else:
            getattr(reference, f"{name}_decode")(wire, out, *given)

    return encode, decode


class Quantizers:
    """Runs the dense codecs. The reference handles blocks whose length is not a power of two from 16 to 1024."""

    def __init__(self, launch: KernelLaunch) -> None:
        self._launch = launch

    fp16_encode, fp16_decode = _codec("fp16", "Fp16")
    bf16_encode, bf16_decode = _codec("bf16", "Bf16")
    fp8_encode, fp8_decode = _codec("fp8", "Fp8<{1}, {0}>", block_at=1)
    int8_encode, int8_decode = _codec("int8", "Int8<{0}, {1}>")
    int4_encode, int4_decode = _codec("int4", "Int4<{0}, {1}>")
    onebit_encode, onebit_decode = _codec("onebit", "OneBit<{0}>")
    qsgd_encode, qsgd_decode = _codec("qsgd", "Qsgd<{1}, {0}>", block_at=1)
    terngrad_encode, terngrad_decode = _codec("terngrad", "TernGrad<{0}>")
    natural_encode, natural_decode = _codec("natural", "Natural")

    def work_through(
        self,
        kernel: str,
        tile: int,
        values: Tensor,
        residual: Tensor | None,
        wire: Tensor,
        *,
        seed: int = 0,
        scale: float = 1.0,
    ) -> None:
        """Launch a kernel of quantize.cu. tile: how many elements a warp processes."""
        numel = values.numel()
        if numel > 0:
            lost = 0 if residual is None else residual.data_ptr()
            addresses = values.data_ptr(), lost, wire.data_ptr()
            parameters = np.array((*addresses, numel, seed & 0xFFFFFFFF, scale), _TENSOR)
            touched = [tensor for tensor in (values, residual, wire) if tensor is not None]
            self._launch("quantize", kernel, -(-numel // (tile * _WARPS)), parameters, touched)
