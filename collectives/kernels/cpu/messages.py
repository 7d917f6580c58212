"""Messages in shared memory: a ring of bytes per ordered pair of ranks, with one writer and one reader.

A message is a line with its tag and length, then its bytes, filled up to a whole line. The messages that a process has posted
are rows of a table, in the order posted. A message belongs to a row whose tag has the same low 32 bits; the other bits, the
kind of its numbers, and its length must then be equal too.
"""

from __future__ import annotations

from numba import int64, njit

from gradwire.collectives.kernels.cpu.compiling import compiled
from gradwire.collectives.kernels.cpu.context import (
    ABORTED,
    DISAGREED,
    FINISHED,
    FOUND_NBYTES,
    FOUND_TAG,
    LINE,
    PATIENT,
    PEER,
    PENDING,
    RANK,
    SIZE,
    STOPPED,
    rest,
)
from gradwire.collectives.kernels.cpu.intrinsics import copy, field, load, monotonic_ns, set_field, store
from gradwire.collectives.kernels.wire import TAG_MASK

RING_LINE = 64
HEAD, TAIL, RING_BYTES = 0, LINE, 2 * LINE  # of a ring: bytes written so far, bytes read so far, where its data begins
(ROW_SENDS, ROW_PEER, ROW_TAG, ROW_ADDRESS, ROW_NBYTES, ROW_MOVED, ROW_DONE, ROW_START, ROW_FIELDS) = range(9)
_UNSTARTED = -1


@njit
def _copy_in(ring, capacity, position, source, length):
    start = position % capacity
    before_end = min(length, capacity - start)
    copy(ring + RING_BYTES + start, source, before_end)
    if length > before_end:
        copy(ring + RING_BYTES, source + before_end, length - before_end)


@njit
def _copy_out(ring, capacity, position, destination, length):
    start = position % capacity
    before_end = min(length, capacity - start)
    copy(destination, ring + RING_BYTES + start, before_end)
    if length > before_end:
        copy(destination + before_end, ring + RING_BYTES, length - before_end)


