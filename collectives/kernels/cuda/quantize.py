"""Launches of quantize.cu: the functions of reference.quantize on a GPU, the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from gradwire.collectives.kernels.cuda.source import THREADS, Launch, literal
from gradwire.collectives.kernels.reference import quantize as reference

#: One tensor, or several that one launch works through.
Tensors: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
#: One for all of them, or one for each.
Seeds: TypeAlias = int | Sequence[int]

_TENSORS = 96  # of a launch: as in quantize.cu, so that the table stays below the 4 KB of a kernel's parameters
_TENSOR = np.dtype(
    [("values", "u8"), ("residual", "u8"), ("wire", "u8"), ("numel", "i8"), ("seed", "u4"), ("first_tile", "u4")]
)
_TABLE = np.dtype([("tensors", _TENSOR, _TENSORS), ("count", "i4"), ("tiles", "u4"), ("scale", "f4"), ("unused", "u4")])
_FRACTION = {"e4m3": 3, "e5m2": 2}  # bits of the mantissa
_WARPS = THREADS // 32
_BLOCKS = (16, 32, 64, 128, 256, 512, 1024)  # that a warp holds in registers


def _several(tensors: Tensors) -> Sequence[torch.Tensor]:
    return (tensors,) if isinstance(tensors, torch.Tensor) else tensors


class Quantizers:
    """Functions of one tensor of values and one wire, or as many of both (and of residuals and seeds) in one launch.

    Blocks of another length than the powers of two from 16 to 1024 are left to the reference.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    def fp16_encode(self, values: Tensors, residual: Tensors | None, wire: Tensors, seed: Seeds) -> None:
        self._encode("fp16", "Fp16", (), values, residual, wire, seed)

    def fp16_decode(self, wire: Tensors, out: Tensors, add: bool, scale: float) -> None:
        self._decode("fp16", "Fp16", (), wire, out, add, scale)

    def bf16_encode(self, values: Tensors, residual: Tensors | None, wire: Tensors, seed: Seeds) -> None:
        self._encode("bf16", "Bf16", (), values, residual, wire, seed)

    def bf16_decode(self, wire: Tensors, out: Tensors, add: bool, scale: float) -> None:
        self._decode("bf16", "Bf16", (), wire, out, add, scale)

    def fp8_encode(
        self, values: Tensors, residual: Tensors | None, wire: Tensors, format: str, block: int, seed: Seeds
    ) -> None:
        codec = f"Fp8<{block}, {_FRACTION[format]}>"
        self._encode("fp8", codec, (format, block), values, residual, wire, seed, block)

    def fp8_decode(self, wire: Tensors, out: Tensors, format: str, block: int, add: bool, scale: float) -> None:
        codec = f"Fp8<{block}, {_FRACTION[format]}>"
        self._decode("fp8", codec, (format, block), wire, out, add, scale, block)

    def int8_encode(
        self, values: Tensors, residual: Tensors | None, wire: Tensors, block: int, stochastic: bool, seed: Seeds
    ) -> None:
        codec = f"Int8<{block}, {literal(stochastic)}>"
        self._encode("int8", codec, (block, stochastic), values, residual, wire, seed, block)

    def int8_decode(self, wire: Tensors, out: Tensors, block: int, add: bool, scale: float) -> None:
        self._decode("int8", f"Int8<{block}, false>", (block,), wire, out, add, scale, block)

    def int4_encode(
        self, values: Tensors, residual: Tensors | None, wire: Tensors, block: int, stochastic: bool, seed: Seeds
    ) -> None:
        codec = f"Int4<{block}, {literal(stochastic)}>"
        self._encode("int4", codec, (block, stochastic), values, residual, wire, seed, block)

    def int4_decode(self, wire: Tensors, out: Tensors, block: int, add: bool, scale: float) -> None:
        self._decode("int4", f"Int4<{block}, false>", (block,), wire, out, add, scale, block)

    def onebit_encode(self, values: Tensors, residual: Tensors | None, wire: Tensors, block: int, seed: Seeds) -> None:
        self._encode("onebit", f"OneBit<{block}>", (block,), values, residual, wire, seed, block)

    def onebit_decode(self, wire: Tensors, out: Tensors, block: int, add: bool, scale: float) -> None:
        self._decode("onebit", f"OneBit<{block}>", (block,), wire, out, add, scale, block)

    def qsgd_encode(
        self, values: Tensors, residual: Tensors | None, wire: Tensors, levels: int, block: int, seed: Seeds
    ) -> None:
        self._encode("qsgd", f"Qsgd<{block}, {levels}>", (levels, block), values, residual, wire, seed, block)

    def qsgd_decode(self, wire: Tensors, out: Tensors, block: int, add: bool, scale: float) -> None:
        self._decode("qsgd", f"Qsgd<{block}, 7>", (block,), wire, out, add, scale, block)

    def terngrad_encode(
        self, values: Tensors, residual: Tensors | None, wire: Tensors, block: int, seed: Seeds
    ) -> None:
        self._encode("terngrad", f"TernGrad<{block}>", (block,), values, residual, wire, seed, block)

    def terngrad_decode(self, wire: Tensors, out: Tensors, block: int, add: bool, scale: float) -> None:
        self._decode("terngrad", f"TernGrad<{block}>", (block,), wire, out, add, scale, block)

    def natural_encode(self, values: Tensors, residual: Tensors | None, wire: Tensors, seed: Seeds) -> None:
        self._encode("natural", "Natural", (), values, residual, wire, seed)

    def natural_decode(self, wire: Tensors, out: Tensors, add: bool, scale: float) -> None:
        self._decode("natural", "Natural", (), wire, out, add, scale)

    def _encode(
        self,
        name: str,
        codec: str,
        parameters: tuple[Any, ...],
        values: Tensors,
        residual: Tensors | None,
        wire: Tensors,
        seed: Seeds,
        block: int = 512,
    ) -> None:
        """Launch an encoder. codec: a type in codecs.cuh. parameters: of the reference's function."""
        inputs, wires = _several(values), _several(wire)
        residuals = [None] * len(inputs) if residual is None else _several(residual)
        seeds = [seed] * len(inputs) if isinstance(seed, int) else seed
        if block not in _BLOCKS:
            for v, r, w, s in zip(inputs, residuals, wires, seeds, strict=True):
                getattr(reference, f"{name}_encode")(v, r, w, *parameters, s)
            return
        kernel = f"encode<{codec}, {literal(residual is not None)}>"
        self._work_through(kernel, _tile(name, block), inputs, residuals, wires, seeds, 1.0)

    def _decode(
        self,
        name: str,
        codec: str,
        parameters: tuple[Any, ...],
        wire: Tensors,
        out: Tensors,
        add: bool,
        scale: float,
        block: int = 512,
    ) -> None:
        outputs, wires = _several(out), _several(wire)
        if block not in _BLOCKS:
            for w, o in zip(wires, outputs, strict=True):
                getattr(reference, f"{name}_decode")(w, o, *parameters, add, scale)
            return
        nothing, kernel = [None] * len(outputs), f"decode<{codec}, {literal(add)}>"
        self._work_through(kernel, _tile(name, block), outputs, nothing, wires, [0] * len(outputs), scale)

    def _work_through(
        self,
        kernel: str,
        tile: int,
        values: Sequence[torch.Tensor],
        residuals: Sequence[torch.Tensor | None],
        wires: Sequence[torch.Tensor],
        seeds: Sequence[int],
        scale: float,
    ) -> None:
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


def _tile(name: str, block: int) -> int:
    """Return how many elements a warp works on: Layout::TILE of codecs.cuh."""
    return 1024 if block > 512 or name == "onebit" else 512
