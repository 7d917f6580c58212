"""Messages in shared memory: a ring of bytes per ordered pair of ranks, with one writer and one reader.

A message is a line with its tag and length, then its bytes, filled up to a whole line. For the table of the messages that a
process has posted, see gradwire.collectives.kernels.cpu.rows.
"""

from __future__ import annotations

from numba import int64, njit

from gradwire.collectives.kernels import layout
from gradwire.collectives.kernels.cpu.intrinsics import copy, field, load, monotonic_ns, set_field, store
from gradwire.collectives.kernels.cpu.rows import add_row, is_done, row_of
from gradwire.collectives.kernels.cpu.waits import rest

RING_LINE = 64
UNSTARTED = -1  # of a row's ROW_MOVED


@njit
def _copy_in(ring, capacity, position, source, length):
    start = position % capacity
    before_end = min(length, capacity - start)
    copy(ring + layout.RING_BYTES + start, source, before_end)
    if length > before_end:
        copy(ring + layout.RING_BYTES, source + before_end, length - before_end)


@njit
def _copy_out(ring, capacity, position, destination, length):
    start = position % capacity
    before_end = min(length, capacity - start)
    copy(destination, ring + layout.RING_BYTES + start, before_end)
    if length > before_end:
        copy(destination + before_end, ring + layout.RING_BYTES, length - before_end)


