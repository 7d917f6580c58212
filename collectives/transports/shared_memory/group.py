"""The ranks of one host, which share a segment of memory: mapping it, waiting in it, and detecting lost ranks."""

from __future__ import annotations

import ctypes
import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import get_ident
from types import ModuleType
from typing import Any

import numpy as np

from gradwire.collectives import cores
from gradwire.collectives.control.membership import Membership
from gradwire.collectives.errors import LinkError, ranks_text
from gradwire.collectives.transports.base import KIND_BITS
from gradwire.collectives.transports.shared_memory.segment import Segment

_log = logging.getLogger("gradwire")

#: How many shared tensors a rank may have at a time.
SLOTS = 256
SLOT_FIELDS = 4

#: Every rank reduces tensors of up to this size whole. For larger ones, less data moves if each reduces a share.
WHOLE_BYTES = 8 << 10

#: Chunks of an allreduce in flight: while one is copied out, the next are reduced and staged. Many ranks use fewer.
_DEPTH, _SMALLEST_DEPTH = 8, 2

#: The sizes of the staging area and of all rings, which should stay in the caches, and the limits of a chunk or ring.
_STAGING_BYTES, _SMALLEST_CHUNK, _LARGEST_CHUNK = 8 << 20, 4 << 10, 64 << 10
_RINGS_BYTES, _SMALLEST_RING, _LARGEST_RING = 16 << 20, 16 << 10, 512 << 10

#: Bytes that are reduced at once, so that they and their sources stay in the first-level cache. If a result must not
#: overwrite its source, it is formed in this rank's slot for small tensors of an operation of the same parity. This
#: slot is free: all ranks have begun this operation, so no rank still reads the tensor of the operation two before.
_BLOCK_BYTES = 8 << 10
assert _BLOCK_BYTES <= WHOLE_BYTES, "a block has room in a slot for a whole message"

#: How long close() waits for a kernel to return. After an abort, a kernel that waits returns within milliseconds.
_LEAVE_S = 1.0

#: Values of a rank's line STATE, which is 0 at first: the rank has aborted, or has closed.
_BROKEN, _GONE = 1, 2

#: Beats that a wait spins: about 20 us if every rank has a core, much shorter if ranks or threads share cores.
_SPINS, _SPINS_SHARING = 1000, 20

#: How long a wait yields the core before it sleeps: only briefly if other threads or ranks may have work, because
#: yielding still takes half a core from them. Where yielding uses up the quota of a container, it lasts about as long as the
#: shortest sleep with its wake-up, so that a wait costs about twice the better choice at worst.
_YIELD_NS, _YIELD_NS_IN_QUOTA, _YIELD_NS_BESIDE_THREADS = 10_000_000, 200_000, 20_000


def _power_of_two(wanted: int, least: int, most: int) -> int:
    return max(least, min(most, 1 << max(0, wanted.bit_length() - 1)))


