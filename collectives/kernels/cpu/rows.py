"""The table of the messages that a process has posted, which kernels move, and the fields that contexts of all links have.

Each message is a row, in the order posted. A message belongs to the first row of its sender whose tag has the same low 32 bits;
the other bits, the kind of its numbers, and the length must then be equal too. If there is no row yet, the message and all
later ones of its sender wait.
"""

from __future__ import annotations

from gradwire.collectives.kernels.cpu.deferred import njit
from gradwire.collectives.kernels.cpu.intrinsics import field, set_field

# The first fields of every context. A context has fields of 64 bits, which a kernel shares with the process that calls it.
(
    RANK,  # place of this process among those that the link connects
    SIZE,
    ABORTED,  # 1 when this process must not wait any more
    ROWS,  # address of the table, ROW_BYTES a message
    CAPACITY,  # rows of the table, a power of two: message n is in row n % CAPACITY
    FIRST,  # number of the first message that may be unfinished
    COUNT,  # number that the next posted message gets
    PEER,  # the place of the process that the last wait was for, or that failed
    FOUND_TAG,  # the header of a message that does not match its posted row
    FOUND_NBYTES,
    OTHER_FIELDS,
) = range(11)

(
    ROW_SENDS,  # 1 for a send, 0 for a receive
    ROW_PEER,
    ROW_TAG,  # with the length that follows, the header of a sent message
    ROW_NBYTES,
    ROW_ADDRESS,
    ROW_MOVED,  # bytes sent or received; below 0 before the header has moved
    ROW_DONE,
    ROW_START,  # for the link's own use
    ROW_FIELDS,
) = range(9)
ROW_BYTES = 8 * ROW_FIELDS

# The results of a kernel.
FINISHED, FINISHED_WITH_NEWS, PENDING, STOPPED, DISAGREED, LOST, FULL, MALFORMED, TOO_MANY = range(9)


@njit
def row_of(context, number):
    """Return the address of the row of a message."""
    return field(context, ROWS) + ROW_BYTES * (number & (field(context, CAPACITY) - 1))


@njit
def is_done(context, number):
    """Return whether a message is done."""
    return number < field(context, FIRST) or field(row_of(context, number), ROW_DONE) != 0


@njit
def add_row(context, sends, peer, tag, address, nbytes, moved):
    """Post a message. Return whether there was room. moved: the row's ROW_MOVED."""
    number = field(context, COUNT)
    first = field(context, FIRST)
    while first < number and field(row_of(context, first), ROW_DONE) != 0:
        first += 1
    set_field(context, FIRST, first)
    if number - first == field(context, CAPACITY):
        return False
    row = row_of(context, number)
    set_field(row, ROW_SENDS, sends)
    set_field(row, ROW_PEER, peer)
    set_field(row, ROW_TAG, tag)
    set_field(row, ROW_NBYTES, nbytes)
    set_field(row, ROW_ADDRESS, address)
    set_field(row, ROW_MOVED, moved)
    set_field(row, ROW_DONE, 0)
    set_field(context, COUNT, number + 1)
    return True
