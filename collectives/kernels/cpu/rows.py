"""The table of the messages that a process has posted, which kernels move.

Each message is a row, in the order posted. A message belongs to the first row of its sender whose tag has the same low 32 bits;
the other bits, the kind of its numbers, and the length must then be equal too. If there is no row yet, the message and all
later ones of its sender wait.
"""

from __future__ import annotations

from numba import njit

from gradwire.collectives.kernels import layout
from gradwire.collectives.kernels.cpu.intrinsics import field, set_field


@njit
def row_of(context, number):
    """Return the address of the row of a message."""
    return field(context, layout.ROWS) + layout.ROW_BYTES * (number & (field(context, layout.CAPACITY) - 1))


@njit
def is_done(context, number):
    """Return whether a message is done."""
    return number < field(context, layout.FIRST) or field(row_of(context, number), layout.ROW_DONE) != 0


@njit
def add_row(context, sends, peer, tag, address, nbytes, moved):
    """Post a message. Return whether there was room. moved: the row's ROW_MOVED."""
    number = field(context, layout.COUNT)
    first = field(context, layout.FIRST)
    while first < number and field(row_of(context, first), layout.ROW_DONE) != 0:
        first += 1
    set_field(context, layout.FIRST, first)
    if number - first == field(context, layout.CAPACITY):
        return False
    row = row_of(context, number)
    set_field(row, layout.ROW_SENDS, sends)
    set_field(row, layout.ROW_PEER, peer)
    set_field(row, layout.ROW_TAG, tag)
    set_field(row, layout.ROW_NBYTES, nbytes)
    set_field(row, layout.ROW_ADDRESS, address)
    set_field(row, layout.ROW_MOVED, moved)
    set_field(row, layout.ROW_DONE, 0)
    set_field(context, layout.COUNT, number + 1)
    return True
