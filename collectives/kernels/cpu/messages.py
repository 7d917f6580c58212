"""Messages in shared memory: a ring of bytes per ordered pair of ranks, with one writer and one reader.

A message is a line with its tag and length, then its bytes, filled up to a whole line. For the table of the messages that a
process has posted, see gradwire.collectives.kernels.cpu.rows.
"""

from __future__ import annotations

from gradwire.collectives.kernels.cpu.compiling import entry
from gradwire.collectives.kernels.cpu.context import BLOCKED, LINE, PATIENT, RING_CAPACITY, RINGS, rest
from gradwire.collectives.kernels.cpu.deferred import int64, njit
from gradwire.collectives.kernels.cpu.intrinsics import copy, field, load, monotonic_ns, set_field, store
from gradwire.collectives.kernels.cpu.rows import (
    ABORTED,
    COUNT,
    DISAGREED,
    FINISHED,
    FIRST,
    FOUND_NBYTES,
    FOUND_TAG,
    FULL,
    PEER,
    PENDING,
    RANK,
    ROW_ADDRESS,
    ROW_DONE,
    ROW_MOVED,
    ROW_NBYTES,
    ROW_PEER,
    ROW_SENDS,
    ROW_START,
    ROW_TAG,
    SIZE,
    STOPPED,
    add_row,
    is_done,
    row_of,
)
from gradwire.collectives.kernels.wire import TAG_MASK

