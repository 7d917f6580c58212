"""The memory that a kernel shares with the process that calls it and, in a segment of memory, with other ranks."""

from __future__ import annotations

from numba import int64, njit

from gradwire.collectives.kernels import layout
from gradwire.collectives.kernels.cpu.intrinsics import (
    field,
    give_way,
    load,
    monotonic_ns,
    pause,
    set_field,
    sleep_us,
    store,
)


@njit
def line_of(context, rank, line):
    """Return the address of one of a rank's lines."""
    return field(context, layout.RANKS) + rank * layout.RANK_BYTES + line


def publish(address, value):
    """Set a word that other processes poll, with release order: they see all earlier writes."""
    store(address, value)
    return layout.FINISHED


_SLICE_NS = 50_000_000

# A sleep is a sixteenth of the wait so far, within bounds. So threads that wait for long, such as those of a server, hardly use
# the cores, and the end of a long wait is noticed at most 2 ms late.
_SLEEP_SHARE = 16
_SHORTEST_SLEEP_US = 100
_LONGEST_SLEEP_US = 2000


@njit
def rest(context, beats, since):
    """Spend one beat of a wait that began at `since`. Return FINISHED, or another result, which the kernel must return."""
    if beats < field(context, layout.SPINS):
        pause()
        return layout.FINISHED
    if field(context, layout.ABORTED) != 0:
        return layout.STOPPED
    waited = monotonic_ns() - since
    if waited > _SLICE_NS:
        return layout.PENDING
    if field(context, layout.PATIENT) != 0:
        sleep_us(_LONGEST_SLEEP_US)
    elif waited < field(context, layout.YIELD_NS):
        give_way()
    else:
        sleep_us(min(_LONGEST_SLEEP_US, max(_SHORTEST_SLEEP_US, waited // (1000 * _SLEEP_SHARE))))
    return layout.FINISHED


@njit
def note_wait_for_all(context, line, least):
    """Record for the caller what the wait was for: all ranks whose word in a line is below `least`."""
    set_field(context, layout.PEER, -1)
    set_field(context, layout.WAIT_LINE, line)
    set_field(context, layout.WAIT_LEAST, least)


@njit
def wait_for_headers(context, header, sequence, tag):
    """Wait until every rank has written its header of this operation."""
    for peer in range(field(context, layout.SIZE)):
        theirs = line_of(context, peer, header)
        beats = 0
        since = int64(0)
        while True:
            seen = load(theirs)
            if seen == sequence and load(theirs + 48) == tag:
                break
            if seen >= sequence:
                set_field(context, layout.PEER, peer)
                return layout.DISAGREED
            if beats == 0:
                since = monotonic_ns()
            status = rest(context, beats, since)
            if (
                status != layout.FINISHED and load(theirs) == seen
            ):  # a header that came before the end of the wait counts
                note_wait_for_all(context, header, sequence)
                return status
            beats += 1
    return layout.FINISHED


@njit
def any_has_left(context):
    """Return whether any rank has closed or broken the group."""
    states = int64(0)
    for peer in range(field(context, layout.SIZE)):
        states |= load(line_of(context, peer, layout.STATE))
    return states != 0


@njit
def wait_for_line(context, line, least):
    """Wait until the word in every rank's line is at least `least`."""
    for peer in range(field(context, layout.SIZE)):
        theirs = line_of(context, peer, line)
        beats = 0
        since = int64(0)
        while load(theirs) < least:
            if beats == 0:
                since = monotonic_ns()
            status = rest(context, beats, since)
            if status != layout.FINISHED and load(theirs) < least:
                note_wait_for_all(context, line, least)
                return status
            beats += 1
    return layout.FINISHED


@njit
def least_of(context, line):
    """Return the least word in the ranks' lines."""
    least = load(line_of(context, 0, line))
    for peer in range(1, field(context, layout.SIZE)):
        least = min(least, load(line_of(context, peer, line)))
    return least
