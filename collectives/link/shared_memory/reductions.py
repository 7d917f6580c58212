"""Reductions by the ranks of one host directly in the memory that they share: what algorithm='shared' runs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from gradwire.collectives.kernels import cpu_arithmetic
from gradwire.collectives.link.base import Request, Whole
from gradwire.collectives.link.shared_memory.allocation import ELSEWHERE, Allocations
from gradwire.collectives.link.shared_memory.group import LocalGroup

#: What a transport in shared memory does best by itself, without a message: a barrier is the allreduce of nothing.
PREFERRED = {"allreduce": "shared", "barrier": "shared"}


class SharedMemory:
    """One compiled call per operation, in which data is copied as little as can be.

    Small messages: every rank puts its own down where all can read it, and reduces all by itself. Tensors that all lie in
    shared memory: rank r reduces the r-th part of all of them, and writes the result to all. Others: each rank hands the owner
    of a part its contribution, chunk by chunk through a buffer that stays in the cache, and takes the result from there.
    Always in rank order, so the result is the same to the bit on all ranks, on all paths and every time. Ranks that call
    different things notice it by the tag.
    """

    def __init__(self, group: LocalGroup) -> None:
        self.group = group
        self._allocations = Allocations(group)
        self._sequence = 0

    @property
    def share_alignment_bytes(self) -> Mapping[str, int]:
        """See Transport."""
        return {PREFERRED["allreduce"]: self.group.kernels.LINE}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """See Allocations.empty."""
        return self._allocations.empty(shape, dtype)

    def collective(self, request: Request) -> Whole:
        """See Transport; what the dtype needs is compiled here, or loaded from the disk."""
        group, allocations = self.group, self._allocations
        run = group.run
        nbytes = request.numel * request.dtype.itemsize
        divisor = group.size if request.op == "average" else 1
        arithmetic = cpu_arithmetic(request.dtype).address
        kernels = group.kernels
        parts = {"reduce_shares": kernels.REDUCES, "gather_shares": kernels.SPREADS}
        doing = parts.get(request.verb, kernels.REDUCES | kernels.SPREADS)
        kind = (nbytes, request.dtype.itemsize, arithmetic, kernels.OPS[request.op], divisor, doing)
        kernel = partial(kernels.allreduce, group.context_address, *kind)
        is_small = nbytes <= group.whole_bytes

        def allreduce(flat: torch.Tensor, same: torch.Tensor, tag: int, deadline: float) -> None:
            self._sequence = sequence = self._sequence + 1
            place = ELSEWHERE if is_small else allocations.place(flat)
            if run(kernel, (flat.data_ptr(), sequence, tag, *place), deadline):
                allocations.follow()

        return Whole(allreduce, needs_meeting=False)

    def close(self) -> None:
        """Give up the others' tensors. This rank's own live on as ordinary ones."""
        self._allocations.close()
