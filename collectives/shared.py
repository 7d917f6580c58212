"""Reductions by the ranks of one host directly in the memory that they share: what algorithm='shared' runs."""

from __future__ import annotations

import torch

from collectives.kernels import cpu_arithmetic
from collectives.transport.allocation import ELSEWHERE, Allocations
from collectives.transport.local_group import LocalGroup

_FINGERPRINT_BITS = 31


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

    def allreduce(self, flat: torch.Tensor, op: str, fingerprint: int, deadline: float) -> None:
        """Reduce a contiguous tensor over the ranks of the host, in place; 'average' divides too.

        fingerprint: equal on all ranks that call the same thing. Raises LinkError.
        """
        self._sequence += 1
        nbytes = flat.numel() * flat.element_size()
        place = ELSEWHERE
        if nbytes > self.group.whole_bytes:
            place = self._allocations.place(flat)
        arguments = (
            self.group.context_address,
            flat.data_ptr(),
            nbytes,
            flat.element_size(),
            self._arithmetic[flat.dtype],
            self._kernels.OPS[op],
            self.group.size if op == "average" else 1,
            self._sequence << _FINGERPRINT_BITS | fingerprint % 2**_FINGERPRINT_BITS,
            place.slot,
            place.offset,
            place.born,
        )
        self.group.run(self._kernels.allreduce, arguments, deadline)
        if self.group.context[self._kernels.NEWS]:
            self._allocations.follow()

    def close(self) -> None:
        """Leave; the group too."""
        self._allocations.close()