class _Plan:
    """The layout of the segment of `size` ranks: sizes, and offsets in bytes from its beginning."""

    def __init__(self, kernels: ModuleType, size: int) -> None:
        self.depth = max(_SMALLEST_DEPTH, min(_DEPTH, 8 * _DEPTH // size))
        self.chunk_bytes = _power_of_two(_STAGING_BYTES // (self.depth * size * size), _SMALLEST_CHUNK, _LARGEST_CHUNK)
        self.ring_bytes = _power_of_two(_RINGS_BYTES // max(1, size * (size - 1)), _SMALLEST_RING, _LARGEST_RING)
        self.tables = size * kernels.RANK_BYTES
        self.whole = self.tables + size * SLOTS * SLOT_FIELDS * 8
        self.staging = self.whole + 2 * size * WHOLE_BYTES
        self.rings = self.staging + self.depth * size * size * self.chunk_bytes
        self.nbytes = self.rings + size * size * (kernels.RING_BYTES + self.ring_bytes)


class LocalGroup:
    """The ranks of one host, and their shared segment.

    name: that of the segment. members: the host's ranks in the world, ascending. pids: their process ids. everyone:
    whether the members are all ranks, and no other ranks of the host compute while they wait.
    """

    def __init__(
        self,
        kernels: ModuleType,
        segment: Segment,
        name: str,
        pids: Sequence[int],
        members: Sequence[int],
        rank: int,
        *,
        everyone: bool,
    ) -> None:
        self.kernels = kernels
        self.name = name
        self.pids = tuple(pids)
        self.members = tuple(members)
        self.index = self.members.index(rank)
        self.size = len(self.members)
        self.plan = _Plan(kernels, self.size)
        self.bases = np.zeros(self.size * SLOTS, dtype=np.int64)
        self.known = np.zeros(self.size, dtype=np.int64)
        self.context = np.zeros(kernels.MEMORY_FIELDS, dtype=np.int64)
        self.context_address: int = self.context.ctypes.data
        self._segment = segment
        self._pending: int = kernels.PENDING
        self._with_news: int = kernels.FINISHED_WITH_NEWS
        self._lock = threading.Lock()
        self.running = threading.Lock()
        self._stopped = False
        self._beside: Callable[[], Callable[[], None] | None] = lambda: None
        self._process = os.getpid()
        self._processes = select.poll()
        self._members_by_descriptor: dict[int, int] = {}
        assert segment.address is not None
        self.base = segment.address
        self._everyone = everyone
        state_offset = self.index * kernels.RANK_BYTES + kernels.STATE
        self._finalizer = weakref.finalize(
            self, _give_back, self._process, segment, state_offset, self._members_by_descriptor
        )
        self._finalizer.atexit = False
        context = {
            kernels.RANK: self.index,
            kernels.SIZE: self.size,
            kernels.BLOCK: _BLOCK_BYTES,
            kernels.RANKS: self.base,
            kernels.WHOLE: self.base + self.plan.whole,
            kernels.WHOLE_BYTES: WHOLE_BYTES,
            kernels.STAGING: self.base + self.plan.staging,
            kernels.CHUNK_BYTES: self.plan.chunk_bytes,
            kernels.DEPTH: self.plan.depth,
            kernels.SLOTS: SLOTS,
            kernels.BASES: self.bases.ctypes.data,
            kernels.KNOWN: self.known.ctypes.data,
        }
        self.context[list(context)] = list(context.values())
        self._waiting_thread = 0

    @property
    def is_ours(self) -> bool:
        """Return False in a forked child, which has mapped the segment but is no member of the group."""
        return os.getpid() == self._process

    def _wait_as(self, thread: int) -> None:
        """Set how the waits of a thread use the core. The main thread waits in place of its own work. Another one leaves the core
        to the work of the main thread."""
        self._waiting_thread = thread
        beside_work = thread != threading.main_thread().ident
        a_core_each = not beside_work and self.size <= cores.available()
        yield_ns = _YIELD_NS_BESIDE_THREADS
        if self._everyone and not beside_work:
            yield_ns = _YIELD_NS_IN_QUOTA if cores.quota_is_short(self.size) else _YIELD_NS
        self.context[self.kernels.SPINS] = _SPINS if a_core_each else _SPINS_SHARING
        self.context[self.kernels.YIELD_NS] = yield_ns

    def move_beside(self, move: Callable[[], None]) -> None:
        """Call a method after every 50 ms of a kernel's wait, to move messages for which other ranks may wait. The
        method must not call run(), and is not kept alive."""
        self._beside = weakref.WeakMethod(move)

    def watch(self, member: int) -> None:
        """Let dead() detect the end of a member's process. member: its rank. Raises OSError without such a process."""
        descriptor = os.pidfd_open(self.pids[self.members.index(member)])
        self._members_by_descriptor[descriptor] = member
        self._processes.register(descriptor, select.POLLIN)

    def word(self, member: int, line: int) -> ctypes.c_int64:
        """Return the first word in a line of a member. member: its place among members."""
        return ctypes.c_int64.from_address(self.base + member * self.kernels.RANK_BYTES + line)

    def run(self, kernel: Callable[..., int], arguments: tuple[int, ...], deadline: float) -> bool:
        """Call a kernel until it has finished. Return whether ranks have announced new versions of their tables in the
        operation. Raises LinkError as Pending.wait() does."""
        with self.running:
            if self._stopped or get_ident() != self._waiting_thread:
                self.ensure_open()
            status = kernel(*arguments)
            if status >= self._pending:
                lost: set[int] = set()
                try:
                    while status >= self._pending:
                        lost = self.check(status, deadline, lost)
                        if (beside := self._beside()) is not None:
                            beside()
                        self.context[self.kernels.PATIENT] = 1
                        status = kernel(*arguments)
                finally:  # the deadline may be that of a slice, after which this rank waits again
                    self.context[self.kernels.PATIENT] = 0
        return status == self._with_news

    def ensure_open(self) -> None:
        """Prepare for calls of kernels on this thread. Raises LinkError if the group is closed. This thread holds `running`, so
        the group stays open meanwhile."""
        if self._stopped:
            raise LinkError(None, timed_out=False, detail="this rank has closed its Communicator")
        if (thread := get_ident()) != self._waiting_thread:
            self._wait_as(thread)

    def check(self, status: int, deadline: float, lost: set[int]) -> set[int]:
        """Raise LinkError if a kernel's status means an error, an awaited rank is in `lost`, or the deadline passes.
        Return the awaited ranks that are lost. lost: the return value of the last check. Since then, the kernel has
        looked once more for data that these ranks wrote before they were lost."""
        kernels = self.kernels
        awaited = self._awaited()
        peer = min(awaited)
        if status == kernels.DISAGREED:
            found = int(self.context[kernels.FOUND_TAG]) >> KIND_BITS, int(self.context[kernels.FOUND_NBYTES])
            raise LinkError(peer, timed_out=False, detail=f"rank {peer} called another operation", found=found)
        if status == kernels.STOPPED:
            raise LinkError(None, timed_out=False, detail="the wait was ended", awaited=awaited)
        if gone := awaited & lost:
            how = "process has ended" if gone & self.dead() else "Communicator is closed or broken"
            raise LinkError(min(gone), timed_out=False, detail=f"{ranks_text(gone)}: the {how}")
        if time.monotonic() >= deadline:
            detail = f"received nothing from {ranks_text(awaited)}"
            raise LinkError(peer, timed_out=True, detail=detail, awaited=awaited)
        return awaited & (self.dead() | self._left(_BROKEN))

    def _awaited(self) -> set[int]:
        """Return the ranks for which the last kernel call waited."""
        kernels = self.kernels
        peer = int(self.context[kernels.PEER])
        if peer >= 0:
            return {self.members[peer]}
        line, least = int(self.context[kernels.WAIT_LINE]), int(self.context[kernels.WAIT_LEAST])
        behind = {rank for member, rank in enumerate(self.members) if self.word(member, line).value < least}
        others = set(self.members) - {self.members[self.index]}
        return behind & others or others

    def dead(self) -> set[int]:
        """Return the ranks whose process has ended without closing the group."""
        if self._segment.address is None:
            return set()
        ended = {self._members_by_descriptor[descriptor] for descriptor, _ in self._processes.poll(0)}
        return ended - self._left(_GONE)

    def _left(self, least: int) -> set[int]:
        line = self.kernels.STATE
        return {rank for member, rank in enumerate(self.members) if self.word(member, line).value >= least}

    def abort(self) -> None:
        """End this rank's wait, and the waits of other ranks for it."""
        with self._lock:
            if self._segment.address is not None and self.is_ours:
                self.word(self.index, self.kernels.STATE).value = _BROKEN
                self.context[self.kernels.ABORTED] = 1

    def stop(self) -> bool:
        """Prevent further kernel calls; return False if a kernel still runs after 1 s, so that its memory must stay."""
        if self.running.acquire(timeout=_LEAVE_S):
            self._stopped = True
            self.running.release()
        return self._stopped

    def close(self) -> None:
        """Set this rank's state to closed, and unmap the segment. If a kernel still runs, the segment stays mapped
        until the process ends."""
        with self._lock:
            if not self.stop():
                self._finalizer.detach()
            elif self.is_ours:
                self._finalizer()


def _give_back(owner: int, segment: Segment, state_offset: int, members_by_descriptor: dict[int, int]) -> None:
    """Set the rank's state to closed, and unmap the segment, when a group is closed, or deleted without a close(). owner: the
    process of the rank; a forked child does not set the state."""
    if segment.address is not None and os.getpid() == owner:
        ctypes.c_int64.from_address(segment.address + state_offset).value = _GONE
    for descriptor in members_by_descriptor:
        os.close(descriptor)
    members_by_descriptor.clear()
    segment.close()


class Unshared(OSError):
    """This rank cannot share memory with the other ranks of its host."""


@contextmanager
def offer_host(membership: Membership, kernels: ModuleType | str) -> Iterator[dict[str, Any]]:
    """Yield this rank's card for sharing() and join_host(), which all ranks of a host call inside.

    kernels: the result of cpu_kernels(). The first rank of a host offers a segment, or the reason why it has none."""
    members = next(host for host in membership.hosts if membership.rank in host)
    with ExitStack() as made:
        card: dict[str, Any] = {"pid": os.getpid()}
        if refused := [why for rank, why in membership.unshared.items() if rank in members]:
            card["why"] = refused[0]
        elif isinstance(kernels, str):
            card["why"] = kernels
        elif members[0] == membership.rank and len(members) > 1:
            card |= made.enter_context(Segment.offered(_Plan(kernels, len(members)).nbytes))
        yield card


def sharing(membership: Membership) -> tuple[int, ...]:
    """Return the ranks of this host that share memory; none if this rank is alone on it, or a card says why they do not.

    membership.cards: of offer_host(), by rank."""
    rank, cards = membership.rank, membership.cards
    members = next(host for host in membership.hosts if rank in host)
    problems = {member: cards[member]["why"] for member in members if "why" in cards[member]}
    if problems and len(members) > 1 and rank == members[0]:
        member, why = next(iter(problems.items()))
        _log.warning("gradwire: ranks %s use sockets instead of shared memory: rank %d: %s", members, member, why)
    return members if len(members) > 1 and not problems else ()


def join_host(membership: Membership, members: Sequence[int], kernels: ModuleType) -> LocalGroup:
    """Return the group of this host's ranks, the result of sharing(). Raises Unshared if this rank cannot map the segment, or
    detect the end of another rank."""
    rank, cards = membership.rank, membership.cards
    with ExitStack() as made:
        try:
            segment = Segment.take(cards[members[0]], _Plan(kernels, len(members)).nbytes)
            made.callback(segment.close)
            name, pids = cards[members[0]]["name"], [cards[member]["pid"] for member in members]
            everyone = len(members) == membership.size and not membership.beside_others
            group = LocalGroup(kernels, segment, name, pids, members, rank, everyone=everyone)
            made.callback(group.close)
            for member in members:
                if member != rank:
                    group.watch(member)
        except OSError as error:
            raise Unshared(str(error)) from error
        made.pop_all()
    return group
