"""The allreduce, or one half of it, of the ranks that share a segment of memory: small, staged in chunks, or in place."""

from __future__ import annotations

from numba import int64, njit

from gradwire.collectives.kernels import layout
from gradwire.collectives.kernels.cpu.arithmetic import combine
from gradwire.collectives.kernels.cpu.intrinsics import copy, field, load, monotonic_ns, set_field, store
from gradwire.collectives.kernels.cpu.waits import (
    any_has_left,
    least_of,
    line_of,
    note_wait_for_all,
    rest,
    wait_for_headers,
    wait_for_line,
)


@njit
def _start(context, rank, nbytes):
    """Return where the share of a rank begins, in bytes. Shares are cut as by split_aligned, at multiples of LINE."""
    size = field(context, layout.SIZE)
    lines = (nbytes + layout.LINE - 1) // layout.LINE
    return min(nbytes, layout.LINE * (rank * (lines // size) + min(rank, lines % size)))


@njit
def _read_headers(context, header):
    """Decide whether the operation runs without a copy, with the same decision on all ranks.

    It does if every tensor lies in an allocation that an earlier operation announced, and no rank failed to map one.
    """
    direct = 1
    news = 0
    for peer in range(field(context, layout.SIZE)):
        theirs = line_of(context, peer, header)
        known = field(context, layout.KNOWN) + 8 * peer
        slot, born, version, failed = load(theirs + 8), load(theirs + 24), load(theirs + 32), load(theirs + 40)
        if slot < 0 or failed != 0 or born > load(known):
            direct = 0
        if version != load(known):
            news = 1
        store(field(context, layout.ANNOUNCED) + 8 * peer, version)
    set_field(context, layout.DIRECT, direct)
    set_field(context, layout.NEWS, news)


@njit
def _address(context, rank, header):
    """Return the address in this process of the tensor that a rank announced."""
    theirs = line_of(context, rank, header)
    slot = rank * field(context, layout.SLOTS) + load(theirs + 8)
    return load(field(context, layout.BASES) + 8 * slot) + load(theirs + 16)


@njit
def _reduce_without_copy(context, header, parity, nbytes, itemsize, function, op, divisor, doing):
    """Reduce this rank's share of all ranks' buffers in rank order; write the result to all, or if only this half is done, to
    its own. Return FINISHED, or STOPPED if a rank has given up."""
    rank, size, block = field(context, layout.RANK), field(context, layout.SIZE), field(context, layout.BLOCK)
    position, stop = _start(context, rank, nbytes), _start(context, rank + 1, nbytes)
    first, own = _address(context, 0, header), _address(context, rank, header)
    slot_bytes = field(context, layout.WHOLE_BYTES)  # not less than a block has; a large message does not use the slot
    slot = field(context, layout.WHOLE) + (2 * rank + parity) * slot_bytes
    while position < stop:
        # A rank that was stopped for a while must not write to the tensors of ranks that have given up. None can have finished,
        # since all wait for this rank.
        if any_has_left(context):
            return layout.STOPPED
        length = min(block, stop - position)
        count = length // itemsize
        total = first + position
        if doing == layout.REDUCES and rank != 0:
            total = slot
            copy(total, first + position, length)
        for peer in range(1, size):
            combine(function, total, _address(context, peer, header) + position, count, op, divisor)
        if divisor != 1:
            combine(function, total, total, count, layout.DIVIDE, divisor)
        if doing != layout.REDUCES:
            for peer in range(1, size):
                copy(_address(context, peer, header) + position, total, length)
        elif rank != 0:
            copy(own + position, total, length)
        position += length
    return layout.FINISHED


@njit
def _gather_without_copy(context, header, nbytes):
    """Copy the others' shares from their buffers."""
    rank, size = field(context, layout.RANK), field(context, layout.SIZE)
    own = _address(context, rank, header)
    for step in range(1, size):
        peer = (rank + step) % size
        start, stop = _start(context, peer, nbytes), _start(context, peer + 1, nbytes)
        copy(own + start, _address(context, peer, header) + start, stop - start)


@njit
def _reduce_whole(context, parity, data, nbytes, itemsize, function, op, divisor):
    """Reduce all of a small message; every rank does so by itself."""
    rank, size, slot_bytes = (
        field(context, layout.RANK),
        field(context, layout.SIZE),
        field(context, layout.WHOLE_BYTES),
    )
    slots = field(context, layout.WHOLE) + parity * slot_bytes
    count = nbytes // itemsize
    if rank != 0:
        copy(data, slots, nbytes)
    for peer in range(1, size):
        combine(function, data, slots + 2 * peer * slot_bytes, count, op, divisor)
    if divisor != 1:
        combine(function, data, data, count, layout.DIVIDE, divisor)


@njit
def _gather_whole(context, parity, data, nbytes):
    """Copy the others' shares of a small message."""
    rank, size, slot_bytes = (
        field(context, layout.RANK),
        field(context, layout.SIZE),
        field(context, layout.WHOLE_BYTES),
    )
    slots = field(context, layout.WHOLE) + parity * slot_bytes
    for peer in range(size):
        start, stop = _start(context, peer, nbytes), _start(context, peer + 1, nbytes)
        if peer != rank:
            copy(data + start, slots + 2 * peer * slot_bytes + start, stop - start)


@njit
def _chunk(context, owner, number, sub):
    """Return where the contribution of rank `sub` to a chunk of the owner's span is staged."""
    size = field(context, layout.SIZE)
    place = (owner * field(context, layout.DEPTH) + number % field(context, layout.DEPTH)) * size + sub
    return field(context, layout.STAGING) + place * field(context, layout.CHUNK_BYTES)


@njit
def _allreduce_staged(context, data, nbytes, itemsize, function, op, divisor, doing):
    """Chunk by chunk, give the others their shares of this rank's tensor, reduce this rank's share, and copy the results; or do
    half of that.

    The result of a chunk is left in rank 0's place of it (the owner 0 uses rank 1's).
    """
    rank, size, depth = field(context, layout.RANK), field(context, layout.SIZE), field(context, layout.DEPTH)
    chunk_bytes, before, block = (
        field(context, layout.CHUNK_BYTES),
        field(context, layout.CHUNKS),
        field(context, layout.BLOCK),
    )
    chunks = (_start(context, 1, nbytes) + chunk_bytes - 1) // chunk_bytes  # of the first share: none is longer
    staged, reduced, copied = (
        field(context, layout.MINE_STAGED),
        field(context, layout.MINE_REDUCED),
        field(context, layout.MINE_COPIED),
    )
    beats = 0
    since = int64(0)
    status = layout.FINISHED
    last_look = False
    while copied < chunks:
        moved = False
        if copied < reduced and least_of(context, layout.REDUCED) > before + copied:
            for step in range(1, size if doing & layout.SPREADS else 1):
                owner = (rank + step) % size
                start = _start(context, owner, nbytes) + copied * chunk_bytes
                length = min(chunk_bytes, _start(context, owner + 1, nbytes) - start)
                if length > 0:
                    copy(data + start, _chunk(context, owner, before + copied, 1 if owner == 0 else 0), length)
            copied += 1
            store(line_of(context, rank, layout.COPIED), before + copied)
            moved = True
        if reduced < staged and least_of(context, layout.STAGED) > before + reduced:
            start = _start(context, rank, nbytes) + reduced * chunk_bytes
            stop = min(_start(context, rank + 1, nbytes), start + chunk_bytes)
            offset = 0
            while start < stop:
                length = min(block, stop - start)
                count = length // itemsize
                own = data + start
                number = before + reduced
                if doing == layout.SPREADS:
                    copy(_chunk(context, rank, number, 1 if rank == 0 else 0) + offset, own, length)
                elif rank == 0:
                    result = _chunk(context, rank, number, 1) + offset
                    for peer in range(1, size):
                        combine(function, own, _chunk(context, rank, number, peer) + offset, count, op, divisor)
                    if divisor != 1:
                        combine(function, own, own, count, layout.DIVIDE, divisor)
                    if doing & layout.SPREADS:
                        copy(result, own, length)
                else:
                    result = _chunk(context, rank, number, 0) + offset
                    for peer in range(1, size):
                        theirs = own if peer == rank else _chunk(context, rank, number, peer) + offset
                        combine(function, result, theirs, count, op, divisor)
                    if divisor != 1:
                        combine(function, result, result, count, layout.DIVIDE, divisor)
                    copy(own, result, length)
                start += length
                offset += length
            reduced += 1
            store(line_of(context, rank, layout.REDUCED), before + reduced)
            moved = True
        if staged < chunks and (staged < depth or least_of(context, layout.COPIED) > before + staged - depth):
            for step in range(1, size if doing & layout.REDUCES else 1):
                owner = (rank + step) % size
                start = _start(context, owner, nbytes) + staged * chunk_bytes
                length = min(chunk_bytes, _start(context, owner + 1, nbytes) - start)
                if length > 0:
                    copy(_chunk(context, owner, before + staged, rank), data + start, length)
            staged += 1
            store(line_of(context, rank, layout.STAGED), before + staged)
            moved = True
        if moved:
            set_field(context, layout.PATIENT, 0)
            beats = 0
            last_look = False
            status = layout.FINISHED
        elif last_look:
            break
        elif copied < chunks:
            if beats == 0:
                since = monotonic_ns()
            status = rest(context, beats, since)
            if status != layout.FINISHED:
                if copied < reduced:
                    note_wait_for_all(context, layout.REDUCED, before + copied + 1)
                elif reduced < staged:
                    note_wait_for_all(context, layout.STAGED, before + reduced + 1)
                else:
                    note_wait_for_all(context, layout.COPIED, before + staged - depth + 1)
                last_look = True  # words that were set before the end of the wait count
            beats += 1
    set_field(context, layout.MINE_STAGED, staged)
    set_field(context, layout.MINE_REDUCED, reduced)
    set_field(context, layout.MINE_COPIED, copied)
    if status == layout.FINISHED:
        set_field(context, layout.CHUNKS, before + chunks)
    return status


_START, _ANNOUNCED, _STAGING_NOW, _REDUCED_NOW = range(4)


def allreduce(request, data, sequence, tag, slot, offset, born):
    """Reduce a tensor at `data` over the ranks of a segment, in place. After PENDING, call it again with the same arguments.

    request: seven words that are the same in all calls of an operation, since every argument costs time: the context, the
    number of bytes, the size of an element, its arithmetic, the op, the divisor, and REDUCES | SPREADS, or one of them: with
    one of them, only this rank's share becomes the result, or only that share is given to the others. sequence, tag: the
    operation's number and the hash of the call, which must be equal on all ranks. slot, offset, born: where the tensor lies in
    this rank's shared allocations; slot is -1 if it lies elsewhere.
    """
    context, nbytes, itemsize, function = load(request), load(request + 8), load(request + 16), load(request + 24)
    op, divisor, doing = load(request + 32), load(request + 40), load(request + 48)
    rank, phase = field(context, layout.RANK), field(context, layout.PHASE)
    if field(context, layout.ABORTED) != 0:
        return layout.STOPPED
    parity = sequence & 1
    header = parity * layout.LINE
    small = nbytes <= field(context, layout.WHOLE_BYTES)
    if phase == _START:
        if small:
            slots = field(context, layout.WHOLE)
            copy(slots + (2 * rank + parity) * field(context, layout.WHOLE_BYTES), data, nbytes)
        mine = line_of(context, rank, header)
        store(mine + 8, slot)
        store(mine + 16, offset)
        store(mine + 24, born)
        store(mine + 32, load(line_of(context, rank, layout.VERSION)))
        store(mine + 40, field(context, layout.FAILED))
        store(mine + 48, tag)
        store(mine, sequence)
        phase = _ANNOUNCED
        set_field(context, layout.PHASE, phase)
    if phase == _ANNOUNCED:
        status = wait_for_headers(context, header, sequence, tag)
        if status != layout.FINISHED:
            return status
        set_field(context, layout.PATIENT, 0)
        _read_headers(context, header)
        if small:
            if doing == layout.SPREADS:
                _gather_whole(context, parity, data, nbytes)
            else:
                _reduce_whole(context, parity, data, nbytes, itemsize, function, op, divisor)
            set_field(context, layout.PHASE, _START)
            return layout.FINISHED_WITH_NEWS if field(context, layout.NEWS) != 0 else layout.FINISHED
        if field(context, layout.DIRECT) == 1:
            status = layout.FINISHED
            if doing == layout.SPREADS:
                _gather_without_copy(context, header, nbytes)
            else:
                status = _reduce_without_copy(context, header, parity, nbytes, itemsize, function, op, divisor, doing)
            if status != layout.FINISHED:
                note_wait_for_all(context, layout.DONE, sequence)
                return status
            store(line_of(context, rank, layout.DONE), sequence)
            phase = _REDUCED_NOW
        else:
            set_field(context, layout.MINE_STAGED, 0)
            set_field(context, layout.MINE_REDUCED, 0)
            set_field(context, layout.MINE_COPIED, 0)
            phase = _STAGING_NOW
        set_field(context, layout.PHASE, phase)
    if phase == _STAGING_NOW:
        status = _allreduce_staged(context, data, nbytes, itemsize, function, op, divisor, doing)
    else:
        status = wait_for_line(context, layout.DONE, sequence)
    if status == layout.FINISHED:
        set_field(context, layout.PHASE, _START)
        return layout.FINISHED_WITH_NEWS if field(context, layout.NEWS) != 0 else layout.FINISHED
    return status
