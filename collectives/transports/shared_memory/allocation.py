"""Tensors in shared memory, which each rank of a host allocates, and which the other ranks map.

A rank allocates tensors at any time, without the others. Its table in the segment lists them. Each change increments
the version of the table, and the rank announces the version with every operation. After the operation, all ranks map
the tensors that are new in its table, and use them from the next operation on. All ranks have read the same
announcements, so they agree which tensors are mapped, without another message.
"""

from __future__ import annotations

import ctypes
import logging
import math
import threading
import weakref
from collections import deque
from typing import NamedTuple

import numpy as np
import torch

from gradwire.collectives.transports.shared_memory.group import SLOT_FIELDS, SLOTS, LocalGroup
from gradwire.collectives.transports.shared_memory.segment import Segment, memory_left

_log = logging.getLogger("gradwire")

_GENERATION, _DESCRIPTOR, _NBYTES = range(3)


class TensorPlace(NamedTuple):
    """The place of a tensor: the slot in its rank's table, the offset in bytes from the beginning of the allocation in
    this slot, and the version of the table that first listed the allocation."""

    slot: int
    offset: int
    born: int


#: The TensorPlace of a tensor that is not in the table.
ELSEWHERE = TensorPlace(-1, 0, 0)


class Allocations:
    """The shared tensors of one rank, and the tensors of the other ranks that it has mapped."""

    def __init__(self, group: LocalGroup) -> None:
        self.group = group
        tables = (ctypes.c_int64 * (group.size * SLOTS * SLOT_FIELDS)).from_address(group.base + group.plan.tables)
        self._tables = np.ctypeslib.as_array(tables).reshape(group.size, SLOTS, SLOT_FIELDS)
        self._mine = self._tables[group.index]
        self._own: dict[int, Segment] = {}
        self._by_address: dict[int, tuple[int, int]] = {}
        self._theirs: dict[tuple[int, int], tuple[int, Segment | None]] = {}
        self._version = 0
        self._freed: deque[int] = deque()
        self._lock = threading.RLock()  # reentrant: a finalizer may run while it is held
        self._closed = False
        self._announced = np.zeros(group.size, dtype=np.int64)
        group.context[group.kernels.ANNOUNCED] = self._announced.ctypes.data
        weakref.finalize(self, _give_up, self._own, self._theirs).atexit = False

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Return a tensor that the other ranks will map. Its memory is freed with it. Return None if the tensor is
        empty, all slots are in use, too little memory or no descriptor is left, or close() has been called."""
        nbytes = math.prod(shape) * dtype.itemsize
        with self._lock:
            if self._closed or nbytes == 0:
                return None
            self._reap()
            free = [slot for slot in range(SLOTS) if slot not in self._own]
            if not free:
                return None
            slot, version = free[0], self._version + 1
            try:
                if nbytes > memory_left() // self.group.size:
                    return None
                segment = Segment.create(self._name(self.group.index, version), nbytes)
            except OSError:  # no memory, or too many files are open
                return None
            assert segment.address is not None
            self._own[slot] = segment
            self._by_address[segment.address] = (slot, version)
            self.group.bases[self.group.index * SLOTS + slot] = segment.address
            self._mine[slot, _DESCRIPTOR:] = (segment.descriptor, nbytes, 0)
            self.group.kernels.publish(self._mine[slot, _GENERATION:].ctypes.data, version)
            self._publish(version)
        return segment.tensor(shape, dtype, _free, weakref.ref(self), slot, segment)

    def place(self, tensor: torch.Tensor) -> TensorPlace:
        """Return the TensorPlace of a contiguous tensor of this rank."""
        if self._freed:
            self._reap()
        start = tensor.untyped_storage().data_ptr()
        if (found := self._by_address.get(start)) is None:
            return ELSEWHERE
        return TensorPlace(found[0], tensor.data_ptr() - start, found[1])

    def map_news(self) -> None:
        """Map new tensors of other ranks, and unmap freed ones. Every rank calls it after an operation with news."""
        group = self.group
        for member in np.flatnonzero(self._announced != group.known).tolist():
            announced = int(self._announced[member])
            for slot in range(SLOTS) if member != group.index else ():
                generation, segment = self._theirs.get((member, slot), (0, None))
                if int(self._tables[member, slot, _GENERATION]) != generation:
                    if segment is not None:
                        segment.close()
                    self._theirs[member, slot] = self._map(member, slot)
            group.known[member] = announced

    def close(self) -> None:
        """Unmap the others' tensors, unless a kernel still runs. This rank's tensors become ordinary tensors, which other ranks
        unmap when they close."""
        with self._lock:
            self._closed = True
            if not self.group.stop():
                return
            _give_up(self._own, self._theirs)

    def withdraw(self, slot: int, address: int) -> None:
        """Remove a tensor whose memory is about to be freed from the table. Its slot stays in use until _reap(), because a
        finalizer may run at any point, and cannot announce versions in order."""
        with self._lock:
            del self._by_address[address]
            if not self._closed:
                self._mine[slot, _GENERATION] = 0
                self.group.bases[self.group.index * SLOTS + slot] = 0
                self._freed.append(slot)

    def _reap(self) -> None:
        """Free the slots of freed tensors, and announce the new version of the table."""
        if self._freed and not self._closed:
            with self._lock:
                while self._freed:
                    del self._own[self._freed.popleft()]
                self._publish(self._version + 1)

    def _publish(self, version: int) -> None:
        self._version = version
        group, kernels = self.group, self.group.kernels
        kernels.publish(group.base + group.index * kernels.RANK_BYTES + kernels.VERSION, version)

    def _name(self, member: int, generation: int) -> str:
        return f"{self.group.name}-{member}-{generation}"

    def _map(self, member: int, slot: int) -> tuple[int, Segment | None]:
        group = self.group
        row = self._tables[member, slot]
        base = member * SLOTS + slot
        group.bases[base] = 0
        while generation := int(row[_GENERATION]):
            try:
                name = self._name(member, generation)
                segment = Segment.open(group.pids[member], int(row[_DESCRIPTOR]), name, int(row[_NBYTES]))
            except OSError as error:
                if int(row[_GENERATION]) == generation:
                    if not group.context[group.kernels.FAILED]:
                        _log.warning("gradwire: tensors in shared memory are copied from now on: %s", error)
                    group.context[group.kernels.FAILED] = 1
                    return generation, None
                continue  # its owner has freed it in the meantime
            assert segment.address is not None
            group.bases[base] = segment.address
            return generation, segment
        return 0, None


def _give_up(own: dict[int, Segment], theirs: dict[tuple[int, int], tuple[int, Segment | None]]) -> None:
    """Unmap the others' tensors, and close the descriptors through which others map this rank's tensors: when the Allocations
    are closed, or deleted without a close()."""
    for _, segment in theirs.values():
        if segment is not None:
            segment.close()
    theirs.clear()
    for segment in own.values():
        segment.seal_off()


def _free(allocations: weakref.ref[Allocations], slot: int, segment: Segment) -> None:
    """Free a tensor's memory. It keeps no Allocations alive: a gradient may be used for longer than its Communicator."""
    found = allocations()
    if found is not None and not found.group.is_ours:
        return  # in a forked child: the parent still uses the memory
    if found is not None and segment.address is not None:
        found.withdraw(slot, segment.address)
    segment.close()
