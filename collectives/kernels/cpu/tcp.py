"""Messages over TCP, and whole programs of them, in one call without Python between messages.

A connection carries one message after the other: a header of 16 bytes, the tag and the length, then the bytes. The messages
that a process has posted are rows of a table, in the order posted. A message belongs to the first row of its sender whose tag
has the same low 32 bits; the other bits, the kind of its numbers, and the length must then be equal too. If there is no row
yet, the message and all later ones wait in the connection.
"""

from __future__ import annotations

from numba import int64, njit

from gradwire.collectives.kernels.cpu.arithmetic import OPS, combine
from gradwire.collectives.kernels.cpu.compiling import compiled
from gradwire.collectives.kernels.cpu.intrinsics import copy, give_way, load, monotonic_ns, store
from gradwire.collectives.kernels.cpu.sockets import (
    EAGAIN,
    EINTR,
    EPIPE,
    POLL_BYTES,
    POLLIN,
    POLLOUT,
    POLLRDHUP,
    has_ended,
    poll,
    receive,
    send_two,
    watch_for,
)

# Fields of 64 bits that a kernel shares with the process that calls it, the *context*.
(
    RANK,
    SIZE,
    MOST_TRIES,  # how often a wait may poll before it sleeps
    TRIES,  # how often it polls at present: fewer times after polls without success
    SLEPT,  # how many waits have polled without success since TRIES was MOST_TRIES
    ABORTED,  # 1 when this process must not wait any more
    ROWS,  # address of the table, ROW_BYTES a message
    CAPACITY,  # rows of the table, a power of two: message n is in row n % CAPACITY
    FIRST,  # number of the first message that may be unfinished
    COUNT,  # number that the next posted message gets
    CONNECTIONS,  # address of SIZE connections
    WANTED,  # address of SIZE words: SENDS and RECEIVES that are under way with each rank
    POLLS,  # address of SIZE struct pollfd
    NEXT,  # the instruction at which a program continues
    PEER,  # the rank that the last wait was for, that failed, or that next_sender() has found
    ERROR,  # errno of a failure; 0 for a connection that ended
    FOUND_TAG,  # the header of a message that does not match its posted row
    FOUND_NBYTES,
    FIELDS,
) = range(19)

(
    ROW_SENDS,  # 1 for a send, 0 for a receive
    ROW_PEER,
    ROW_TAG,  # with the length that follows, the header of a sent message
    ROW_NBYTES,
    ROW_ADDRESS,
    ROW_MOVED,  # bytes sent, from -HEADER_BYTES on, or received
    ROW_DONE,
    ROW_FIELDS,
) = range(8)
ROW_BYTES = 8 * ROW_FIELDS
HEADER_BYTES = 16
TAG_MASK = 2**32 - 1  # the bits by which messages are matched

(
    DESCRIPTOR,  # of the socket, -1 for none
    STAGE,  # address of STAGE_BYTES, in which headers and short messages arrive
    BEGIN,  # where the unread bytes in it begin
    END,
    CURRENT,  # number of the message that is arriving, -1 for none
    ENDED,  # 1 once the other end has ended its output
    CONNECTION_FIELDS,
) = range(7)
CONNECTION_BYTES = 8 * CONNECTION_FIELDS
STAGE_BYTES = 16 << 10

#: Bytes that one call moves, so that sends and receives alternate. Less than the 64 KB that Linux sends as one segment: with
#: more, Linux may hold back a small tail (net.ipv4.tcp_autocorking), which has made exchanges eight times slower.
_PIECE_BYTES = 56 << 10

#: How long a wait sleeps before it returns to its caller.
_SLICE_MS, _SLICE_NS = 50, 40_000_000

#: After how many waits that polled without success TRIES is MOST_TRIES again.
_PROBE_AFTER = 32

#: How often a wait polls before it offers the core to other processes, and how long a computing process keeps the core.
_TRIES_ALONE, _LONG_NS = 20, 1_000_000

SENDS, RECEIVES, _STUCK = 1, 2, 4

