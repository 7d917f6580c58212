"""Messages over TCP.

A connection carries one message after the other: a header of 16 bytes, the tag and the length, then the bytes. For the table
of the messages that a process has posted, see gradwire.collectives.kernels.cpu.rows.
"""

from __future__ import annotations

from gradwire.collectives.kernels.cpu.compiling import entry
from gradwire.collectives.kernels.cpu.deferred import int64, njit
from gradwire.collectives.kernels.cpu.intrinsics import (
    copy,
    field,
    load,
    load_unaligned,
    monotonic_ns,
    set_field,
    store,
)
from gradwire.collectives.kernels.cpu.rows import (
    ABORTED,
    CAPACITY,
    COUNT,
    DISAGREED,
    FINISHED,
    FIRST,
    FOUND_NBYTES,
    FOUND_TAG,
    FULL,
    LOST,
    PEER,
    PENDING,
    RANK,
    ROW_ADDRESS,
    ROW_DONE,
    ROW_FIELDS,
    ROW_MOVED,
    ROW_NBYTES,
    ROW_PEER,
    ROW_SENDS,
    ROW_TAG,
    ROWS,
    SIZE,
    STOPPED,
    add_row,
    is_done,
    row_of,
)
from gradwire.collectives.kernels.cpu.sockets import EAGAIN, EINTR, EPIPE, POLL_BYTES, receive, send_two
from gradwire.collectives.kernels.cpu.tcp_context import (
    BEGIN,
    CONNECTION_FIELDS,
    CONNECTIONS,
    CURRENT,
    DESCRIPTOR,
    END,
    ENDED,
    ERROR,
    FIELDS,
    HEADER_BYTES,
    MOST_TRIES,
    POLLS,
    RECEIVES,
    SENDS,
    STAGE,
    STAGE_BYTES,
    STUCK,
    TRIES,
    WANTED,
    connection_of,
    polls_again,
    sleep,
    spin_less,
    spin_more,
)
from gradwire.collectives.kernels.wire import TAG_MASK

#: Bytes that one call moves, so that sends and receives alternate. Less than the 64 KB that Linux processes as one unit: with
#: more, Linux may hold back a small tail (net.ipv4.tcp_autocorking), which has made exchanges eight times slower.
_PIECE_BYTES = 56 << 10

#: How long a wait sleeps before it returns to its caller.
SLICE_MS, SLICE_NS = 50, 40_000_000


@njit
def _send_some(connection, row):
    """Write as much of a message as there is room for. Return the number of bytes, or -errno."""
    moved, nbytes = field(row, ROW_MOVED), field(row, ROW_NBYTES)
    header = max(-moved, 0)
    begun = max(moved, 0)
    written = send_two(
        field(connection, DESCRIPTOR),
        row + 8 * ROW_TAG + HEADER_BYTES - header,
        header,
        field(row, ROW_ADDRESS) + begun,
        min(nbytes - begun, _PIECE_BYTES),
    )
    if written > 0:
        set_field(row, ROW_MOVED, moved + written)
        if moved + written == nbytes:
            set_field(row, ROW_DONE, 1)
    return written


@njit
def _fill(connection):
    """Read into the stage of a connection. Return as receive()."""
    stage, begin, end = field(connection, STAGE), field(connection, BEGIN), field(connection, END)
    if begin == end:
        begin = end = 0
    elif begin > 0:  # the beginning of a header
        for byte in range(end - begin):
            copy(stage + byte, stage + begin + byte, 1)
        begin, end = 0, end - begin
    got = receive(field(connection, DESCRIPTOR), stage + end, STAGE_BYTES - end)
    set_field(connection, BEGIN, begin)
    set_field(connection, END, end + max(got, 0))
    return got


@njit
def _begin_message(context, connection, peer):
    """Find the row for the header at hand. Return whether there is one, or -1 if the row expects another kind or length."""
    header = field(connection, STAGE) + field(connection, BEGIN)
    for number in range(field(context, FIRST), field(context, COUNT)):
        row = row_of(context, number)
        if (
            field(row, ROW_SENDS) == 0
            and field(row, ROW_DONE) == 0
            and field(row, ROW_PEER) == peer
            and field(row, ROW_TAG) & TAG_MASK == load_unaligned(header) & TAG_MASK
        ):
            if field(row, ROW_TAG) != load_unaligned(header) or field(row, ROW_NBYTES) != load_unaligned(header + 8):
                set_field(context, FOUND_TAG, load_unaligned(header))
                set_field(context, FOUND_NBYTES, load_unaligned(header + 8))
                return -1
            set_field(connection, CURRENT, number)
            set_field(connection, BEGIN, field(connection, BEGIN) + HEADER_BYTES)
            return 1
    return 0


