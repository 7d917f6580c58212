"""Whole programs, in one call without Python between messages: over TCP, and through shared memory to ranks of the same host.

Each message is a row in the table of one of the two links: see gradwire.collectives.kernels.cpu.rows.
"""

from __future__ import annotations

from llvmlite import ir
from numba import int64, njit, types, uint32

from gradwire.collectives.kernels import layout
from gradwire.collectives.kernels.cpu.arithmetic import combine
from gradwire.collectives.kernels.cpu.blocks import random_bits
from gradwire.collectives.kernels.cpu.intrinsics import (
    FLOAT,
    I64,
    copy,
    field,
    instruction,
    load,
    monotonic_ns,
    set_field,
    sleep_us,
    store,
)
from gradwire.collectives.kernels.cpu.messages import UNSTARTED
from gradwire.collectives.kernels.cpu.messages import move_some as move_near
from gradwire.collectives.kernels.cpu.rows import add_row, is_done, row_of
from gradwire.collectives.kernels.cpu.tcp import SLICE_MS, SLICE_NS, add_message
from gradwire.collectives.kernels.cpu.tcp import move_some as move_far
from gradwire.collectives.kernels.cpu.tcp_context import polls_again, sleep, spin_less, spin_more

# A sleep is a sixteenth of the wait so far, within bounds, while messages in shared memory may arrive, whose arrival ends no
# sleep.
_SLEEP_SHARE, _SHORTEST_SLEEP_US, _LONGEST_SLEEP_US = 16, 50, 2000


@njit
def _place(request, peer):
    """Return the place of a rank among those that share memory, or -1."""
    return int64(-1) if field(request, layout.NEAR) == 0 else load(field(request, layout.PLACES) + 8 * peer)


@njit
def _add(request, sends, peer, tag, address, nbytes, number):
    """Post a message of a program. Return FINISHED, FULL if its table has no room, or TOO_MANY."""
    slot = field(request, layout.NUMBERS) + 8 * (number & (layout.MESSAGES - 1))
    if load(slot) != 0:
        return layout.TOO_MANY
    place = _place(request, peer)
    at_near = int64(place >= 0)
    context = field(request, layout.NEAR) if at_near else field(request, layout.FAR)
    posted = field(context, layout.COUNT)
    if at_near:
        has_room = add_row(context, sends, place, tag, address, nbytes, UNSTARTED)
    else:
        has_room = add_message(context, sends, peer, tag, address, nbytes)
    set_field(request, layout.AT_NEAR, at_near)
    if not has_room:
        return layout.FULL
    store(slot, 2 * posted + at_near + 1)
    return layout.FINISHED


@njit
def _move(request):
    """Move all messages of both links as far as possible. Return FINISHED, DISAGREED, LOST, or PENDING if none could be
    moved."""
    near = field(request, layout.NEAR)
    moves = int64(0) if near == 0 else move_near(near)
    set_field(request, layout.AT_NEAR, int64(moves < 0))
    if moves < 0:
        set_field(near, layout.PEER, -1 - moves)
        return layout.DISAGREED
    status = move_far(field(request, layout.FAR))
    if status == layout.PENDING and moves > 0:
        status = layout.FINISHED
    set_field(request, layout.HAS_MOVED, int64(status == layout.FINISHED))
    return status


@njit
def _is_stopped(request):
    """Return whether this process must not wait any more."""
    near = field(request, layout.NEAR)
    return field(field(request, layout.FAR), layout.ABORTED) != 0 or (near != 0 and field(near, layout.ABORTED) != 0)


