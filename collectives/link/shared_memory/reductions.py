"""Reductions by the ranks of one host directly in the memory that they share: what algorithm='shared' runs."""

from __future__ import annotations

from typing import NamedTuple

import torch

from collectives.kernels import cpu_arithmetic
from collectives.link.shared_memory.allocation import ELSEWHERE, Allocations
from collectives.link.shared_memory.group import LocalGroup


class Reduction(NamedTuple):
    """What tensors of one size and dtype need: function, the address of the dtype's arithmetic; op, its code there."""

    nbytes: int
    itemsize: int
    function: int
    op: int
    divisor: int


class SharedMemory:
    """One compiled call per operation, in which data is copied as little as can be.

    Small messages: every rank puts its own down where all can read it, and reduces all by itself. Tensors that all lie in
    shared memory: rank r reduces the r-th part of all of them, and writes the result to all. Others: each rank hands the owner
    of a part its contribution, chunk by chunk through a buffer that stays in the cache, and takes the result from there.
    Always in rank order, so the result is the same to the bit on all ranks, on all paths and every time.
    """

    def __init__(self, group: LocalGroup) -> None:
        self.group = group
        self._allocations = Allocations(group)
        self._kernels = group.kernels
        self._arithmetic: dict[torch.dtype, int] = {}
        self._sequence = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """See Allocations.empty."""
        return self._allocations.empty(shape, dtype)

    def prepare(self, dtype: torch.dtype) -> None:
        """Compile what a dtype needs, or load it from the disk. Not to be done when others wait."""
        if dtype not in self._arithmetic:
            self._arithmetic[dtype] = cpu_arithmetic(dtype).address

    def reduction(self, numel: int, dtype: torch.dtype, op: str) -> Reduction:
        """The reduction of tensors of a kind that has been prepared; 'average' divides too."""
        divisor = self.group.size if op == "average" else 1
        address = self._arithmetic[dtype]
        return Reduction(numel * dtype.itemsize, dtype.itemsize, address, self._kernels.OPS[op], divisor)

    def allreduce(self, flat: torch.Tensor, reduction: Reduction, tag: int, deadline: float) -> None:
        """Reduce a contiguous tensor over the ranks of the host, in place.

        tag: of 30 bits, equal on all ranks that call the same thing. Raises LinkError.
        """
        self._sequence = sequence = self._sequence + 1
        place = self._allocations.place(flat) if reduction.nbytes > self.group.whole_bytes else ELSEWHERE
        arguments = (self.group.context_address, flat.data_ptr(), *reduction, sequence, tag, *place)
        if self.group.run(self._kernels.allreduce, arguments, deadline):
            self._allocations.follow()

    def close(self) -> None:
        """Give up the others' tensors. This rank's own live on as ordinary ones."""
        self._allocations.close()
