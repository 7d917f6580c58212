"""The memory that a kernel shares with the process that calls it and, in a segment of memory, with other ranks."""

from __future__ import annotations

from gradwire.collectives.kernels.cpu.compiling import entry
from gradwire.collectives.kernels.cpu.deferred import int64, njit
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
from gradwire.collectives.kernels.cpu.rows import (
    ABORTED,
    DISAGREED,
    FINISHED,
    OTHER_FIELDS,
    PEER,
    PENDING,
    SIZE,
    STOPPED,
)

# More fields of the context, which are private to the process. PEER is -1 after a wait for all whose word in WAIT_LINE was below
# WAIT_LEAST.
(
    SPINS,  # beats that a wait spins before it yields the core
    YIELD_NS,  # how long a wait yields the core before it sleeps
    BLOCK,  # bytes that are reduced at once, so that they stay in the first-level cache
    PATIENT,  # 1 when the last wait has been long: sleep at once
    RANKS,  # address of the ranks' lines, RANK_BYTES each
    WHOLE,  # address of two slots a rank for small messages
    WHOLE_BYTES,  # of a slot
    STAGING,  # address of DEPTH * SIZE * SIZE chunks
    CHUNK_BYTES,
    DEPTH,
    SLOTS,  # shared allocations that a rank may have
    BASES,  # address of SIZE * SLOTS words: where this process has mapped them, or 0
    KNOWN,  # address of SIZE words: the version of each rank's allocations up to which this process has mapped them
    ANNOUNCED,  # address of SIZE words: the version of each rank's allocations in the last operation
    FAILED,  # 1 when this process could not map one
    CHUNKS,  # staged before this operation
    PHASE,  # of the operation that was interrupted, 0 for none
    MINE_STAGED,
    MINE_REDUCED,
    MINE_COPIED,
    DIRECT,  # 1 when the operation runs without a copy
    WAIT_LINE,
    WAIT_LEAST,
    NEWS,  # 1 when a rank has announced a version that is not KNOWN, in this operation
    RINGS,  # address of a ring for each ordered pair of ranks
    RING_CAPACITY,  # bytes of a ring's data
    BLOCKED,  # address of 2 * SIZE words
    FIELDS,
) = range(OTHER_FIELDS, OTHER_FIELDS + 28)

# A rank's lines in the segment, each apart from the others, so that no two processes write to one cache line. The
# first two are headers, for operations of even and odd number.
LINE = 128
DONE, STAGED, REDUCED, COPIED, STATE, VERSION = (line * LINE for line in range(2, 8))
RANK_BYTES = 8 * LINE


@njit
def line_of(context, rank, line):
    """Return the address of one of a rank's lines."""
    return field(context, RANKS) + rank * RANK_BYTES + line


@entry(2)
def publish(address, value):
    """Set a word that other processes poll, with release order: they see all earlier writes."""
    store(address, value)
    return FINISHED


_SLICE_NS = 50_000_000

# A sleep is a sixteenth of the wait so far, within bounds. So threads that wait for long, such as those of a server, hardly use
# the cores, and the end of a long wait is noticed at most 2 ms late.
_SLEEP_SHARE = 16
_SHORTEST_SLEEP_US = 100
_LONGEST_SLEEP_US = 2000


@njit
def rest(context, beats, since):
    """Spend one beat of a wait that began at `since`. Return FINISHED, or another result, which the kernel must return."""
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
    """Record for the caller what the wait was for: all ranks whose word in a line is below `least`."""
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
            if status != FINISHED and load(theirs) == seen:  # a header that came before the end of the wait counts
                note_wait_for_all(context, header, sequence)
                return status
            beats += 1
    return FINISHED


@njit
def any_has_left(context):
    """Return whether any rank has closed or broken the group."""
    states = int64(0)
    for peer in range(field(context, SIZE)):
        states |= load(line_of(context, peer, STATE))
    return states != 0


@njit
def wait_for_line(context, line, least):
    """Wait until the word in every rank's line is at least `least`."""
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
