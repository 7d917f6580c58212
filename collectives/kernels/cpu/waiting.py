"""How a kernel waits for other ranks: it spins, gives way, then sleeps, and now and then returns to who called it."""

from __future__ import annotations

from numba import int64, njit

from gradwire.collectives.kernels.cpu.atomics import give_way, load, monotonic_ns, pause, sleep_us
from gradwire.collectives.kernels.cpu.context import (
    ABORTED,
    DISAGREED,
    FINISHED,
    PATIENT,
    PEER,
    PENDING,
    SIZE,
    SPINS,
    STOPPED,
    WAIT_LEAST,
    WAIT_LINE,
    YIELD_NS,
    field,
    line_of,
    set_field,
)

_SLICE_NS = 50_000_000

# A sleep is a sixteenth of the wait so far, within bounds: so threads that wait for long, as those of a server do, take next to
# nothing of the cores, and what comes after a long wait is seen a little later, by 2 ms at most.
_SLEEP_SHARE = 16
_SHORTEST_SLEEP_US = 100
_LONGEST_SLEEP_US = 2000


@njit
def rest(context, beats, since):
    """Spend one beat of a wait that began at `since`. Return FINISHED, or what the kernel is to return."""
    if beats < field(context, SPINS):
        pause()
        return FINISHED
    if field(context, ABORTED) != 0:
        return STOPPED
    waited = monotonic_ns() - since
    if waited > _SLICE_NS:
        return PENDING
    if field(context, PATIENT) != 0:
        sleep_us(_LONGEST_SLEEP_US)
    elif waited < field(context, YIELD_NS):
        give_way()
    else:
        sleep_us(min(_LONGEST_SLEEP_US, max(_SHORTEST_SLEEP_US, waited // (1000 * _SLEEP_SHARE))))
    return FINISHED


@njit
def note_wait_for_all(context, line, least):
    """Tell the caller whom the wait was for: all ranks whose word in a line is below the least."""
    set_field(context, PEER, -1)
    set_field(context, WAIT_LINE, line)
    set_field(context, WAIT_LEAST, least)


@njit
def wait_for_headers(context, header, sequence, tag):
    """Wait until every rank has written its header of this operation."""
    for peer in range(field(context, SIZE)):
        theirs = line_of(context, peer, header)
        beats = 0
        since = int64(0)
        while True:
            seen = load(theirs)
            if seen == sequence and load(theirs + 48) == tag:
                break
            if seen >= sequence:
                set_field(context, PEER, peer)
                return DISAGREED
            if beats == 0:
                since = monotonic_ns()
            status = rest(context, beats, since)
            if status != FINISHED and load(theirs) == seen:  # what came before the end of the wait counts
                note_wait_for_all(context, header, sequence)
                return status
            beats += 1
    return FINISHED


@njit
def wait_for_line(context, line, least):
    """Wait until the word in every rank's line is at least so much."""
    for peer in range(field(context, SIZE)):
        theirs = line_of(context, peer, line)
        beats = 0
        since = int64(0)
        while load(theirs) < least:
            if beats == 0:
                since = monotonic_ns()
            status = rest(context, beats, since)
            if status != FINISHED and load(theirs) < least:
                note_wait_for_all(context, line, least)
                return status
            beats += 1
    return FINISHED


@njit
def least_of(context, line):
    """Return the least word in the ranks' lines."""
    least = load(line_of(context, 0, line))
    for peer in range(1, field(context, SIZE)):
        least = min(least, load(line_of(context, peer, line)))
    return least
