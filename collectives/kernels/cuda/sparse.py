"""Launches of sparse.cu: the functions of reference.sparse on a GPU. They write the same bytes."""

from __future__ import annotations

import struct
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.collectives.kernels.cuda.launch import NUMBERS, THREADS, KernelLaunch, literal
from gradwire.collectives.kernels.layout import CHUNK

# The same as in sums.cuh.
_CHUNK = 8192
_MOST_BLOCKS = 1024
_STATE_BYTES = 4 * 16  # of Scratch, before the histograms
_SCRATCH_BYTES = _STATE_BYTES + 4 * (2048 + 1024 + 1024) + 8 * _MOST_BLOCKS
_SELECTION = struct.Struct("7Pq5ifIf")
_HEADER = 16  # bytes of a threshold's wire before its indices


class SparseKernels:
    """Runs the sparse codecs. The host does not read how many numbers are sent. Decoders ignore indices outside of `out`."""

    blocks: ClassVar[int] = _MOST_BLOCKS  # the most in a launch over all numbers

    def __init__(self, launch: KernelLaunch) -> None:
        self._launch = launch

    def topk_encode(self, values: Tensor, residual: Tensor | None, wire: Tensor, k: int) -> None:
        self._select(values, residual, wire, k)

    def topk_decode(self, wire: Tensor, out: Tensor, k: int, add: bool, scale: float) -> None:
        self._scatter("scatter", wire, out, add, k, k, scale, slots=_slots(k))

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
        self._scatter("scatter", wire, out, add, room, room, scale, slots=_slots(room), header=_HEADER)

    def randomk_encode(self, values: Tensor, residual: Tensor | None, wire: Tensor, k: int, seed: int) -> None:
        if values.numel() == 0:
            wire.zero_()
            return
        values = _values(values, residual)
        blocks, chunks = self._runs(values.numel())
        scratch = torch.zeros(_STATE_BYTES, dtype=torch.uint8, device=values.device)
        parameters = _parameters(
            values, wire, k, residual=residual, scratch=scratch, chunks=chunks, slots=_slots(k), seed=seed & 0xFFFFFFFF
        )
        touched = _given(values, residual, wire, scratch)
        for kernel in _kernels(
            ("examine<{feedback}, {number}>", "draw<{feedback}>"), values.dtype, residual is not None
        ):
            self._launch("sparse", kernel, blocks, parameters, touched)

    def randomk_decode(self, wire: Tensor, out: Tensor, k: int, seed: int, add: bool, scale: float) -> None:
        self._scatter("place", wire, out, add, k, k, scale, seed=seed & 0xFFFFFFFF)

    def chunktopk_encode(self, values: Tensor, residual: Tensor | None, wire: Tensor, k: int, seed: int) -> None:
        if values.numel() > 0:
            (kernel,) = _kernels(("encode_chunk<{feedback}, {number}>",), values.dtype, residual is not None)
            parameters = _parameters(values, wire, k, residual=residual)
            self._launch("sparse", kernel, -(-values.numel() // CHUNK), parameters, _given(values, residual, wire))

    def chunktopk_decode(self, wire: Tensor, out: Tensor, k: int, add: bool, scale: float) -> None:
        self._scatter("scatter_chunks", wire, out, add, k, -(-out.numel() // CHUNK) * k, scale)

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
        scratch = torch.zeros(_SCRATCH_BYTES, dtype=torch.uint8, device=values.device)
        marks = torch.empty(-(-values.numel() // _CHUNK) * _CHUNK // 8, dtype=torch.uint8, device=values.device)
        parameters = _parameters(
            values,
            wire,
            k,
            residual=residual,
            momentum=momentum,
            tau=tau,
            scratch=scratch,
            marks=marks,
            slack=slack,
            chunks=chunks,
            header=header,
            slots=_slots(k + slack),
            decay=decay,
        )
        touched = _given(values, residual, momentum, tau, wire, scratch, marks)
        first = _ACCUMULATE if tau is None else _REACH
        for kernel in _kernels((*first, *_SELECT), values.dtype, residual is not None, momentum is not None):
            self._launch("sparse", kernel, blocks, parameters, touched)

    def _runs(self, numel: int) -> tuple[int, int]:
        """Return how many blocks a launch over all numbers has, and how many chunks each block has."""
        chunks = -(-numel // _CHUNK)
        each = -(-chunks // self.blocks)
        return -(-chunks // each), each

    def _scatter(
        self,
        kernel: str,
        wire: Tensor,
        out: Tensor,
        add: bool,
        k: int,
        entries: int,
        scale: float,
        *,
        header: int = 0,
        slots: int = 0,
        seed: int = 0,
    ) -> None:
        """Write every entry of the wire at its index. entries: how many there are."""
        if not add:
            out.zero_()
        if entries > 0:
            parameters = _parameters(out, wire, k, header=header, slots=slots, seed=seed, scale=scale)
            self._launch("sparse", _decoder(kernel, add, out.dtype), -(-entries // THREADS), parameters, [out, wire])


#: The kernels of a selection in their order: the first ones, without and with a threshold, then those of both.
_ACCUMULATE = ("accumulate<{feedback}, {momentum}, {number}>",)
_REACH = ("reach<{feedback}, {number}>", "reconsider<{feedback}>")
_SELECT = ("mark<{feedback}>", "refine<{feedback}>", "count<{feedback}>", "emit<{feedback}, {momentum}>")


@cache
def _kernels(templates: tuple[str, ...], dtype: torch.dtype, feedback: bool, momentum: bool = False) -> tuple[str, ...]:
    """Return the kernels of an encoder. dtype: of the values."""
    words = {"feedback": literal(feedback), "momentum": literal(momentum), "number": NUMBERS[dtype]}
    return tuple(template.format(**words) for template in templates)


@cache
def _decoder(kernel: str, add: bool, dtype: torch.dtype) -> str:
    """Return the kernel of a decoder. dtype: of the result."""
    return f"{kernel}<{literal(add)}, {NUMBERS[dtype]}>"


def _values(values: Tensor, residual: Tensor | None) -> Tensor:
    """Return the values, as float32 if there is no residual: later passes read the residual, to which the first one adds the
    values, or without one, the values themselves."""
    return values if residual is not None else values.to(torch.float32)


def _parameters(
    numbers: Tensor,
    wire: Tensor,
    k: int,
    *,
    residual: Tensor | None = None,
    momentum: Tensor | None = None,
    tau: Tensor | None = None,
    scratch: Tensor | None = None,
    marks: Tensor | None = None,
    slack: int = 0,
    chunks: int = 0,
    header: int = 0,
    slots: int = 0,
    decay: float = 0.0,
    seed: int = 0,
    scale: float = 0.0,
) -> bytes:
    """Return a Selection of sums.cuh. numbers: the values or the result."""
    tensors = (numbers, residual, momentum, tau, wire, scratch, marks)
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    return _SELECTION.pack(*addresses, numbers.numel(), k, slack, chunks, header, slots, decay, seed, scale)


def _given(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _slots(entries: int) -> int:
    """Return how many int32 or float32 a section of a wire has, with its padding to a multiple of 16 bytes."""
    return -(-entries // 4) * 4