@njit
def _rest(request, waited_ns):
    """Sleep until a message may move. Return FINISHED, or LOST."""
    near = field(request, layout.NEAR)
    alone = near == 0 or field(near, layout.FIRST) == field(near, layout.COUNT)
    status = sleep(field(request, layout.FAR), SLICE_MS if alone else 0)
    if not alone and status == layout.FINISHED:
        sleep_us(min(_LONGEST_SLEEP_US, max(_SHORTEST_SLEEP_US, waited_ns // (1000 * _SLEEP_SHARE))))
    return status


@njit
def _wait_for(request, number, began):
    """Wait until a message is done, while all others move too. Return PENDING some time after `began`, even if messages move,
    so that the caller can check its deadline."""
    slot = field(request, layout.NUMBERS) + 8 * (number & (layout.MESSAGES - 1))
    posted = load(slot) - 1
    far = field(request, layout.FAR)
    context = field(request, layout.NEAR) if posted & 1 else far
    row = row_of(context, posted >> 1)
    tries = 0
    since = int64(0)
    is_late = False
    while True:
        if is_done(context, posted >> 1):
            store(slot, 0)
            return layout.FINISHED
        if is_late or _is_stopped(request):
            set_field(context, layout.PEER, field(row, layout.ROW_PEER))
            set_field(request, layout.AT_NEAR, posted & 1)
            return layout.PENDING if is_late else layout.STOPPED
        status = _move(request)
        if status in (layout.LOST, layout.DISAGREED):
            return status
        if status == layout.FINISHED:
            spin_more(far, tries)
            tries = 0
            since = 0
            is_late = monotonic_ns() - began > SLICE_NS
            continue
        tries += 1
        if polls_again(far, tries):
            continue
        now = monotonic_ns()
        if since == 0:
            since = now
            spin_less(far)
        is_late = now - began > SLICE_NS
        if not is_late and _rest(request, now - since) == layout.LOST:
            return layout.LOST


@njit
def _reduce(mine, theirs, length, itemsize, arithmetic, op, mine_first):
    """Reduce received numbers into this rank's, the lower rank's first: the order decides the sign of a zero in min and max,
    and the bits of a NaN."""
    if mine_first:
        combine(arithmetic, mine, theirs, length, op, 1)
    else:
        combine(arithmetic, theirs, mine, length, op, 1)
        copy(mine, theirs, length * itemsize)


@instruction(types.void, *[int64] * 7)
def _call_encode(builder, function, values, residual, code, count, settings, seed):
    """Call a codec's function for encoding by its address."""
    kind = ir.FunctionType(ir.VoidType(), [I64] * 6)
    builder.call(builder.inttoptr(function, kind.as_pointer()), (values, residual, code, count, settings, seed))


@instruction(int64, *[int64] * 6)
def _call_decode(builder, function, code, values, count, settings, add):
    """Call a codec's function for decoding by its address. Return how many indices are outside."""
    kind = ir.FunctionType(I64, [*[I64] * 5, FLOAT])
    arguments = code, values, count, settings, add, ir.Constant(FLOAT, 1.0)
    return builder.call(builder.inttoptr(function, kind.as_pointer()), arguments)


@njit
def _mixed(seed, value):
    """Return 32 bits that mix both numbers: see gradwire.collectives.compression.codec."""
    return int64(random_bits(seed, uint32(value + 1)))


@njit
def _code(coding, rank, kind, offset, length, place, number, segment, block):
    """Encode, decode, add or divide, as transports.codes.Codes.work() does. Return FINISHED, or MALFORMED for a code that does
    not fit."""
    in_sum = field(coding, layout.HAS_SUM) if kind == layout.ENCODE else int64(number == 1)
    values = field(coding, layout.SUMS) if in_sum != 0 else field(coding, layout.VALUES) + 4 * offset
    set_field(coding, layout.HAS_SUM, in_sum if kind == layout.COMPLETE else int64(0))
    if kind == layout.COMPLETE:
        divisor = field(coding, layout.DIVISOR)
        if divisor != 1:
            combine(field(coding, layout.DIVIDE_FUNCTION), values, values, length, layout.DIVIDE, divisor)
        return layout.FINISHED
    code = field(coding, layout.CODES) + place
    if kind != layout.ENCODE:
        settings = field(coding, layout.DECODE_SETTINGS)
        outside = _call_decode(
            field(coding, layout.DECODE_FUNCTION), code, values, length, settings, int64(kind == layout.ADD)
        )
        return layout.FINISHED if outside == 0 else layout.MALFORMED
    residual = int64(0)
    if number == 0 and field(coding, layout.WORKER) != 0:
        residual = field(coding, layout.WORKER) + 4 * offset
    elif number != 0 and field(coding, layout.OWNER) != 0:
        residual = field(coding, layout.OWNER) + 4 * (offset - field(coding, layout.OWNER_START))
    # Ranks that hold the same sum must encode it to the same code, so they use the seed of the block's owner.
    if number != 0:
        rank = load(field(coding, layout.GROUP) + 8 * (block % field(coding, layout.GROUP_SIZE)))
    seed = _mixed(_mixed(_mixed(_mixed(field(coding, layout.SEED), rank), segment), block), number)
    settings = field(coding, layout.ENCODE_SETTINGS)
    _call_encode(field(coding, layout.ENCODE_FUNCTION), values, residual, code, length, settings, seed)
    return layout.FINISHED


def execute_program(request, instructions, count, tag, source, destination, scratch):
    """Run the `count` instructions of a program. After PENDING or FULL, call it again with the same arguments.

    source, destination, scratch: where its numbers lie; of a program of codes, `scratch` has the codes.
    """
    if _is_stopped(request):
        return layout.STOPPED
    itemsize, rank = field(request, layout.ITEMSIZE), field(field(request, layout.FAR), layout.RANK)
    trace = field(request, layout.TRACE)
    began = monotonic_ns()
    for index in range(field(request, layout.NEXT), count):
        at = instructions + 8 * layout.INSTRUCTION_FIELDS * index
        kind, peer, offset, length = load(at), load(at + 8), load(at + 16), load(at + 24)
        place, number, segment = load(at + 32), load(at + 40), load(at + 48)
        status = layout.FINISHED
        if kind == layout.SEND:
            leaving = source + offset * itemsize if place < 0 else scratch + place * itemsize
            status = _add(request, 1, peer, tag + segment, leaving, length * itemsize, number)
        elif kind == layout.RECEIVE:
            landing = destination + offset * itemsize if place < 0 else scratch + place * itemsize
            status = _add(request, 0, peer, tag + segment, landing, length * itemsize, number)
        elif kind == layout.POST:
            status = _move(request)
            if status == layout.PENDING:
                status = layout.FINISHED
        elif kind == layout.WAIT:
            status = _wait_for(request, number, began)
        elif kind != layout.REDUCE:
            block = load(at + 56)
            status = _code(field(request, layout.CODING), rank, kind, offset, length, place, number, segment, block)
        else:
            _reduce(
                destination + offset * itemsize,
                scratch + place * itemsize,
                length,
                itemsize,
                field(request, layout.ARITHMETIC),
                field(request, layout.OP),
                rank < peer,
            )
        if status != layout.FINISHED:
            set_field(request, layout.NEXT, index)
            return status
        if trace != 0:
            store(trace + 8 * index, monotonic_ns())
    set_field(request, layout.NEXT, 0)
    return layout.FINISHED
