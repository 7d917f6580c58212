"""Messages between ranks of one host, through rings in the memory that they share."""

from __future__ import annotations

import time

import numpy as np
import torch

from gradwire.collectives.link.base import Request, Transport, Whole
from gradwire.collectives.link.rows import RowPending, Table
from gradwire.collectives.link.shared_memory.group import LocalGroup
from gradwire.collectives.link.shared_memory.reductions import PREFERRED, SharedMemory

_FIRST_ROWS = 64


class SharedMemoryTransport(Table, Transport):
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
        self.share_alignment_bytes = {} if reductions is None else reductions.share_alignment_bytes
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
        """See Table."""
        now = self._now(number)
        if not self._has_moved(now):
            self._move(now - self._dropped, deadline)
            self._pass_over_done()
        self._release(number)

    def is_done(self, number: int) -> bool:
        """See Table."""
        self.nudge()
        return self._has_moved(self._now(number))

    def _has_moved(self, number: int) -> bool:
        row = number - self._dropped
        return row < self._first or bool(self._rows[row, self._kernels.ROW_DONE])

    def next_sender(self, tag: int, deadline: float) -> int | None:
        """See Transport."""
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
        """See Transport."""
        kernels, rows = self._kernels, self._rows[self._first : self._count]
        unsent = rows[:, kernels.ROW_MOVED] < rows[:, kernels.ROW_NBYTES]
        return bool(np.any((rows[:, kernels.ROW_SENDS] == 1) & unsent))

    def is_busy(self) -> bool:
        """See Transport."""
        return not np.all(self._rows[self._first : self._count, self._kernels.ROW_DONE])

    def nudge(self) -> None:
        """See Transport."""
        self._move(-1, 0.0)

    def abort(self) -> None:
        self._group.abort()

    def close(self) -> None:
        if self.reductions is not None:
            self.reductions.close()
        self._group.close()

    def collective(self, request: Request) -> Whole:
        """See Transport."""
        return super().collective(request) if self.reductions is None else self.reductions.collective(request)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See Transport."""
        made = self.reductions.empty(shape, dtype) if self.reductions is not None else None
        return super().empty(shape, dtype) if made is None else made

    def wait_beside_work(self, beside_work: bool) -> None:
        """See Transport."""
        self._group.wait_beside_work(beside_work)

    def _move(self, wanted: int, deadline: float) -> None:
        self._group.run(self._kernels.move, (*self._table(), wanted), deadline)

    def _move_beside(self) -> None:
        if self.is_busy():
            self._kernels.move(*self._table(), -1)  # what is wrong is told to whoever waits for it

    def _table(self) -> tuple[int, ...]:
        """Return what each kernel is told of the rings, and of what has been posted."""
        group = self._group
        table, blocked = self._rows.ctypes.data, self._blocked.ctypes.data
        rings = (group.context_address, group.rings, group.plan.ring_bytes)
        return (*rings, table, self._first, self._count, blocked)

    def _add(self, sends: int, peer: int, tensor: torch.Tensor, tag: int) -> RowPending:
        if self._count == len(self._rows):
            self._make_room()
        nbytes = tensor.numel() * tensor.element_size()
        self._rows[self._count] = (sends, self._index[peer], tag, tensor.data_ptr(), nbytes, -1, 0, 0)
        self._count += 1
        return self.hold(self._dropped + self._count - 1, tensor)

    def _pass_over_done(self) -> None:
        done = self._rows[: self._count, self._kernels.ROW_DONE]
        while self._first < self._count and done[self._first]:
            self._first += 1

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