@njit
def _receive_some(context, connection, peer):
    """Read from a connection until it has no more bytes for posted rows, or a piece has been read. Return FINISHED, DISAGREED,
    LOST, or PENDING if nothing was read."""
    pieces = 0
    while pieces < _PIECE_BYTES:
        if field(connection, CURRENT) < 0:
            if field(connection, END) - field(connection, BEGIN) < HEADER_BYTES:
                got = _fill(connection)
                if got <= 0:
                    return _nothing(context, peer, got, pieces)
                pieces += 1
                continue
            found = _begin_message(context, connection, peer)
            if found < 0:
                set_field(context, PEER, peer)
                return DISAGREED
            if found == 0:
                wanted = field(context, WANTED) + 8 * peer
                store(wanted, load(wanted) | STUCK)
                return FINISHED if pieces > 0 else PENDING
        row = row_of(context, field(connection, CURRENT))
        moved, nbytes = field(row, ROW_MOVED), field(row, ROW_NBYTES)
        begin, end = field(connection, BEGIN), field(connection, END)
        if moved < nbytes and begin < end:
            got = min(end - begin, nbytes - moved)
            copy(field(row, ROW_ADDRESS) + moved, field(connection, STAGE) + begin, got)
            set_field(connection, BEGIN, begin + got)
        elif moved == nbytes:
            got = int64(0)
        elif nbytes - moved < STAGE_BYTES // 2:
            got = _fill(connection)
            if got <= 0:
                return _nothing(context, peer, got, pieces)
            pieces += 1
            continue
        else:
            got = receive(
                field(connection, DESCRIPTOR), field(row, ROW_ADDRESS) + moved, min(nbytes - moved, _PIECE_BYTES)
            )
            if got <= 0:
                return _nothing(context, peer, got, pieces)
        pieces += got + 1
        set_field(row, ROW_MOVED, moved + got)
        if moved + got == nbytes:
            set_field(row, ROW_DONE, 1)
            set_field(connection, CURRENT, -1)
            if not _awaits(context, peer):
                break
    return FINISHED


@njit
def _awaits(context, peer):
    """Return whether any receive from a rank is unfinished."""
    for number in range(field(context, FIRST), field(context, COUNT)):
        row = row_of(context, number)
        if field(row, ROW_SENDS) == 0 and field(row, ROW_DONE) == 0 and field(row, ROW_PEER) == peer:
            return True
    return False


@njit
def _nothing(context, peer, got, pieces):
    """Return what it means that a call moved nothing: 0 is the end of the connection, else -errno."""
    if got == -EAGAIN or got == -EINTR:
        return FINISHED if pieces > 0 else PENDING
    set_field(context, PEER, peer)
    set_field(context, ERROR, -got)
    return LOST


@njit
def move_some(context):
    """Move all messages as far as possible. Return FINISHED, DISAGREED, LOST, or PENDING if none could be moved."""
    wanted = field(context, WANTED)
    size = field(context, SIZE)
    for peer in range(size):
        store(wanted + 8 * peer, 0)
    result = PENDING
    first = field(context, FIRST)
    for number in range(first, field(context, COUNT)):
        row = row_of(context, number)
        if field(row, ROW_DONE) != 0:
            if number == first:
                first += 1
            continue
        peer = field(row, ROW_PEER)
        state = load(wanted + 8 * peer)
        if field(row, ROW_SENDS) == 0:
            store(wanted + 8 * peer, state | RECEIVES)
        elif state & SENDS == 0:
            written = _send_some(connection_of(context, peer), row)
            if written > 0:
                result = FINISHED
            elif _nothing(context, peer, written if written != 0 else -EPIPE, 0) == LOST:
                return LOST
            if field(row, ROW_DONE) == 0:
                store(wanted + 8 * peer, state | SENDS)
    set_field(context, FIRST, first)
    for peer in range(size):
        if load(wanted + 8 * peer) & RECEIVES != 0:
            status = _receive_some(context, connection_of(context, peer), peer)
            if status in (LOST, DISAGREED):
                return status
            if status == FINISHED:
                result = FINISHED
    return result


