"""Messages over TCP.

For the table of the messages that a process has posted, see gradwire.collectives.kernels.cpu.rows; for their bytes,
gradwire.collectives.kernels.cpu.tcp_connection.
"""

from __future__ import annotations

from numba import int64, njit

from gradwire.collectives.kernels import layout
from gradwire.collectives.kernels.cpu.intrinsics import (
    copy,
    field,
    load,
    load_unaligned,
    monotonic_ns,
    set_field,
    store,
)
from gradwire.collectives.kernels.cpu.rows import add_row, is_done, row_of
from gradwire.collectives.kernels.cpu.sealing import open_record
from gradwire.collectives.kernels.cpu.sockets import EAGAIN, EINTR, EPIPE, receive
from gradwire.collectives.kernels.cpu.tcp_connection import fill, header_bytes, next_header, send_some
from gradwire.collectives.kernels.cpu.tcp_context import connection_of, polls_again, sleep, spin_less, spin_more

#: How long a wait sleeps before it returns to its caller.
SLICE_MS, SLICE_NS = 50, 40_000_000


@njit
def _begin_message(context, connection, peer, header):
    """Find the row for a header. Return whether there is one, or -1 if the row expects another kind or length."""
    tag, nbytes = load_unaligned(header), load_unaligned(header + 8)
    for number in range(field(context, layout.FIRST), field(context, layout.COUNT)):
        row = row_of(context, number)
        if (
            field(row, layout.ROW_SENDS) == 0
            and field(row, layout.ROW_DONE) == 0
            and field(row, layout.ROW_PEER) == peer
            and field(row, layout.ROW_TAG) & layout.TAG_MASK == tag & layout.TAG_MASK
        ):
            if field(row, layout.ROW_TAG) != tag or field(row, layout.ROW_NBYTES) != nbytes:
                set_field(context, layout.FOUND_TAG, tag)
                set_field(context, layout.FOUND_NBYTES, nbytes)
                return -1
            set_field(connection, layout.CURRENT, number)
            if field(connection, layout.HAS_HEADER) != 0:
                set_field(connection, layout.HAS_HEADER, 0)
            else:
                set_field(connection, layout.BEGIN, field(connection, layout.BEGIN) + layout.HEADER_BYTES)
            return 1
    return 0


@njit
def _receive_some(context, connection, peer):
    """Read from a connection until it has no more bytes for posted rows, or a piece has been read. Return FINISHED, DISAGREED,
    LOST, or PENDING if nothing was read."""
    pieces = 0
    while pieces < layout.PIECE_BYTES:
        if field(connection, layout.CURRENT) < 0:
            header = next_header(connection)
            if header == 0:
                got = fill(connection, header_bytes(connection))
                if got <= 0:
                    return _nothing(context, peer, got, pieces)
                pieces += 1
                continue
            if header < 0:
                return _nothing(context, peer, header, pieces)
            found = _begin_message(context, connection, peer, header)
            if found < 0:
                set_field(context, layout.PEER, peer)
                return layout.DISAGREED
            if found == 0:
                wanted = field(context, layout.WANTED) + 8 * peer
                store(wanted, load(wanted) | layout.STUCK)
                return layout.FINISHED if pieces > 0 else layout.PENDING
        row = row_of(context, field(connection, layout.CURRENT))
        moved, nbytes = field(row, layout.ROW_MOVED), field(row, layout.ROW_NBYTES)
        begin, end = field(connection, layout.BEGIN), field(connection, layout.END)
        if moved < nbytes and field(connection, layout.UNSEALS) != 0:
            got = min(nbytes - moved, layout.PIECE_BYTES)
            if end - begin < got + layout.MAC_BYTES:
                got = fill(connection, got + layout.MAC_BYTES)
                if got <= 0:
                    return _nothing(context, peer, got, pieces)
                pieces += 1
                continue
            record, target = field(connection, layout.STAGE) + begin, field(row, layout.ROW_ADDRESS) + moved
            failed = open_record(field(connection, layout.UNSEALS), record, got, target)
            if failed != 0:
                return _nothing(context, peer, -failed, pieces)
            set_field(connection, layout.BEGIN, begin + got + layout.MAC_BYTES)
        elif moved < nbytes and begin < end:
            got = min(end - begin, nbytes - moved)
            copy(field(row, layout.ROW_ADDRESS) + moved, field(connection, layout.STAGE) + begin, got)
            set_field(connection, layout.BEGIN, begin + got)
        elif moved == nbytes:
            got = int64(0)
        elif nbytes - moved < layout.STAGE_BYTES // 2:
            got = fill(connection, nbytes - moved)
            if got <= 0:
                return _nothing(context, peer, got, pieces)
            pieces += 1
            continue
        else:
            got = receive(
                field(connection, layout.DESCRIPTOR),
                field(row, layout.ROW_ADDRESS) + moved,
                min(nbytes - moved, layout.PIECE_BYTES),
            )
            if got <= 0:
                return _nothing(context, peer, got, pieces)
        pieces += got + 1
        set_field(row, layout.ROW_MOVED, moved + got)
        if moved + got == nbytes:
            set_field(row, layout.ROW_DONE, 1)
            set_field(connection, layout.CURRENT, -1)
            if not _awaits(context, peer):
                break
    return layout.FINISHED


@njit
def _awaits(context, peer):
    """Return whether any receive from a rank is unfinished."""
    for number in range(field(context, layout.FIRST), field(context, layout.COUNT)):
        row = row_of(context, number)
        if (
            field(row, layout.ROW_SENDS) == 0
            and field(row, layout.ROW_DONE) == 0
            and field(row, layout.ROW_PEER) == peer
        ):
            return True
    return False


