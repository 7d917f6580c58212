"""What the threads of a launch can reach: tensors by address, and shared memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]

_UNSET = 0xA5  # what shared memory holds before it is written


class MachineError(Exception):
    """What a GPU might let pass, and a right kernel never does."""


class Memory:
    """A copy of some tensors, each apart from the others, so that no access can stray from one into another."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        spans = sorted({(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors if t.numel()})
        merged: list[list[int]] = []
        for begin, end in spans:
            if merged and begin < merged[-1][1]:
                merged[-1][1] = max(end, merged[-1][1])
            else:
                merged.append([begin, end])
        self._begins = np.array([0, *(begin for begin, _ in merged)], np.uint64)
        self._ends = np.array([0, *(end for _, end in merged)], np.uint64)
        offsets, total = [0], 16
        for begin, end in merged:
            offsets.append(total + begin % 16)
            total = -(-(offsets[-1] + end - begin) // 16) * 16 + 16
        self._offsets = np.array(offsets, np.uint64)
        self._words = np.zeros(total // 8, np.uint64)
        self._merged = merged
        self._copy(into_tensors=False)

    def _copy(self, into_tensors: bool) -> None:
        for (begin, end), offset in zip(self._merged, self._offsets[1:], strict=True):
            here = self._words.ctypes.data + int(offset)
            ctypes.memmove(*((begin, here) if into_tensors else (here, begin)), end - begin)

    def write_back(self) -> None:
        self._copy(into_tensors=True)

    def view(self, addresses: Array, size: int, count: int) -> tuple[Array, Array]:
        """Memory as integers of `size` bytes, and where in it the first of `count` of them is that are at each address.

        Raises MachineError.
        """
        which = np.searchsorted(self._begins, addresses, side="right") - 1
        bad = (addresses + np.uint64(size * count) > self._ends[which]) | (addresses % np.uint64(size * count) != 0)
        if bad.any():
            raise MachineError(
                f"{size * count} bytes at {int(addresses[bad][0]):#x}: outside of the tensors, or not aligned"
            )
        offsets = addresses - self._begins[which] + self._offsets[which]
        return self._words.view(f"u{size}"), (offsets // np.uint64(size)).astype(np.int64)


class Shared:
    """The shared memory of every block of a launch; addresses begin at 0 in each."""

    def __init__(self, grid: int, nbytes: int) -> None:
        self._stride = -(-nbytes // 16) * 16
        self._nbytes = nbytes
        self._words = np.full(grid * self._stride, _UNSET, np.uint8).view(np.uint64)

    def view(self, addresses: Array, blocks: Array, size: int, count: int) -> tuple[Array, Array]:
        """As Memory.view, for threads of these blocks."""
        addresses = addresses.astype(np.int64)
        bad = (addresses < 0) | (addresses + size * count > self._nbytes) | (addresses % (size * count) != 0)
        if bad.any():
            raise MachineError(
                f"{size * count} bytes at {int(addresses[bad][0])} of {self._nbytes} of shared memory, or not aligned"
            )
        return self._words.view(f"u{size}"), (addresses + blocks * self._stride) // size