# The results of a kernel.
FINISHED, PENDING, STOPPED, LOST, DISAGREED, FULL = range(6)

# The kinds of instructions, as in gradwire.collectives.plan.program.
_SEND, _RECEIVE, _POST, _WAIT, _REDUCE = range(5)
INSTRUCTION_FIELDS = 8


@njit
def _get(context, field):
    return load(context + 8 * field)


@njit
def _set(context, field, value):
    store(context + 8 * field, value)


@njit
def _row(context, number):
    return _get(context, ROWS) + ROW_BYTES * (number & (_get(context, CAPACITY) - 1))


@njit
def _connection(context, peer):
    return _get(context, CONNECTIONS) + CONNECTION_BYTES * peer


@njit
def _send_some(connection, row):
    """Write as much of a message as there is room for. Return the number of bytes, or -errno."""
    moved, nbytes = _get(row, ROW_MOVED), _get(row, ROW_NBYTES)
    header = max(-moved, 0)
    begun = max(moved, 0)
    written = send_two(
        _get(connection, DESCRIPTOR),
        row + 8 * ROW_TAG + HEADER_BYTES - header,
        header,
        _get(row, ROW_ADDRESS) + begun,
        min(nbytes - begun, _PIECE_BYTES),
    )
    if written > 0:
        _set(row, ROW_MOVED, moved + written)
        if moved + written == nbytes:
            _set(row, ROW_DONE, 1)
    return written


@njit
def _fill(connection):
    """Read into the stage of a connection. Return as receive()."""
    stage, begin, end = _get(connection, STAGE), _get(connection, BEGIN), _get(connection, END)
    if begin == end:
        begin = end = 0
    elif begin > 0:  # the beginning of a header
        for byte in range(end - begin):
            copy(stage + byte, stage + begin + byte, 1)
        begin, end = 0, end - begin
    got = receive(_get(connection, DESCRIPTOR), stage + end, STAGE_BYTES - end)
    _set(connection, BEGIN, begin)
    _set(connection, END, end + max(got, 0))
    return got


@njit
def _begin_message(context, connection, peer):
    """Find the row for the header at hand. Return whether there is one, or -1 if the row expects another kind or length."""
    header = _get(connection, STAGE) + _get(connection, BEGIN)
    for number in range(_get(context, FIRST), _get(context, COUNT)):
        row = _row(context, number)
        if (
            _get(row, ROW_SENDS) == 0
            and _get(row, ROW_DONE) == 0
            and _get(row, ROW_PEER) == peer
            and _get(row, ROW_TAG) & TAG_MASK == load(header) & TAG_MASK
        ):
            if _get(row, ROW_TAG) != load(header) or _get(row, ROW_NBYTES) != load(header + 8):
                _set(context, FOUND_TAG, load(header))
                _set(context, FOUND_NBYTES, load(header + 8))
                return -1
            _set(connection, CURRENT, number)
            _set(connection, BEGIN, _get(connection, BEGIN) + HEADER_BYTES)
            return 1
    return 0


@njit
def _receive_some(context, connection, peer):
    """Read from a connection until it has no more bytes for posted rows, or a piece has been read. Return FINISHED, DISAGREED,
    LOST, or PENDING if nothing was read."""
    pieces = 0
    while pieces < _PIECE_BYTES:
        if _get(connection, CURRENT) < 0:
            if _get(connection, END) - _get(connection, BEGIN) < HEADER_BYTES:
                got = _fill(connection)
                if got <= 0:
                    return _nothing(context, peer, got, pieces)
                pieces += 1
                continue
            found = _begin_message(context, connection, peer)
            if found < 0:
                _set(context, PEER, peer)
                return DISAGREED
            if found == 0:
                wanted = _get(context, WANTED) + 8 * peer
                store(wanted, load(wanted) | _STUCK)
                return FINISHED if pieces > 0 else PENDING
        row = _row(context, _get(connection, CURRENT))
        moved, nbytes = _get(row, ROW_MOVED), _get(row, ROW_NBYTES)
        begin, end = _get(connection, BEGIN), _get(connection, END)
        if moved < nbytes and begin < end:
            got = min(end - begin, nbytes - moved)
            copy(_get(row, ROW_ADDRESS) + moved, _get(connection, STAGE) + begin, got)
            _set(connection, BEGIN, begin + got)
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
                _get(connection, DESCRIPTOR), _get(row, ROW_ADDRESS) + moved, min(nbytes - moved, _PIECE_BYTES)
            )
            if got <= 0:
                return _nothing(context, peer, got, pieces)
        pieces += got + 1
        _set(row, ROW_MOVED, moved + got)
        if moved + got == nbytes:
            _set(row, ROW_DONE, 1)
            _set(connection, CURRENT, -1)
            if not _awaits(context, peer):
                break
    return FINISHED


