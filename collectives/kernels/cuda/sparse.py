"""Launches of sparse.cu: the functions of reference.sparse on a GPU. They write the same bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.collectives.kernels.cuda.launch import NUMBERS, THREADS, KernelLaunch, literal
from gradwire.collectives.kernels.layout import CHUNK

# The same as in sums.cuh.
_CHUNK = 8192
_MOST_BLOCKS = 1024
_SCRATCH = np.dtype([("state", "u4", 16), ("histograms", "u4", 2048 + 1024 + 1024), ("counts", "u4", 2 * _MOST_BLOCKS)])
_SELECTION = np.dtype(
    [(name, "u8") for name in ("values", "residual", "momentum", "tau", "wire", "scratch", "marks")]
    + [("numel", "i8")]
    + [(name, "i4") for name in ("k", "slack", "chunks", "header", "slots")]
    + [("decay", "f4"), ("seed", "u4"), ("scale", "f4")]
)
_HEADER = 16  # bytes of a threshold's wire before its indices


class SparseKernels:
    """Runs the sparse codecs. The host does not read how many numbers are sent. Decoders ignore indices outside of `out`."""

    blocks: ClassVar[int] = _MOST_BLOCKS  # the most in a launch over all numbers

    def __init__(self, launch: KernelLaunch) -> None:
        self._launch = launch

    def topk_encode(self, values: Tensor, residual: Tensor | None, wire: Tensor, k: int) -> None:
        self._select(values, residual, wire, k)

    def topk_decode(self, wire: Tensor, out: Tensor, k: int, add: bool, scale: float) -> None:
        self._scatter("scatter", wire, out, add, k=k, slots=_slots(k), scale=scale)

    def dgc_encode(
        self, values: Tensor, residual: Tensor, wire: Tensor, k: int, momentum: Tensor, decay: float
    ) -> None:
        self._select(values, residual, wire, k, momentum=momentum, decay=decay)

    def threshold_encode(
        self, values: Tensor, residual: Tensor | None, wire: Tensor, k: int, slack: int, tau: Tensor | None
    ) -> None:
        self._select(values, residual, wire, k, slack=slack, tau=tau, header=_HEADER)

    def threshold_decode(self, wire: Tensor, out: Tensor, k: int, slack: int, add: bool, scale: float) -> None:
        room = k + slack
        self._scatter("scatter", wire, out, add, k=room, slots=_slots(room), header=_HEADER, scale=scale)

    def randomk_encode(self, values: Tensor, residual: Tensor | None, wire: Tensor, k: int, seed: int) -> None:
        if values.numel() == 0:
            wire.zero_()
            return
        values = _values(values, residual)
        blocks, chunks = self._runs(values.numel())
        scratch = torch.zeros(_SCRATCH["state"].itemsize, dtype=torch.uint8, device=values.device)
        tensors = {"values": values, "residual": residual, "wire": wire, "scratch": scratch}
        parameters = _parameters(
            tensors, numel=values.numel(), k=k, slots=_slots(k), chunks=chunks, seed=seed & 0xFFFFFFFF
        )
        touched, feedback = _present(tensors), literal(residual is not None)
        self._launch("sparse", f"examine<{feedback}, {NUMBERS[values.dtype]}>", blocks, parameters, touched)
        self._launch("sparse", f"draw<{feedback}>", blocks, parameters, touched)

    def randomk_decode(self, wire: Tensor, out: Tensor, k: int, seed: int, add: bool, scale: float) -> None:
        self._scatter("place", wire, out, add, k=k, seed=seed & 0xFFFFFFFF, scale=scale)

    def chunktopk_encode(self, values: Tensor, residual: Tensor | None, wire: Tensor, k: int, seed: int) -> None:
        if values.numel() > 0:
            tensors = {"values": values, "residual": residual, "wire": wire}
            parameters = _parameters(tensors, numel=values.numel(), k=k)
            kernel = f"encode_chunk<{literal(residual is not None)}, {NUMBERS[values.dtype]}>"
            self._launch("sparse", kernel, -(-values.numel() // CHUNK), parameters, _present(tensors))

    def chunktopk_decode(self, wire: Tensor, out: Tensor, k: int, add: bool, scale: float) -> None:
        entries = -(-out.numel() // CHUNK) * k
        self._scatter("scatter_chunks", wire, out, add, k=k, entries=entries, scale=scale)

    def _select(
        self,
        values: Tensor,
        residual: Tensor | None,
        wire: Tensor,
        k: int,
        *,
        momentum: Tensor | None = None,
        decay: float = 0.0,
        slack: int = 0,
        tau: Tensor | None = None,
        header: int = 0,
    ) -> None:
        if values.numel() == 0:
            wire.zero_()
            return
        values = _values(values, residual)
        blocks, chunks = self._runs(values.numel())
        scratch = torch.zeros(_SCRATCH.itemsize, dtype=torch.uint8, device=values.device)
        marks = torch.empty(-(-values.numel() // _CHUNK) * _CHUNK // 8, dtype=torch.uint8, device=values.device)
        tensors = {
            "values": values,
            "residual": residual,
            "momentum": momentum,
            "tau": tau,
            "wire": wire,
            "scratch": scratch,
            "marks": marks,
        }
        parameters = _parameters(
            tensors,
            numel=values.numel(),
            k=k,
            slack=slack,
            chunks=chunks,
            header=header,
            slots=_slots(k + slack),
            decay=decay,
        )
        feedback = literal(residual is not None)
        both, number = f"{feedback}, {literal(momentum is not None)}", NUMBERS[values.dtype]
        first = [f"accumulate<{both}, {number}>"]
        if tau is not None:
            first = [f"reach<{feedback}, {number}>", f"reconsider<{feedback}>"]
        for kernel in (*first, *(f"{step}<{feedback}>" for step in ("mark", "refine", "count")), f"emit<{both}>"):
            self._launch("sparse", kernel, blocks, parameters, _present(tensors))

    def _runs(self, numel: int) -> tuple[int, int]:
        """Return how many blocks a launch over all numbers has, and how many chunks each block has."""
        chunks = -(-numel // _CHUNK)
        each = -(-chunks // self.blocks)
        return -(-chunks // each), each

    def _scatter(
        self, kernel: str, wire: Tensor, out: Tensor, add: bool, k: int, entries: int | None = None, **numbers: float
    ) -> None:
        """Write every entry of the wire at its index. entries: the number of entries; None for k."""
        if not add:
            out.zero_()
        if (entries := k if entries is None else entries) > 0:
            tensors = {"values": out, "wire": wire}
            parameters = _parameters(tensors, numel=out.numel(), k=k, **numbers)
            kernel = f"{kernel}<{literal(add)}, {NUMBERS[out.dtype]}>"
            self._launch("sparse", kernel, -(-entries // THREADS), parameters, _present(tensors))


def _values(values: Tensor, residual: Tensor | None) -> Tensor:
    """Return the values, as float32 if there is no residual: later passes read the residual, to which the first one adds the
    values, or without one, the values themselves."""
    return values if residual is not None else values.to(torch.float32)


def _parameters(tensors: Mapping[str, Tensor | None], **numbers: float) -> NDArray[np.void]:
    """Return the parameters of a kernel. Parameters that are not given are 0."""
    selection: NDArray[np.void] = np.zeros((), _SELECTION)
    for name, tensor in tensors.items():
        selection[name] = 0 if tensor is None else tensor.data_ptr()
    for name, number in numbers.items():
        selection[name] = number
    return selection


def _present(tensors: Mapping[str, Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in tensors.values() if tensor is not None]


def _slots(entries: int) -> int:
    """Return how many int32 or float32 a section of a wire has, with its padding to a multiple of 16 bytes."""
    return -(-entries // 4) * 4
