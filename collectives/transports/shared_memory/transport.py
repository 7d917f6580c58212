"""Messages between ranks of one host, through rings in shared memory, and reductions directly in shared memory."""

from __future__ import annotations

import time

import numpy as np
import torch

from gradwire.collectives.kernels import cpu_arithmetic
from gradwire.collectives.transports.base import Capabilities, Operation, Run
from gradwire.collectives.transports.requests import Table
from gradwire.collectives.transports.shared_memory.allocation import Allocations
from gradwire.collectives.transports.shared_memory.group import WHOLE_BYTES, LocalGroup

#: The algorithm of each verb that needs no messages in shared memory. A barrier is an allreduce of an empty tensor.
PREFERRED = {"allreduce": "shared", "barrier": "shared"}


class SharedMemory(Allocations):
    """The algorithm 'shared': reductions directly in the memory that the ranks of a host share, one compiled call each.

    Small tensors: every rank copies its tensor into memory that all ranks can read, and reduces all tensors itself. If
    all tensors are in shared memory: rank r reduces the r-th part of all tensors, and writes the result into all
    tensors. Otherwise: rank r owns the r-th part. The others copy their contributions to this part, chunk by chunk,
    into a buffer that stays in the cache, and copy the result from it. All three reduce in rank order, so the results
    are bitwise the same on all ranks, in all three ways and in every run. Ranks detect by the tag that they call
    different operations.
    """

    def __init__(self, group: LocalGroup) -> None:
        super().__init__(group)
        self._sequence = 0

    def prepare(self, operation: Operation) -> Run:
        """See Transport. Compiles the arithmetic of the dtype, or loads it from the disk."""
        group, kernels = self.group, self.group.kernels
        nbytes = operation.numel * operation.dtype.itemsize
        divisor = group.size if operation.op == "average" else 1
        arithmetic = cpu_arithmetic(operation.dtype).address
        parts = {"reduce_shares": kernels.REDUCES, "gather_shares": kernels.SPREADS}
        doing = parts.get(operation.verb, kernels.REDUCES | kernels.SPREADS)
        kind = (nbytes, operation.dtype.itemsize, arithmetic, kernels.OPS[operation.op], divisor, doing)
        words = np.array((group.context_address, *kind), dtype=np.int64)
        kernel, address = kernels.allreduce, words.ctypes.data
        run = group.run

        def allreduce(flat: torch.Tensor, same: torch.Tensor, tag: int, deadline: float, keeps: object = words) -> None:
            self._sequence += 1
            if run(kernel, (address, flat.data_ptr(), self._sequence, tag, *self.place(flat)), deadline):
                self.map_news()

        def allreduce_whole(
            flat: torch.Tensor, same: torch.Tensor, tag: int, deadline: float, keeps: object = words
        ) -> None:
            self._sequence = sequence = self._sequence + 1
            # The last three are ELSEWHERE, written out because each small message passes this.
            if run(kernel, (address, flat.data_ptr(), sequence, tag, -1, 0, 0), deadline):
                self.map_news()

        return allreduce_whole if nbytes <= WHOLE_BYTES else allreduce


class SharedMemoryTransport(Table):
    """A Transport among the members of a LocalGroup. A wait for any message moves all messages that this rank has
    posted, so that a full ring blocks no rank for ever. reductions: for a group of all ranks; None without the
    algorithm 'shared'."""

    def __init__(self, group: LocalGroup, rank: int, size: int, reductions: SharedMemory | None = None) -> None:
        super().__init__(group.kernels, group.context, group.running)
        self.rank = rank
        self.size = size
        self.reductions = reductions
        preferred = {} if reductions is None else PREFERRED
        self.capabilities = Capabilities(
            shares_memory=True,
            interruptible=True,
            receives_from_any=True,
            waits_again=True,
            algorithms={verb: (name,) for verb, name in preferred.items()},
            preferred=preferred,
            share_alignment_bytes={} if reductions is None else {PREFERRED["allreduce"]: group.kernels.LINE},
        )
        self._group = group
        self._index = {member: index for index, member in enumerate(group.members)}
        self._blocked = np.zeros(2 * group.size, dtype=np.int64)
        context = {
            self.kernels.RINGS: group.base + group.plan.rings,
            self.kernels.RING_CAPACITY: group.plan.ring_bytes,
            self.kernels.BLOCKED: self._blocked.ctypes.data,
        }
        self.context[list(context)] = list(context.values())
        group.move_beside(self._move_beside)
        self._heard_last = group.index

    def begin(self) -> None:
        self._group.ensure_open()
        self.tidy()

    def check(self, status: int, deadline: float, lost: set[int]) -> set[int]:
        return self._group.check(status, deadline, lost)

    def place(self, peer: int) -> int:
        return self._index[peer]

    def finish(self, number: int, deadline: float) -> None:
        if not self.is_done(number):
            self._move(number, deadline)

    def next_sender(self, tag: int, deadline: float) -> int | None:
        group = self._group
        while True:
            is_late = time.monotonic() >= deadline
            first = (self._heard_last + 1) % group.size
            group.run(self.kernels.next_sender, (self.context_address, tag, first, not is_late), deadline)
            place = int(group.context[self.kernels.PEER])
            if place >= 0:
                self._heard_last = place
                return group.members[place]
            if is_late:
                return None

    def move(self) -> None:
        self._move(-1, 0.0)

    def abort(self) -> None:
        self._group.abort()

    def close(self) -> None:
        if not self._group.is_ours:
            return  # the parent still uses the memory
        if self.reductions is not None:
            self.reductions.close()
        self._group.close()
        if self._group.stop():  # then no kernel uses the tensors any more
            self.pending.clear()

    def prepare(self, operation: Operation) -> Run:
        is_own = operation.program is None and self.reductions is not None
        return self.reductions.prepare(operation) if is_own and self.reductions else super().prepare(operation)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made = self.reductions.empty(shape, dtype) if self.reductions is not None else None
        return super().empty(shape, dtype) if made is None else made

    def _move(self, number: int, deadline: float) -> None:
        self._group.run(self.kernels.move, (self.context_address, number), deadline)

    def _move_beside(self) -> None:
        if len(self._unfinished()):
            self.kernels.move(self.context_address, -1)  # errors are raised by the wait for the message