@njit
def _send_some(ring, capacity, row):
    """Write as much of a message as fits, at most a quarter of the ring, so that the reader can begin. Return whether it wrote.

    A message is not done before its reader has found a row for it, so that a rank which calls something else than the others
    notices it.
    """
    head = load(ring + HEAD)
    if load(row + 8 * ROW_MOVED) == load(row + 8 * ROW_NBYTES):
        taken = load(ring + TAIL) > load(row + 8 * ROW_START)
        if taken:
            store(row + 8 * ROW_DONE, 1)
        return taken
    free = capacity - (head - load(ring + TAIL))
    if free < RING_LINE:
        return False
    moved, nbytes = load(row + 8 * ROW_MOVED), load(row + 8 * ROW_NBYTES)
    if moved == _UNSTARTED:
        place = ring + RING_BYTES + head % capacity
        store(place, load(row + 8 * ROW_TAG))
        store(place + 8, nbytes)
        store(row + 8 * ROW_START, head)
        head += RING_LINE
        free -= RING_LINE
        moved = 0
    length = min(min(free, capacity // 4), nbytes - moved)
    if length > 0:
        _copy_in(ring, capacity, head, load(row + 8 * ROW_ADDRESS) + moved, length)
        head += (length + RING_LINE - 1) // RING_LINE * RING_LINE
        moved += length
    store(ring + HEAD, head)
    store(row + 8 * ROW_MOVED, moved)
    return True


@njit
def _receive_some(ring, capacity, row):
    """Read the bytes that have arrived of the message that a row is receiving. Return whether there were any."""
    tail = load(ring + TAIL)
    moved, nbytes = load(row + 8 * ROW_MOVED), load(row + 8 * ROW_NBYTES)
    length = min(min(load(ring + HEAD) - tail, capacity // 4), nbytes - moved)
    if length > 0:
        _copy_out(ring, capacity, tail, load(row + 8 * ROW_ADDRESS) + moved, length)
        moved += length
        store(ring + TAIL, tail + (length + RING_LINE - 1) // RING_LINE * RING_LINE)
        store(row + 8 * ROW_MOVED, moved)
    if moved == nbytes:
        store(row + 8 * ROW_DONE, 1)
    return length > 0


@njit
def _move_some(context, rings, capacity, table, first, count, blocked):
    """Move all messages as far as possible. Return how many moved, or -1 - peer if a message does not match its row.

    blocked: 2 * SIZE words.
    """
    rank, size = field(context, RANK), field(context, SIZE)
    stride = RING_BYTES + capacity
    for index in range(2 * size):
        store(blocked + 8 * index, 0)
    for index in range(first, count):
        row = table + 8 * ROW_FIELDS * index
        if load(row + 8 * ROW_SENDS) == 0 and load(row + 8 * ROW_MOVED) >= 0 and load(row + 8 * ROW_DONE) == 0:
            store(blocked + 16 * load(row + 8 * ROW_PEER), 1)  # the next bytes in that ring are not a header
    moves = 0
    for index in range(first, count):
        row = table + 8 * ROW_FIELDS * index
        if load(row + 8 * ROW_DONE) != 0:
            continue
        peer, sends = load(row + 8 * ROW_PEER), load(row + 8 * ROW_SENDS)
        turn = blocked + 8 * (2 * peer + sends)
        if sends == 1:
            if load(turn) == 0:
                moves += _send_some(rings + (rank * size + peer) * stride, capacity, row)
                if load(row + 8 * ROW_MOVED) < load(row + 8 * ROW_NBYTES):
                    store(turn, 1)
            continue
        ring = rings + (peer * size + rank) * stride
        if load(row + 8 * ROW_MOVED) == _UNSTARTED:
            tail = load(ring + TAIL)
            if load(turn) != 0:
                continue
            if load(ring + HEAD) == tail:
                store(turn, 1)  # later messages belong to this row before later rows
                continue
            place = ring + RING_BYTES + tail % capacity
            tag, nbytes = load(place), load(place + 8)
            if tag & TAG_MASK != load(row + 8 * ROW_TAG) & TAG_MASK:
                continue
            if tag != load(row + 8 * ROW_TAG) or nbytes != load(row + 8 * ROW_NBYTES):
                set_field(context, FOUND_TAG, tag)
                set_field(context, FOUND_NBYTES, nbytes)
                return -1 - peer
            store(ring + TAIL, tail + RING_LINE)
            store(row + 8 * ROW_MOVED, 0)
        moves += _receive_some(ring, capacity, row)
        store(turn, 1)  # one message a pass: the next one may be for a row that was passed over
    return moves


@njit
def _is_receiving(table, first, count, peer):
    """Return whether a message of a rank has begun to arrive and is incomplete."""
    for index in range(first, count):
        row = table + 8 * ROW_FIELDS * index
        is_from = load(row + 8 * ROW_SENDS) == 0 and load(row + 8 * ROW_PEER) == peer
        if is_from and load(row + 8 * ROW_MOVED) >= 0 and load(row + 8 * ROW_DONE) == 0:
            return True
    return False


@compiled(njit, int64(*[int64] * 10), nogil=True)
def next_sender(context, rings, capacity, table, first, count, blocked, tag, start, patient):
    """Find a message with a tag, from any rank, those from `start` on first; with `patient`, wait for it a while. PEER becomes
    the rank's place, or -1. The message stays in its ring."""
    rank, size = field(context, RANK), field(context, SIZE)
    beats = 0
    since = monotonic_ns()
    while True:
        moves = _move_some(context, rings, capacity, table, first, count, blocked)
        if moves < 0:
            set_field(context, PEER, -1 - moves)
            return DISAGREED
        for step in range(size):
            peer = (start + step) % size
            ring = rings + (peer * size + rank) * (RING_BYTES + capacity)
            tail = load(ring + TAIL)
            if peer == rank or load(ring + HEAD) == tail or _is_receiving(table, first, count, peer):
                continue
            if load(ring + RING_BYTES + tail % capacity) & TAG_MASK == tag & TAG_MASK:
                set_field(context, PEER, peer)
                return FINISHED
        set_field(context, PEER, -1)
        status = rest(context, beats, since) if patient != 0 else PENDING
        if status != FINISHED:
            return FINISHED if status == PENDING else status
        beats += 1
        if moves > 0:
            beats, since = 0, monotonic_ns()


@compiled(njit, int64(*[int64] * 8), nogil=True)
def move(context, rings, capacity, table, first, count, blocked, wanted):
    """Move the messages in rows [first, count) until row `wanted` is done; with -1, only move messages without waiting."""
    if field(context, ABORTED) != 0:
        return STOPPED
    beats = 0
    since = int64(0)
    while True:
        moves = _move_some(context, rings, capacity, table, first, count, blocked)
        if moves < 0:
            set_field(context, PEER, -1 - moves)
            return DISAGREED
        if wanted < 0 or load(table + 8 * ROW_FIELDS * wanted + 8 * ROW_DONE) != 0:
            return FINISHED
        if moves > 0:
            set_field(context, PATIENT, 0)
            beats = 0
            continue
        if beats == 0:
            since = monotonic_ns()
            set_field(context, PEER, load(table + 8 * ROW_FIELDS * wanted + 8 * ROW_PEER))
        status = rest(context, beats, since)
        if status != FINISHED:
            # Messages that came before the end of the wait count.
            if _move_some(context, rings, capacity, table, first, count, blocked) == 0:
                return status
            beats = -1
        beats += 1