@njit
def _awaits(context, peer):
    """Return whether any receive from a rank is unfinished."""
    for number in range(_get(context, FIRST), _get(context, COUNT)):
        row = _row(context, number)
        if _get(row, ROW_SENDS) == 0 and _get(row, ROW_DONE) == 0 and _get(row, ROW_PEER) == peer:
            return True
    return False


@njit
def _nothing(context, peer, got, pieces):
    """Return what it means that a call moved nothing: 0 is the end of the connection, else -errno."""
    if got == -EAGAIN or got == -EINTR:
        return FINISHED if pieces > 0 else PENDING
    _set(context, PEER, peer)
    _set(context, ERROR, -got)
    return LOST


@njit
def _move_some(context):
    """Move all messages as far as possible. Return FINISHED, DISAGREED, LOST, or PENDING if none could be moved."""
    wanted = _get(context, WANTED)
    size = _get(context, SIZE)
    for peer in range(size):
        store(wanted + 8 * peer, 0)
    result = PENDING
    first = _get(context, FIRST)
    for number in range(first, _get(context, COUNT)):
        row = _row(context, number)
        if _get(row, ROW_DONE) != 0:
            if number == first:
                first += 1
            continue
        peer = _get(row, ROW_PEER)
        state = load(wanted + 8 * peer)
        if _get(row, ROW_SENDS) == 0:
            store(wanted + 8 * peer, state | RECEIVES)
        elif state & SENDS == 0:
            written = _send_some(_connection(context, peer), row)
            if written > 0:
                result = FINISHED
            elif _nothing(context, peer, written if written != 0 else -EPIPE, 0) == LOST:
                return LOST
            if _get(row, ROW_DONE) == 0:
                store(wanted + 8 * peer, state | SENDS)
    _set(context, FIRST, first)
    for peer in range(size):
        if load(wanted + 8 * peer) & RECEIVES != 0:
            status = _receive_some(context, _connection(context, peer), peer)
            if status in (LOST, DISAGREED):
                return status
            if status == FINISHED:
                result = FINISHED
    return result


@njit
def _sleep(context, milliseconds):
    """Sleep until a message can be moved, for at most `milliseconds`. Return FINISHED, or LOST if a connection has ended behind
    a message without a row: it is not read from, so only poll() shows its end."""
    polls, wanted = _get(context, POLLS), _get(context, WANTED)
    count = 0
    for peer in range(_get(context, SIZE)):
        state = load(wanted + 8 * peer)
        if state == 0:
            continue
        events = POLLOUT if state & SENDS != 0 else 0
        if state & RECEIVES != 0:
            events |= POLLIN if state & _STUCK == 0 else POLLRDHUP
        watch_for(polls, count, _get(_connection(context, peer), DESCRIPTOR), events)
        count += 1
    if poll(polls, count, milliseconds) <= 0:
        return FINISHED
    count = 0
    for peer in range(_get(context, SIZE)):
        state = load(wanted + 8 * peer)
        if state & _STUCK != 0 and has_ended(polls, count):
            _set(context, PEER, peer)
            _set(context, ERROR, 0)
            return LOST
        count += state != 0
    return FINISHED


