"""Messages between ranks of one host, through rings in shared memory, and reductions directly in shared memory."""

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

    def collective(self, request: Request) -> Whole:
        """See Transport. Compiles the arithmetic of the dtype, or loads it from the disk."""
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
    """A Transport among the members of a LocalGroup. A wait for any message moves all messages that this rank has
    posted, so that a full ring blocks no rank for ever. reductions: for a group of all ranks; None without the
    algorithm 'shared'."""

    shares_memory = True
    receives_from_any = True
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
        self._dropped = 0  # number of the message in the first row
        self._first = 0  # all rows before it are done
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

    def has_unfinished_send(self) -> bool:
        kernels, rows = self._kernels, self._rows[self._first : self._count]
        unsent = rows[:, kernels.ROW_MOVED] < rows[:, kernels.ROW_NBYTES]
        return bool(np.any((rows[:, kernels.ROW_SENDS] == 1) & unsent))

    def is_busy(self) -> bool:
        return not np.all(self._rows[self._first : self._count, self._kernels.ROW_DONE])

    def progress(self) -> None:
        self._move(-1, 0.0)

    def abort(self) -> None:
        self._group.abort()

    def close(self) -> None:
        if self.reductions is not None:
            self.reductions.close()
        self._group.close()
        if self._group.stop():  # then no kernel uses the tensors any more
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
            self._kernels.move(*self._table(), -1)  # errors are raised by the wait for the message

    def _table(self) -> tuple[int, ...]:
        """Return the first arguments of each kernel: the context, the rings, and the rows of posted messages."""
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
        """Drop the rows that are done. If more than half of the rows stay, double the table."""
        stay = np.flatnonzero(self._rows[: self._count, self._kernels.ROW_DONE] == 0)
        kept = self._rows[stay]
        if len(kept) > len(self._rows) // 2:
            self._rows = np.zeros((2 * len(self._rows), self._kernels.ROW_FIELDS), dtype=np.int64)
        self._rows[: len(kept)] = kept
        before, self._dropped = self._dropped, self._dropped + self._count
        self._renumber({before + int(row): self._dropped + place for place, row in enumerate(stay)})
        self._first, self._count = 0, len(kept)