RING_LINE = 64
HEAD, TAIL, RING_BYTES = 0, LINE, 2 * LINE  # of a ring: bytes written so far, bytes read so far, where its data begins
UNSTARTED = -1  # of a row's ROW_MOVED


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
    if field(row, ROW_MOVED) == field(row, ROW_NBYTES):
        taken = load(ring + TAIL) > field(row, ROW_START)
        if taken:
            set_field(row, ROW_DONE, 1)
        return taken
    free = capacity - (head - load(ring + TAIL))
    if free < RING_LINE:
        return False
    moved, nbytes = field(row, ROW_MOVED), field(row, ROW_NBYTES)
    if moved == UNSTARTED:
        place = ring + RING_BYTES + head % capacity
        store(place, field(row, ROW_TAG))
        store(place + 8, nbytes)
        set_field(row, ROW_START, head)
        head += RING_LINE
        free -= RING_LINE
        moved = 0
    length = min(min(free, capacity // 4), nbytes - moved)
    if length > 0:
        _copy_in(ring, capacity, head, field(row, ROW_ADDRESS) + moved, length)
        head += (length + RING_LINE - 1) // RING_LINE * RING_LINE
        moved += length
    store(ring + HEAD, head)
    set_field(row, ROW_MOVED, moved)
    return True


@njit
def _receive_some(ring, capacity, row):
    """Read the bytes that have arrived of the message that a row is receiving. Return whether there were any."""
    tail = load(ring + TAIL)
    moved, nbytes = field(row, ROW_MOVED), field(row, ROW_NBYTES)
    length = min(min(load(ring + HEAD) - tail, capacity // 4), nbytes - moved)
    if length > 0:
        _copy_out(ring, capacity, tail, field(row, ROW_ADDRESS) + moved, length)
        moved += length
        store(ring + TAIL, tail + (length + RING_LINE - 1) // RING_LINE * RING_LINE)
        set_field(row, ROW_MOVED, moved)
    if moved == nbytes:
        set_field(row, ROW_DONE, 1)
    return length > 0


@njit
def move_some(context):
    """Move all messages as far as possible. Return how many moved, or -1 - peer if a message does not match its row."""
    rank, size = field(context, RANK), field(context, SIZE)
    rings, capacity, blocked = field(context, RINGS), field(context, RING_CAPACITY), field(context, BLOCKED)
    first, count = field(context, FIRST), field(context, COUNT)
    while first < count and field(row_of(context, first), ROW_DONE) != 0:
        first += 1
    set_field(context, FIRST, first)
    stride = RING_BYTES + capacity
    for index in range(2 * size):
        store(blocked + 8 * index, 0)
    for number in range(first, count):
        row = row_of(context, number)
        if field(row, ROW_SENDS) == 0 and field(row, ROW_MOVED) >= 0 and field(row, ROW_DONE) == 0:
            store(blocked + 16 * field(row, ROW_PEER), 1)  # the next bytes in that ring are not a header
    moves = 0
    for number in range(first, count):
        row = row_of(context, number)
        if field(row, ROW_DONE) != 0:
            continue
        peer, sends = field(row, ROW_PEER), field(row, ROW_SENDS)
        turn = blocked + 8 * (2 * peer + sends)
        if sends == 1:
            if load(turn) == 0:
                moves += _send_some(rings + (rank * size + peer) * stride, capacity, row)
                if field(row, ROW_MOVED) < field(row, ROW_NBYTES):
                    store(turn, 1)
            continue
        ring = rings + (peer * size + rank) * stride
        if field(row, ROW_MOVED) == UNSTARTED:
            tail = load(ring + TAIL)
            if load(turn) != 0:
                continue
            if load(ring + HEAD) == tail:
                store(turn, 1)  # later messages belong to this row before later rows
                continue
            place = ring + RING_BYTES + tail % capacity
            tag, nbytes = load(place), load(place + 8)
            if tag & TAG_MASK != field(row, ROW_TAG) & TAG_MASK:
                continue
            if tag != field(row, ROW_TAG) or nbytes != field(row, ROW_NBYTES):
                set_field(context, FOUND_TAG, tag)
                set_field(context, FOUND_NBYTES, nbytes)
                return -1 - peer
            store(ring + TAIL, tail + RING_LINE)
            set_field(row, ROW_MOVED, 0)
        moves += _receive_some(ring, capacity, row)
        store(turn, 1)  # one message a pass: the next one may be for a row that was passed over
    return moves


@njit
def _is_receiving(context, peer):
    """Return whether a message of a rank has begun to arrive and is incomplete."""
    for number in range(field(context, FIRST), field(context, COUNT)):
        row = row_of(context, number)
        is_from = field(row, ROW_SENDS) == 0 and field(row, ROW_PEER) == peer
        if is_from and field(row, ROW_MOVED) >= 0 and field(row, ROW_DONE) == 0:
            return True
    return False


@entry(6)
def add(context, sends, peer, tag, address, nbytes):
    """Post a message. Return FINISHED, or FULL if the table has no room."""
    return FINISHED if add_row(context, sends, peer, tag, address, nbytes, UNSTARTED) else FULL


@entry(4)
def next_sender(context, tag, start, patient):
    """Find a message with a tag, from any rank, those from `start` on first; with `patient`, wait for it a while. PEER becomes
    the rank's place, or -1. The message stays in its ring."""
    if field(context, ABORTED) != 0:
        return STOPPED
    rank, size = field(context, RANK), field(context, SIZE)
    rings, capacity = field(context, RINGS), field(context, RING_CAPACITY)
    beats = 0
    since = monotonic_ns()
    while True:
        moves = move_some(context)
        if moves < 0:
            set_field(context, PEER, -1 - moves)
            return DISAGREED
        for step in range(size):
            peer = (start + step) % size
            ring = rings + (peer * size + rank) * (RING_BYTES + capacity)
            tail = load(ring + TAIL)
            if peer == rank or load(ring + HEAD) == tail or _is_receiving(context, peer):
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


@entry(2)
def move(context, number):
    """Move messages until the message of that number is done; with -1, only move messages without waiting."""
    if field(context, ABORTED) != 0:
        return STOPPED
    beats = 0
    since = int64(0)
    while True:
        moves = move_some(context)
        if moves < 0:
            set_field(context, PEER, -1 - moves)
            return DISAGREED
        if number < 0 or is_done(context, number):
            return FINISHED
        if moves > 0:
            set_field(context, PATIENT, 0)
            beats = 0
            continue
        if beats == 0:
            since = monotonic_ns()
            set_field(context, PEER, field(row_of(context, number), ROW_PEER))
        status = rest(context, beats, since)
        if status != FINISHED:
            # Messages that came before the end of the wait count.
            if move_some(context) == 0:
                return status
            beats = -1
        beats += 1