@njit
def _spin_less(context):
    """Halve the polls of later waits, after one that polled without success: the message is slow, or other processes need the
    core. Now and then allow all polls again, to see whether that has changed."""
    slept = _get(context, SLEPT) + 1
    if slept < _PROBE_AFTER:
        _set(context, TRIES, min(_get(context, TRIES) // 2, _get(context, MOST_TRIES)))
        _set(context, SLEPT, slept)
    else:
        _set(context, TRIES, _get(context, MOST_TRIES))
        _set(context, SLEPT, 0)


@njit
def _offer_the_core(context):
    """Let other processes use the core. Other ranks return it soon. If another process computes on it, a sleeping process gets
    it back sooner than a spinning one, so later waits sleep at once for a while."""
    offered = monotonic_ns()
    give_way()
    if monotonic_ns() - offered > _LONG_NS:
        _set(context, TRIES, 0)
        _set(context, SLEPT, 0)


@njit
def _polls_again(context, tries):
    """Return whether a wait that has polled so often polls again before it sleeps; after the first few polls, offer the
    core."""
    if tries > _get(context, TRIES):
        return False
    if tries > _TRIES_ALONE:
        _offer_the_core(context)
    return True


@njit
def _wait_for(context, number, began):
    """Wait until a message is done, while the others move too. Return PENDING some time after `began`, even if messages move,
    so that the caller can check its deadline."""
    tries = 0
    slept = False
    is_late = False
    while True:
        if _get(context, ABORTED) != 0:
            return STOPPED
        if number < _get(context, FIRST) or _get(_row(context, number), ROW_DONE) != 0:
            return FINISHED
        if is_late:
            _set(context, PEER, _get(_row(context, number), ROW_PEER))
            return PENDING
        status = _move_some(context)
        if status in (LOST, DISAGREED):
            return status
        if status == FINISHED:
            if 0 < tries <= _get(context, TRIES):
                _set(context, TRIES, min(_get(context, MOST_TRIES), max(_get(context, TRIES), 4 * tries)))
            tries = 0
            slept = False
            is_late = monotonic_ns() - began > _SLICE_NS
            continue
        tries += 1
        if _polls_again(context, tries):
            continue
        if not slept:
            slept = True
            _spin_less(context)
        is_late = monotonic_ns() - began > _SLICE_NS
        if not is_late and _sleep(context, _SLICE_MS) == LOST:
            return LOST


@njit
def _add(context, sends, peer, tag, address, nbytes):
    """Post a message. Return whether there was room."""
    number = _get(context, COUNT)
    first = _get(context, FIRST)
    while first < number and _get(_row(context, first), ROW_DONE) != 0:
        first += 1
    _set(context, FIRST, first)
    if number - first == _get(context, CAPACITY):
        return False
    row = _row(context, number)
    _set(row, ROW_SENDS, sends)
    _set(row, ROW_PEER, peer)
    _set(row, ROW_TAG, tag)
    _set(row, ROW_NBYTES, nbytes)
    _set(row, ROW_ADDRESS, address)
    _set(row, ROW_MOVED, -HEADER_BYTES if sends != 0 else 0)
    _set(row, ROW_DONE, 0)
    _set(context, COUNT, number + 1)
    return True


@compiled(njit, int64(*[int64] * 6), nogil=True)
def add(context, sends, peer, tag, address, nbytes):
    """Post a message. Return FINISHED, or FULL if the table has no room."""
    return FINISHED if _add(context, sends, peer, tag, address, nbytes) else FULL


@compiled(njit, int64(int64, int64), nogil=True)
def wait_for(context, number):
    """Wait until the message of that number is done; with -1, only move messages without waiting."""
    if _get(context, ABORTED) != 0:
        return STOPPED
    if number >= 0:
        return _wait_for(context, number, monotonic_ns())
    status = _move_some(context)
    return FINISHED if status == PENDING else status


@njit
def _begins(connection, tag):
    """Return whether the next message of a connection has a tag. Reads as much of its header as has arrived."""
    if _get(connection, CURRENT) >= 0:
        return False
    if _get(connection, END) - _get(connection, BEGIN) < HEADER_BYTES:
        got = _fill(connection)
        if got == 0 or (got < 0 and got != -EAGAIN and got != -EINTR):
            _set(connection, ENDED, 1)
    waiting = _get(connection, END) - _get(connection, BEGIN)
    if waiting < HEADER_BYTES:
        return False
    return load(_get(connection, STAGE) + _get(connection, BEGIN)) & TAG_MASK == tag & TAG_MASK


@njit
def _find_sender(context, tag, first):
    """Return the first rank, from `first` on, whose next message has a tag; -1 for none. Ranks whose next header has not
    arrived yet are marked in WANTED."""
    size = _get(context, SIZE)
    wanted = _get(context, WANTED)
    for step in range(size):
        peer = (first + step) % size
        connection = _connection(context, peer)
        if _get(connection, DESCRIPTOR) < 0 or _get(connection, ENDED) != 0:
            continue
        if _begins(connection, tag):
            return peer
        is_known = _get(connection, END) - _get(connection, BEGIN) >= HEADER_BYTES
        if _get(connection, ENDED) == 0 and not is_known:
            store(wanted + 8 * peer, load(wanted + 8 * peer) | RECEIVES)
    return -1


@compiled(njit, int64(*[int64] * 4), nogil=True)
def next_sender(context, tag, first, milliseconds):
    """Wait for a message with a tag, from any rank, for at most `milliseconds`; ranks from `first` on are checked first. PEER
    becomes the rank, or -1. The message is not received."""
    began = monotonic_ns()
    tries = 0
    while True:
        if _get(context, ABORTED) != 0:
            return STOPPED
        status = _move_some(context)
        if status in (LOST, DISAGREED):
            return status
        peer = _find_sender(context, tag, first)
        _set(context, PEER, peer)
        left_ms = milliseconds - (monotonic_ns() - began) // 1_000_000
        if peer >= 0 or left_ms <= 0:
            return FINISHED
        tries += 1
        if not _polls_again(context, tries) and status == PENDING and _sleep(context, min(left_ms, _SLICE_MS)) == LOST:
            return LOST


@njit
def _reduce(mine, theirs, length, itemsize, arithmetic, op, mine_first):
    """Reduce received numbers into this rank's, the lower rank's first: the order decides the sign of a zero in min and max,
    and the bits of a NaN."""
    if mine_first:
        combine(arithmetic, mine, theirs, length, op, 1)
    else:
        combine(arithmetic, theirs, mine, length, op, 1)
        copy(mine, theirs, length * itemsize)


@compiled(njit, int64(*[int64] * 11), nogil=True)
def follow(context, instructions, count, base, tag, source, destination, scratch, itemsize, arithmetic, op):
    """Run the `count` instructions of a program. After PENDING or FULL, call it again with the same arguments.

    base: the number that the program's first message has here. source, destination, scratch: where its numbers lie.
    arithmetic: the address of the C function that reduces them.
    """
    rank = _get(context, RANK)
    began = monotonic_ns()
    for index in range(_get(context, NEXT), count):
        at = instructions + 8 * INSTRUCTION_FIELDS * index
        kind, peer, offset, length = load(at), load(at + 8), load(at + 16), load(at + 24)
        place, number, segment = load(at + 32), load(at + 40), load(at + 48)
        status = FINISHED
        if kind == _SEND:
            if not _add(context, 1, peer, tag + segment, source + offset * itemsize, length * itemsize):
                status = FULL
        elif kind == _RECEIVE:
            landing = destination + offset * itemsize if place < 0 else scratch + place * itemsize
            if not _add(context, 0, peer, tag + segment, landing, length * itemsize):
                status = FULL
        elif kind == _POST:
            status = _move_some(context)
            if status == PENDING:
                status = FINISHED
        elif kind == _WAIT:
            status = _wait_for(context, base + number, began)
        else:
            _reduce(
                destination + offset * itemsize,
                scratch + place * itemsize,
                length,
                itemsize,
                arithmetic,
                op,
                rank < peer,
            )
        if status != FINISHED:
            _set(context, NEXT, index)
            return status
    _set(context, NEXT, 0)
    return FINISHED