@njit
def _wait_for(context, number, began):
    """Wait until a message is done, while the others move too. Return PENDING some time after `began`, even if messages move,
    so that the caller can check its deadline."""
    tries = 0
    slept = False
    is_late = False
    while True:
        if field(context, ABORTED) != 0:
            return STOPPED
        if is_done(context, number):
            return FINISHED
        if is_late:
            set_field(context, PEER, field(row_of(context, number), ROW_PEER))
            return PENDING
        status = move_some(context)
        if status in (LOST, DISAGREED):
            return status
        if status == FINISHED:
            spin_more(context, tries)
            tries = 0
            slept = False
            is_late = monotonic_ns() - began > SLICE_NS
            continue
        tries += 1
        if polls_again(context, tries):
            continue
        if not slept:
            slept = True
            spin_less(context)
        is_late = monotonic_ns() - began > SLICE_NS
        if not is_late and sleep(context, SLICE_MS) == LOST:
            return LOST


@njit
def add_message(context, sends, peer, tag, address, nbytes):
    """Post a message. Return whether there was room."""
    return add_row(context, sends, peer, tag, address, nbytes, -HEADER_BYTES if sends != 0 else 0)


@entry(6)
def add(context, sends, peer, tag, address, nbytes):
    """Post a message. Return FINISHED, or FULL if the table has no room."""
    return FINISHED if add_message(context, sends, peer, tag, address, nbytes) else FULL


@entry(2)
def wait_for(context, number):
    """Wait until the message of that number is done; with -1, only move messages without waiting."""
    if field(context, ABORTED) != 0:
        return STOPPED
    if number >= 0:
        return _wait_for(context, number, monotonic_ns())
    status = move_some(context)
    return FINISHED if status == PENDING else status


@njit
def _begins(connection, tag):
    """Return whether the next message of a connection has a tag. Reads as much of its header as has arrived."""
    if field(connection, CURRENT) >= 0:
        return False
    if field(connection, END) - field(connection, BEGIN) < HEADER_BYTES:
        got = _fill(connection)
        if got == 0 or (got < 0 and got != -EAGAIN and got != -EINTR):
            set_field(connection, ENDED, 1)
    waiting = field(connection, END) - field(connection, BEGIN)
    if waiting < HEADER_BYTES:
        return False
    return load_unaligned(field(connection, STAGE) + field(connection, BEGIN)) & TAG_MASK == tag & TAG_MASK


@njit
def _find_sender(context, tag, first):
    """Return the first rank, from `first` on, whose next message has a tag; -1 for none. Ranks whose next header has not
    arrived yet are marked in WANTED."""
    size = field(context, SIZE)
    wanted = field(context, WANTED)
    for step in range(size):
        peer = (first + step) % size
        connection = connection_of(context, peer)
        if field(connection, DESCRIPTOR) < 0 or field(connection, ENDED) != 0:
            continue
        if _begins(connection, tag):
            return peer
        is_known = field(connection, END) - field(connection, BEGIN) >= HEADER_BYTES
        if field(connection, ENDED) == 0 and not is_known:
            store(wanted + 8 * peer, load(wanted + 8 * peer) | RECEIVES)
    return -1


@entry(4)
def next_sender(context, tag, first, milliseconds):
    """Wait for a message with a tag, from any rank, for at most `milliseconds`; ranks from `first` on are checked first. PEER
    becomes the rank, or -1. The message is not received."""
    began = monotonic_ns()
    tries = 0
    while True:
        if field(context, ABORTED) != 0:
            return STOPPED
        status = move_some(context)
        if status in (LOST, DISAGREED):
            return status
        peer = _find_sender(context, tag, first)
        set_field(context, PEER, peer)
        left_ms = milliseconds - (monotonic_ns() - began) // 1_000_000
        if peer >= 0 or left_ms <= 0:
            return FINISHED
        tries += 1
        if not polls_again(context, tries) and status == PENDING and sleep(context, min(left_ms, SLICE_MS)) == LOST:
            return LOST
