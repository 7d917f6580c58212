"""Launches of quantize.cu: the functions of reference.quantize on a GPU. They write the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from gradwire.collectives.kernels.cuda.source import THREADS, KernelLaunch, literal
from gradwire.collectives.kernels.reference import quantize as reference

#: One tensor, or several that one launch processes.
Tensors: TypeAlias = torch.Tensor | Sequence[torch.Tensor]

_TENSORS = 96  # the most of a launch, as in quantize.cu: the table must fit in the 4 KB of a kernel's parameters
_TENSOR = np.dtype(
    [("values", "u8"), ("residual", "u8"), ("wire", "u8"), ("numel", "i8"), ("seed", "u4"), ("first_tile", "u4")]
)
_TABLE = np.dtype([("tensors", _TENSOR, _TENSORS), ("count", "i4"), ("tiles", "u4"), ("scale", "f4"), ("unused", "u4")])
_FRACTION = {"e4m3": 3, "e5m2": 2}  # bits of the mantissa
_WARPS = THREADS // 32
_BLOCKS = (16, 32, 64, 128, 256, 512, 1024)  # lengths that a warp holds in registers
_DEFAULTS = {"block": 512, "stochastic": False, "levels": 7}  # of parameters that a function does not take


def _several(tensors: Tensors) -> Sequence[torch.Tensor]:
    return (tensors,) if isinstance(tensors, torch.Tensor) else tensors


def _tile(name: str, block: int) -> int:
    """Return how many elements a warp processes: Layout::TILE of codecs.cuh."""
    return 1024 if block > 512 or name == "onebit" else 512


def _instance(template: str, parameters: Mapping[str, Any]) -> str:
    """Return the C++ text of a type of codecs.cuh with its arguments."""
    written = {
        name: literal(value) if isinstance(value, bool) else _FRACTION.get(value, value)
        for name, value in (_DEFAULTS | dict(parameters)).items()
    }
    return template.format(**written)


def _codec(
    name: str, template: str, encoder: tuple[str, ...] = (), decoder: tuple[str, ...] = ()
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return <name>_encode and <name>_decode, with the arguments of the functions of reference.quantize.

    template: the codec's type in codecs.cuh. encoder, decoder: the names of the parameters of each function. values and wire
    are one tensor each, or sequences of equal length (and so are residuals, outputs and seeds), which a launch processes
    together.
    """

    def encode(
        self: Quantizers, values: Tensors, residual: Tensors | None, wire: Tensors, *parameters_and_seed: Any
    ) -> None:
        *given, seed = parameters_and_seed
        parameters = dict(zip(encoder, given, strict=True))
        block = parameters.get("block", _DEFAULTS["block"])
        inputs, wires = _several(values), _several(wire)
        residuals = [None] * len(inputs) if residual is None else _several(residual)
        seeds = [seed] * len(inputs) if isinstance(seed, int) else seed
        if block not in _BLOCKS:
            for v, r, w, s in zip(inputs, residuals, wires, seeds, strict=True):
                getattr(reference, f"{name}_encode")(v, r, w, *given, s)
            return
        kernel = f"encode<{_instance(template, parameters)}, {literal(residual is not None)}>"
        self.work_through(kernel, _tile(name, block), inputs, residuals, wires, seeds, 1.0)

    def decode(self: Quantizers, wire: Tensors, out: Tensors, *parameters_and_how: Any) -> None:
        *given, add, scale = parameters_and_how
        parameters = dict(zip(decoder, given, strict=True))
        block = parameters.get("block", _DEFAULTS["block"])
        outputs, wires = _several(out), _several(wire)
        if block not in _BLOCKS:
            for w, o in zip(wires, outputs, strict=True):
                getattr(reference, f"{name}_decode")(w, o, *given, add, scale)
            return
        nothing, kernel = [None] * len(outputs), f"decode<{_instance(template, parameters)}, {literal(add)}>"
        self.work_through(kernel, _tile(name, block), outputs, nothing, wires, [0] * len(outputs), scale)

    return encode, decode


class Quantizers:
    """Runs the dense codecs. The reference handles blocks whose length is not a power of two from 16 to 1024."""

    def __init__(self, launch: KernelLaunch) -> None:
        self._launch = launch

    fp16_encode, fp16_decode = _codec("fp16", "Fp16")
    bf16_encode, bf16_decode = _codec("bf16", "Bf16")
    fp8_encode, fp8_decode = _codec("fp8", "Fp8<{block}, {format}>", ("format", "block"), ("format", "block"))
    int8_encode, int8_decode = _codec("int8", "Int8<{block}, {stochastic}>", ("block", "stochastic"), ("block",))
    int4_encode, int4_decode = _codec("int4", "Int4<{block}, {stochastic}>", ("block", "stochastic"), ("block",))
    onebit_encode, onebit_decode = _codec("onebit", "OneBit<{block}>", ("block",), ("block",))
    qsgd_encode, qsgd_decode = _codec("qsgd", "Qsgd<{block}, {levels}>", ("levels", "block"), ("block",))
    terngrad_encode, terngrad_decode = _codec("terngrad", "TernGrad<{block}>", ("block",), ("block",))
    natural_encode, natural_decode = _codec("natural", "Natural")

    def work_through(
        self,
        kernel: str,
        tile: int,
        values: Sequence[torch.Tensor],
        residuals: Sequence[torch.Tensor | None],
        wires: Sequence[torch.Tensor],
        seeds: Sequence[int],
        scale: float,
    ) -> None:
        """Launch a kernel of quantize.cu on all tensors, a table of them at a time. tile: how many elements a warp
        processes."""
        entries = list(zip(values, residuals, wires, seeds, strict=True))
        for begin in range(0, len(entries), _TENSORS):
            table = np.zeros((), _TABLE)
            tiles, touched = 0, []
            for place, (numbers, residual, wire, seed) in enumerate(entries[begin : begin + _TENSORS]):
                lost = 0 if residual is None else residual.data_ptr()
                numel, low = numbers.numel(), seed & 0xFFFFFFFF
                table["tensors"][place] = (numbers.data_ptr(), lost, wire.data_ptr(), numel, low, tiles)
                tiles += -(-numel // tile)
                touched += [tensor for tensor in (numbers, residual, wire) if tensor is not None]
            table["count"], table["tiles"], table["scale"] = min(_TENSORS, len(entries) - begin), tiles, scale
            if tiles:
                self._launch("quantize", kernel, -(-tiles // _WARPS), table, touched)
