"""The bytes of one TCP connection: what is written of a message, and the headers that arrive.

A connection carries one message after the other: a header of 16 bytes, the tag and the length, then the bytes. If the
connection has records, a message is a record of the header, then records of at most PIECE_BYTES of the bytes.
"""

from __future__ import annotations

from numba import int64, njit

from gradwire.collectives.kernels import layout
from gradwire.collectives.kernels.cpu.intrinsics import copy, field, set_field
from gradwire.collectives.kernels.cpu.sealing import open_record, seal_record
from gradwire.collectives.kernels.cpu.sockets import receive, send_two


@njit
def send_some(connection, row):
    """Write as much of a message as there is room for. Return the number of bytes, or -errno."""
    if field(connection, layout.SEALS) != 0:
        return _send_records(connection, row)
    moved, nbytes = field(row, layout.ROW_MOVED), field(row, layout.ROW_NBYTES)
    header = max(-moved, 0)
    begun = max(moved, 0)
    written = send_two(
        field(connection, layout.DESCRIPTOR),
        row + 8 * layout.ROW_TAG + layout.HEADER_BYTES - header,
        header,
        field(row, layout.ROW_ADDRESS) + begun,
        min(nbytes - begun, layout.PIECE_BYTES),
    )
    if written > 0:
        set_field(row, layout.ROW_MOVED, moved + written)
        if moved + written == nbytes:
            set_field(row, layout.ROW_DONE, 1)
    return written


@njit
def _send_records(connection, row):
    """Write as much of a message as there is room for, in records. The next ones are sealed once the last ones are written.
    Return the number of bytes, or -errno."""
    leaving, nbytes = field(connection, layout.LEAVING), field(row, layout.ROW_NBYTES)
    left, leaves = field(connection, layout.LEFT), field(connection, layout.LEAVES)
    if left == leaves:
        seal, moved = field(connection, layout.SEALS), field(row, layout.ROW_MOVED)
        left = leaves = 0
        if moved < 0:
            failed = seal_record(seal, row + 8 * layout.ROW_TAG, layout.HEADER_BYTES, leaving)
            if failed != 0:
                return -failed
            moved, leaves = 0, layout.HEADER_BYTES + layout.MAC_BYTES
        length = min(nbytes - moved, layout.PIECE_BYTES)
        if length > 0:
            failed = seal_record(seal, field(row, layout.ROW_ADDRESS) + moved, length, leaving + leaves)
            if failed != 0:
                return -failed
            leaves += length + layout.MAC_BYTES
        set_field(connection, layout.LEAVES, leaves)
        set_field(connection, layout.LEAVING_TO, moved + length)
    written = send_two(field(connection, layout.DESCRIPTOR), leaving + left, leaves - left, leaving, 0)
    left += max(written, 0)
    set_field(connection, layout.LEFT, left)
    if left == leaves:
        moved = field(connection, layout.LEAVING_TO)
        set_field(row, layout.ROW_MOVED, moved)
        if moved == nbytes:
            set_field(row, layout.ROW_DONE, 1)
    return written


@njit
def fill(connection, wanted):
    """Read into the stage of a connection, which is to hold `wanted` bytes. Return as receive()."""
    stage, begin, end = field(connection, layout.STAGE), field(connection, layout.BEGIN), field(connection, layout.END)
    has_records = field(connection, layout.UNSEALS) != 0
    capacity = layout.ARRIVING_BYTES if has_records else layout.STAGE_BYTES
    if begin == end:
        begin = end = 0
    elif begin > 0 and (not has_records or begin + wanted > capacity):  # the beginning of a header or of a record
        for offset in range(0, end - begin, begin):
            copy(stage + offset, stage + begin + offset, min(begin, end - begin - offset))
        begin, end = 0, end - begin
    # Of a record no more than its end, so that the rest need not be copied to the beginning of the stage.
    most = min(capacity - end, max(wanted - (end - begin), layout.STAGE_BYTES))
    got = receive(field(connection, layout.DESCRIPTOR), stage + end, most)
    set_field(connection, layout.BEGIN, begin)
    set_field(connection, layout.END, end + max(got, 0))
    return got


@njit
def header_bytes(connection):
    """Return how many bytes of a connection the header of a message takes."""
    return layout.HEADER_BYTES + (layout.MAC_BYTES if field(connection, layout.UNSEALS) != 0 else 0)


@njit
def next_header(connection):
    """Return the address of the header of the next message, 0 if it has not arrived, or -errno if its record fails."""
    seal, begin = field(connection, layout.UNSEALS), field(connection, layout.BEGIN)
    kept = connection + 8 * layout.HEADER_TAG
    if field(connection, layout.HAS_HEADER) != 0:
        return kept
    if field(connection, layout.END) - begin < header_bytes(connection):
        return int64(0)
    arrived = field(connection, layout.STAGE) + begin
    if seal == 0:
        return arrived
    failed = open_record(seal, arrived, layout.HEADER_BYTES, kept)
    if failed != 0:
        return -failed
    set_field(connection, layout.BEGIN, begin + header_bytes(connection))
    set_field(connection, layout.HAS_HEADER, 1)
    return kept