@njit
def _send_some(ring, capacity, row):
    """Write as much of a message as fits, at most a quarter of the ring, so that the reader can begin. Return whether it wrote.

    A message is not done before its reader has found a row for it, so that a rank which calls something else than the others
    notices it.
    """
    head = load(ring + layout.HEAD)
    if field(row, layout.ROW_MOVED) == field(row, layout.ROW_NBYTES):
        taken = load(ring + layout.TAIL) > field(row, layout.ROW_START)
        if taken:
            set_field(row, layout.ROW_DONE, 1)
        return taken
    free = capacity - (head - load(ring + layout.TAIL))
    if free < RING_LINE:
        return False
    moved, nbytes = field(row, layout.ROW_MOVED), field(row, layout.ROW_NBYTES)
    if moved == UNSTARTED:
        place = ring + layout.RING_BYTES + head % capacity
        store(place, field(row, layout.ROW_TAG))
        store(place + 8, nbytes)
        set_field(row, layout.ROW_START, head)
        head += RING_LINE
        free -= RING_LINE
        moved = 0
    length = min(min(free, capacity // 4), nbytes - moved)
    if length > 0:
        _copy_in(ring, capacity, head, field(row, layout.ROW_ADDRESS) + moved, length)
        head += (length + RING_LINE - 1) // RING_LINE * RING_LINE
        moved += length
    store(ring + layout.HEAD, head)
    set_field(row, layout.ROW_MOVED, moved)
    return True


@njit
def _receive_some(ring, capacity, row):
    """Read the bytes that have arrived of the message that a row is receiving. Return whether there were any."""
    tail = load(ring + layout.TAIL)
    moved, nbytes = field(row, layout.ROW_MOVED), field(row, layout.ROW_NBYTES)
    length = min(min(load(ring + layout.HEAD) - tail, capacity // 4), nbytes - moved)
    if length > 0:
        _copy_out(ring, capacity, tail, field(row, layout.ROW_ADDRESS) + moved, length)
        moved += length
        store(ring + layout.TAIL, tail + (length + RING_LINE - 1) // RING_LINE * RING_LINE)
        set_field(row, layout.ROW_MOVED, moved)
    if moved == nbytes:
        set_field(row, layout.ROW_DONE, 1)
    return length > 0


@njit
def move_some(context):
    """Move all messages as far as possible. Return how many moved, or -1 - peer if a message does not match its row."""
    rank, size = field(context, layout.RANK), field(context, layout.SIZE)
    rings, capacity, blocked = (
        field(context, layout.RINGS),
        field(context, layout.RING_CAPACITY),
        field(context, layout.BLOCKED),
    )
    first, count = field(context, layout.FIRST), field(context, layout.COUNT)
    while first < count and field(row_of(context, first), layout.ROW_DONE) != 0:
        first += 1
    set_field(context, layout.FIRST, first)
    stride = layout.RING_BYTES + capacity
    for index in range(2 * size):
        store(blocked + 8 * index, 0)
    for number in range(first, count):
        row = row_of(context, number)
        if field(row, layout.ROW_SENDS) == 0 and field(row, layout.ROW_MOVED) >= 0 and field(row, layout.ROW_DONE) == 0:
            store(blocked + 16 * field(row, layout.ROW_PEER), 1)  # the next bytes in that ring are not a header
    moves = 0
    for number in range(first, count):
        row = row_of(context, number)
        if field(row, layout.ROW_DONE) != 0:
            continue
        peer, sends = field(row, layout.ROW_PEER), field(row, layout.ROW_SENDS)
        turn = blocked + 8 * (2 * peer + sends)
        if sends == 1:
            if load(turn) == 0:
                moves += _send_some(rings + (rank * size + peer) * stride, capacity, row)
                if field(row, layout.ROW_MOVED) < field(row, layout.ROW_NBYTES):
                    store(turn, 1)
            continue
        ring = rings + (peer * size + rank) * stride
        if field(row, layout.ROW_MOVED) == UNSTARTED:
            tail = load(ring + layout.TAIL)
            if load(turn) != 0:
                continue
            if load(ring + layout.HEAD) == tail:
                store(turn, 1)  # later messages belong to this row before later rows
                continue
            place = ring + layout.RING_BYTES + tail % capacity
            tag, nbytes = load(place), load(place + 8)
            if tag & layout.TAG_MASK != field(row, layout.ROW_TAG) & layout.TAG_MASK:
                continue
            if tag != field(row, layout.ROW_TAG) or nbytes != field(row, layout.ROW_NBYTES):
                set_field(context, layout.FOUND_TAG, tag)
                set_field(context, layout.FOUND_NBYTES, nbytes)
                return -1 - peer
            store(ring + layout.TAIL, tail + RING_LINE)
            set_field(row, layout.ROW_MOVED, 0)
        moves += _receive_some(ring, capacity, row)
        store(turn, 1)  # one message a pass: the next one may be for a row that was passed over
    return moves


@njit
def _is_receiving(context, peer):
    """Return whether a message of a rank has begun to arrive and is incomplete."""
    for number in range(field(context, layout.FIRST), field(context, layout.COUNT)):
        row = row_of(context, number)
        is_from = field(row, layout.ROW_SENDS) == 0 and field(row, layout.ROW_PEER) == peer
        if is_from and field(row, layout.ROW_MOVED) >= 0 and field(row, layout.ROW_DONE) == 0:
            return True
    return False


def add(context, sends, peer, tag, address, nbytes):
    """Post a message. Return FINISHED, or FULL if the table has no room."""
    return layout.FINISHED if add_row(context, sends, peer, tag, address, nbytes, UNSTARTED) else layout.FULL


def next_sender(context, tag, start, patient):
    """Find a message with a tag, from any rank, those from `start` on first; with `patient`, wait for it a while. PEER becomes
    the rank's place, or -1. The message stays in its ring."""
    if field(context, layout.ABORTED) != 0:
        return layout.STOPPED
    rank, size = field(context, layout.RANK), field(context, layout.SIZE)
    rings, capacity = field(context, layout.RINGS), field(context, layout.RING_CAPACITY)
    beats = 0
    since = monotonic_ns()
    while True:
        moves = move_some(context)
        if moves < 0:
            set_field(context, layout.PEER, -1 - moves)
            return layout.DISAGREED
        for step in range(size):
            peer = (start + step) % size
            ring = rings + (peer * size + rank) * (layout.RING_BYTES + capacity)
            tail = load(ring + layout.TAIL)
            if peer == rank or load(ring + layout.HEAD) == tail or _is_receiving(context, peer):
                continue
            if load(ring + layout.RING_BYTES + tail % capacity) & layout.TAG_MASK == tag & layout.TAG_MASK:
                set_field(context, layout.PEER, peer)
                return layout.FINISHED
        set_field(context, layout.PEER, -1)
        status = rest(context, beats, since) if patient != 0 else layout.PENDING
        if status != layout.FINISHED:
            return layout.FINISHED if status == layout.PENDING else status
        beats += 1
        if moves > 0:
            beats, since = 0, monotonic_ns()


def move(context, number):
    """Move messages until the message of that number is done; with -1, only move messages without waiting."""
    if field(context, layout.ABORTED) != 0:
        return layout.STOPPED
    beats = 0
    since = int64(0)
    while True:
        moves = move_some(context)
        if moves < 0:
            set_field(context, layout.PEER, -1 - moves)
            return layout.DISAGREED
        if number < 0 or is_done(context, number):
            return layout.FINISHED
        if moves > 0:
            set_field(context, layout.PATIENT, 0)
            beats = 0
            continue
        if beats == 0:
            since = monotonic_ns()
            set_field(context, layout.PEER, field(row_of(context, number), layout.ROW_PEER))
        status = rest(context, beats, since)
        if status != layout.FINISHED:
            # Messages that came before the end of the wait count.
            if move_some(context) == 0:
                return status
            beats = -1
        beats += 1
