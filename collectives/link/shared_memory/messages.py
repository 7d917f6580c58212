"""Messages between ranks of one host, through rings in the memory that they share, and reductions directly in it."""

from __future__ import annotations

import time

import numpy as np
import torch

from gradwire.collectives.kernels import cpu_arithmetic
from gradwire.collectives.link.base import Request, Whole
from gradwire.collectives.link.rows import Table
from gradwire.collectives.link.shared_memory.allocation import ELSEWHERE, Allocations
from gradwire.collectives.link.shared_memory.group import LocalGroup

_FIRST_ROWS = 64

#: What a transport in shared memory does best by itself, without a message: a barrier is the allreduce of nothing.
PREFERRED = {"allreduce": "shared", "barrier": "shared"}


class SharedMemory(Allocations):
    """Reductions directly in the memory that the ranks of a host share, which algorithm='shared' runs: one compiled call per
    operation, in which data is copied as little as can be.

    Small messages: every rank puts its own down where all can read it, and reduces all by itself. Tensors that all lie in
    shared memory: rank r reduces the r-th part of all of them, and writes the result to all. Others: each rank hands the owner
    of a part its contribution, chunk by chunk through a buffer that stays in the cache, and takes the result from there.
    Always in rank order, so the result is the same to the bit on all ranks, on all paths and every time. Ranks that call
    different things notice it by the tag.
    """

    def __init__(self, group: LocalGroup) -> None:
        super().__init__(group)
        self._sequence = 0

    def collective(self, request: Request) -> Whole:
        """See Transport; what the dtype needs is compiled here, or loaded from the disk."""
        group, kernels = self.group, self.group.kernels
        nbytes = request.numel * request.dtype.itemsize
        divisor = group.size if request.op == "average" else 1
        arithmetic = cpu_arithmetic(request.dtype).address
        parts = {"reduce_shares": kernels.REDUCES, "gather_shares": kernels.SPREADS}
        doing = parts.get(request.verb, kernels.REDUCES | kernels.SPREADS)
        kind = (nbytes, request.dtype.itemsize, arithmetic, kernels.OPS[request.op], divisor, doing)
        words = np.array((group.context_address, *kind), dtype=np.int64)
        kernel, address = kernels.allreduce, words.ctypes.data
        is_small = nbytes <= group.whole_bytes

        def allreduce(flat: torch.Tensor, same: torch.Tensor, tag: int, deadline: float, keeps: object = words) -> None:
            self._sequence = sequence = self._sequence + 1
            place = ELSEWHERE if is_small else self.place(flat)
            if group.run(kernel, (address, flat.data_ptr(), sequence, tag, *place), deadline):
                self.follow()

        return Whole(allreduce, needs_meeting=False)


class SharedMemoryTransport(Table):
    """A Transport among the members of a LocalGroup. A wait for any message moves all that this rank has posted, so that full
    rings hold up nobody for good. reductions: where all ranks are members, what reduces directly in the memory."""

    shares_memory = True
    hears_anyone = True
    waits_again = True

    def __init__(self, group: LocalGroup, rank: int, size: int, reductions: SharedMemory | None = None) -> None:
        super().__init__()
        self.rank = rank
        self.size = size
        self.reductions = reductions
        self.preferred = {} if reductions is None else PREFERRED
        self.algorithms = {verb: (name,) for verb, name in self.preferred.items()}
        self.share_alignment_bytes = {
            name: group.kernels.LINE for verb, name in self.preferred.items() if verb == "allreduce"
        }
        self._group = group
        self._kernels = group.kernels
        self._index = {member: index for index, member in enumerate(group.members)}
        self._rows = np.zeros((_FIRST_ROWS, group.kernels.ROW_FIELDS), dtype=np.int64)
        self._dropped = 0  # rows that stood before the first one of the table
        self._first = 0  # all before are done
        self._count = 0
        self._blocked = np.zeros(2 * group.size, dtype=np.int64)
        group.move_beside(self._move_beside)
        self._heard_last = group.index

    def finish(self, number: int, deadline: float) -> None:
        if not self.is_done(number):
            self._move(number - self._dropped, deadline)
            done = self._rows[: self._count, self._kernels.ROW_DONE]
            while self._first < self._count and done[self._first]:
                self._first += 1

    def is_done(self, number: int) -> bool:
        row = number - self._dropped
        return row < self._first or bool(self._rows[row, self._kernels.ROW_DONE])

    def next_sender(self, tag: int, deadline: float) -> int | None:
        group = self._group
        while True:
            is_late = time.monotonic() >= deadline
            first = (self._heard_last + 1) % group.size
            group.run(self._kernels.next_sender, (*self._table(), tag, first, not is_late), deadline)
            place = int(group.context[self._kernels.PEER])
            if place >= 0:
                self._heard_last = place
                return group.members[place]
            if is_late:
                return None

    def sends(self) -> bool:
        kernels, rows = self._kernels, self._rows[self._first : self._count]
        unsent = rows[:, kernels.ROW_MOVED] < rows[:, kernels.ROW_NBYTES]
        return bool(np.any((rows[:, kernels.ROW_SENDS] == 1) & unsent))

    def is_busy(self) -> bool:
        return not np.all(self._rows[self._first : self._count, self._kernels.ROW_DONE])

    def nudge(self) -> None:
        self._move(-1, 0.0)

    def abort(self) -> None:
        self._group.abort()

    def close(self) -> None:
        if self.reductions is not None:
            self.reductions.close()
        self._group.close()
        if self._group.stop():  # so that no kernel touches the tensors any more
            self.pending.clear()

    def collective(self, request: Request) -> Whole:
        return super().collective(request) if self.reductions is None else self.reductions.collective(request)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made = self.reductions.empty(shape, dtype) if self.reductions is not None else None
        return super().empty(shape, dtype) if made is None else made

    def wait_beside_work(self, beside_work: bool) -> None:
        self._group.wait_beside_work(beside_work)

    def _move(self, wanted: int, deadline: float) -> None:
        self._group.run(self._kernels.move, (*self._table(), wanted), deadline)

    def _move_beside(self) -> None:
        if self.is_busy():
            self._kernels.move(*self._table(), -1)  # the wait for a message raises what is wrong with it

    def _table(self) -> tuple[int, ...]:
        """Return the arguments of each kernel: the rings, and what has been posted."""
        group = self._group
        table, blocked = self._rows.ctypes.data, self._blocked.ctypes.data
        rings = (group.context_address, group.rings, group.plan.ring_bytes)
        return (*rings, table, self._first, self._count, blocked)

    def _add(self, sends: int, peer: int, tensor: torch.Tensor, tag: int) -> int:
        if self._count == len(self._rows):
            self._make_room()
        nbytes = tensor.numel() * tensor.element_size()
        self._rows[self._count] = (sends, self._index[peer], tag, tensor.data_ptr(), nbytes, -1, 0, 0)
        self._count += 1
        return self._dropped + self._count - 1

    def _make_room(self) -> None:
        """Drop the rows that are done; a longer table where that is not enough."""
        stay = np.flatnonzero(self._rows[: self._count, self._kernels.ROW_DONE] == 0)
        kept = self._rows[stay]
        if len(kept) > len(self._rows) // 2:
            self._rows = np.zeros((2 * len(self._rows), self._kernels.ROW_FIELDS), dtype=np.int64)
        self._rows[: len(kept)] = kept
        before, self._dropped = self._dropped, self._dropped + self._count
        self._renumber({before + int(row): self._dropped + place for place, row in enumerate(stay)})
        self._first, self._count = 0, len(kept)