@njit
def _nothing(context, peer, got, pieces):
    """Return what it means that a call moved nothing: 0 is the end of the connection, else -errno."""
    if got == -EAGAIN or got == -EINTR:
        return layout.FINISHED if pieces > 0 else layout.PENDING
    set_field(context, layout.PEER, peer)
    set_field(context, layout.ERROR, -got)
    return layout.LOST


@njit
def move_some(context):
    """Move all messages as far as possible. Return FINISHED, DISAGREED, LOST, or PENDING if none could be moved."""
    wanted = field(context, layout.WANTED)
    size = field(context, layout.SIZE)
    for peer in range(size):
        store(wanted + 8 * peer, 0)
    result = layout.PENDING
    first = field(context, layout.FIRST)
    for number in range(first, field(context, layout.COUNT)):
        row = row_of(context, number)
        if field(row, layout.ROW_DONE) != 0:
            if number == first:
                first += 1
            continue
        peer = field(row, layout.ROW_PEER)
        state = load(wanted + 8 * peer)
        if field(row, layout.ROW_SENDS) == 0:
            store(wanted + 8 * peer, state | layout.RECEIVES)
        elif state & layout.SENDS == 0:
            written = send_some(connection_of(context, peer), row)
            if written > 0:
                result = layout.FINISHED
            elif _nothing(context, peer, written if written != 0 else -EPIPE, 0) == layout.LOST:
                return layout.LOST
            if field(row, layout.ROW_DONE) == 0:
                store(wanted + 8 * peer, state | layout.SENDS)
    set_field(context, layout.FIRST, first)
    for peer in range(size):
        if load(wanted + 8 * peer) & layout.RECEIVES != 0:
            status = _receive_some(context, connection_of(context, peer), peer)
            if status in (layout.LOST, layout.DISAGREED):
                return status
            if status == layout.FINISHED:
                result = layout.FINISHED
    return result


@njit
def _wait_for(context, number, began):
    """Wait until a message is done, while the others move too. Return PENDING some time after `began`, even if messages move,
    so that the caller can check its deadline."""
    tries = 0
    slept = False
    is_late = False
    while True:
        if field(context, layout.ABORTED) != 0:
            return layout.STOPPED
        if is_done(context, number):
            return layout.FINISHED
        if is_late:
            set_field(context, layout.PEER, field(row_of(context, number), layout.ROW_PEER))
            return layout.PENDING
        status = move_some(context)
        if status in (layout.LOST, layout.DISAGREED):
            return status
        if status == layout.FINISHED:
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
        if not is_late and sleep(context, SLICE_MS) == layout.LOST:
            return layout.LOST


@njit
def add_message(context, sends, peer, tag, address, nbytes):
    """Post a message. Return whether there was room."""
    return add_row(context, sends, peer, tag, address, nbytes, -layout.HEADER_BYTES if sends != 0 else 0)


def add(context, sends, peer, tag, address, nbytes):
    """Post a message. Return FINISHED, or FULL if the table has no room."""
    return layout.FINISHED if add_message(context, sends, peer, tag, address, nbytes) else layout.FULL


def wait_for(context, number):
    """Wait until the message of that number is done; with -1, only move messages without waiting."""
    if field(context, layout.ABORTED) != 0:
        return layout.STOPPED
    if number >= 0:
        return _wait_for(context, number, monotonic_ns())
    status = move_some(context)
    return layout.FINISHED if status == layout.PENDING else status


@njit
def _arriving(connection):
    """Return next_header() of a connection between two messages, after reading as much of it as has arrived."""
    header = next_header(connection)
    if header == 0:
        got = fill(connection, header_bytes(connection))
        if got == 0 or (got < 0 and got != -EAGAIN and got != -EINTR):
            set_field(connection, layout.ENDED, 1)
        header = next_header(connection)
    return header


@njit
def _find_sender(context, tag, first):
    """Return the first rank, from `first` on, whose next message has a tag; -1 for none, -2 if a record of PEER fails.
    Ranks whose next header has not arrived yet are marked in WANTED."""
    size = field(context, layout.SIZE)
    wanted = field(context, layout.WANTED)
    for step in range(size):
        peer = (first + step) % size
        connection = connection_of(context, peer)
        if field(connection, layout.DESCRIPTOR) < 0 or field(connection, layout.ENDED) != 0:
            continue
        header = int64(0)
        if field(connection, layout.CURRENT) < 0:
            header = _arriving(connection)
        if header < 0:
            _nothing(context, peer, header, 0)
            return -2
        if header > 0 and load_unaligned(header) & layout.TAG_MASK == tag & layout.TAG_MASK:
            return peer
        if field(connection, layout.ENDED) == 0 and header == 0:
            store(wanted + 8 * peer, load(wanted + 8 * peer) | layout.RECEIVES)
    return -1


def next_sender(context, tag, first, milliseconds):
    """Wait for a message with a tag, from any rank, for at most `milliseconds`; ranks from `first` on are checked first. PEER
    becomes the rank, or -1. The message is not received."""
    began = monotonic_ns()
    tries = 0
    while True:
        if field(context, layout.ABORTED) != 0:
            return layout.STOPPED
        status = move_some(context)
        if status in (layout.LOST, layout.DISAGREED):
            return status
        peer = _find_sender(context, tag, first)
        if peer == -2:
            return layout.LOST
        set_field(context, layout.PEER, peer)
        left_ms = milliseconds - (monotonic_ns() - began) // 1_000_000
        if peer >= 0 or left_ms <= 0:
            return layout.FINISHED
        tries += 1
        if (
            not polls_again(context, tries)
            and status == layout.PENDING
            and sleep(context, min(left_ms, SLICE_MS)) == layout.LOST
        ):
            return layout.LOST
