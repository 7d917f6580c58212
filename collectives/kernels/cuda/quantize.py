"""Launches of quantize.cu: the functions of reference.quantize on a GPU. They write the same bytes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.collectives.kernels.cuda.launch import NUMBERS, THREADS, KernelLaunch, literal
from gradwire.collectives.kernels.reference import quantize as reference

_ARGUMENTS = struct.Struct("PPPqIf")  # of quantize.cu
_FRACTION = {"e4m3": 3, "e5m2": 2}  # bits of the mantissa
_WARPS = THREADS // 32
_BLOCKS = (16, 32, 64, 128, 256, 512, 1024)  # lengths that a warp holds in registers


class _Instance(NamedTuple):
    """A kernel, and the number of elements that one of its blocks processes."""

    kernel: str
    elements: int


@lru_cache(maxsize=None, typed=True)
def _instance(
    way: str, name: str, template: str, block_at: int, flag: bool, dtype: torch.dtype, *settings: Any
) -> _Instance | None:
    """Return a kernel of a codec. Return None if a block is too long for a warp.

    way: encode or decode. flag: whether there is a residual, or whether the decoder adds. dtype: of the values or the result.
    """
    block = settings[block_at] if settings else 512
    if block not in _BLOCKS:
        return None
    written = [literal(value) if isinstance(value, bool) else _FRACTION.get(value, value) for value in settings]
    tile = 1024 if block > 512 or name == "onebit" else 512  # Layout::TILE of codecs.cuh
    return _Instance(f"{way}<{template.format(*written)}, {literal(flag)}, {NUMBERS[dtype]}>", tile * _WARPS)


def _codec(name: str, template: str, block_at: int = 0) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return <name>_encode and <name>_decode, with the arguments of the functions of reference.quantize.

    template: the codec's type in codecs.cuh, with the places of its settings. block_at: the place of `block` among them.
    """

    def encode(self: Quantizers, values: Tensor, residual: Tensor | None, wire: Tensor, *given: Any) -> None:
        *settings, seed = given
        instance = _instance("encode", name, template, block_at, residual is not None, values.dtype, *settings)
        if instance is None:
            getattr(reference, f"{name}_encode")(values, residual, wire, *given)
        else:
            self._launch_tiles(instance, values, residual, wire, seed & 0xFFFFFFFF, 1.0)

    def decode(self: Quantizers, wire: Tensor, out: Tensor, *given: Any) -> None:
        *settings, add, scale = given
        instance = _instance("decode", name, template, block_at, add, out.dtype, *settings)
        if instance is None:
            getattr(reference, f"{name}_decode")(wire, out, *given)
        else:
            self._launch_tiles(instance, out, None, wire, 0, scale)

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

    def _launch_tiles(
        self, instance: _Instance, numbers: Tensor, residual: Tensor | None, wire: Tensor, seed: int, scale: float
    ) -> None:
        """Launch a kernel. numbers: the values or the result."""
        numel = numbers.numel()
        if numel > 0:
            lost = 0 if residual is None else residual.data_ptr()
            parameters = _ARGUMENTS.pack(numbers.data_ptr(), lost, wire.data_ptr(), numel, seed, scale)
            touched = (numbers, wire) if residual is None else (numbers, residual, wire)
            self._launch("quantize", instance.kernel, -(-numel // instance.elements), parameters, touched)
