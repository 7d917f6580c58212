"""All that is compiled for the CPU (Numba): ordered memory access, reductions, and the loops that move data between processes.

Addresses are plain integers, so that one compiled signature serves every dtype.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import torch
from llvmlite import ir
from numba import cfunc, float32, float64, int8, int16, int32, int64, njit, types, uint8, uint16, uint32
from numba.core import cgutils
from numba.extending import intrinsic

from collectives.kernels.compiling import compiled

_I8 = ir.IntType(8)
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)

#: What a waiting core is told, so that it leaves its power and its sibling's units alone.
_PAUSE = {"x86_64": ("llvm.x86.sse2.pause", [], []), "aarch64": ("llvm.aarch64.hint", [_I32], [ir.Constant(_I32, 1)])}


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _I64.as_pointer())


@intrinsic
def load(context: Any, address: Any) -> Any:
    """The 64-bit word at an address, with acquire order: what was stored before it was released is seen."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_word(builder, arguments[0]), "acquire", 8, typ=_I64)

    return types.int64(types.int64), generate


@intrinsic
def store(context: Any, address: Any, value: Any) -> Any:
    """Set the 64-bit word at an address, with release order: who loads it sees all that was stored before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], _word(builder, arguments[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def copy(context: Any, destination: Any, source: Any, nbytes: Any) -> Any:
    """memcpy."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointers = [builder.inttoptr(argument, _I8.as_pointer()) for argument in arguments[:2]]
        cgutils.raw_memcpy(builder, pointers[0], pointers[1], arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def combine(context: Any, function: Any, destination: Any, source: Any, count: Any, op: Any, divisor: Any) -> Any:
    """Call one of the functions under "Arithmetic" by its address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_I64] * 5)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


@intrinsic
def pause(context: Any) -> Any:
    """One beat of a spinning wait."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        name, kinds, operands = _PAUSE.get(platform.machine(), ("llvm.donothing", [], []))
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), kinds), name)
        builder.call(function, operands)
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def give_way(context: Any) -> Any:
    """sched_yield."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_I32, []), "sched_yield")
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def sleep_us(context: Any, microseconds: Any) -> Any:
    """usleep."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_I32, [_I32]), "usleep")
        builder.call(function, [builder.trunc(arguments[0], _I32)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def monotonic_ns(context: Any) -> Any:
    """The clock of time.monotonic(), in nanoseconds."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        time = cgutils.alloca_once(builder, ir.ArrayType(_I64, 2))
        kind = ir.FunctionType(_I32, [_I32, time.type])
        function = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        builder.call(function, [ir.Constant(_I32, 1), time])
        words = builder.load(time)
        seconds = builder.mul(builder.extract_value(words, 0), ir.Constant(_I64, 1_000_000_000))
        return builder.add(seconds, builder.extract_value(words, 1))

    return types.int64(), generate


@intrinsic
def divide_toward_zero(context: Any, number: Any, divisor: Any) -> Any:
    """The quotient of two int64, as C has it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.sdiv(arguments[0], arguments[1])

    return types.int64(types.int64, types.int64), generate


@intrinsic
def bits_of_float(context: Any, number: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _I32)

    return types.uint32(types.float32), generate


@intrinsic
def float_of_bits(context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def half_to_float(context: Any, bits: Any) -> Any:
    """The number that 16 bits of IEEE half precision stand for."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


@intrinsic
def float_to_half(context: Any, number: Any) -> Any:
    """IEEE half precision, rounded to nearest even."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), _I16)

    return types.uint16(types.float32), generate


# Arithmetic: destination[i] = destination[i] (op) source[i], or destination[i] / divisor. C functions, one per dtype, called by
# address, so that what moves the data need not be compiled for every dtype. 16-bit floats are widened to float32 for each
# operation and rounded to nearest even after it, as torch does.

SUM, PRODUCT, MIN, MAX, DIVIDE = range(5)
OPS = {"sum": SUM, "average": SUM, "product": PRODUCT, "min": MIN, "max": MAX}


@njit
def _least(a, b):
    return a if a < b or a != a else b


@njit
def _greatest(a, b):
    return a if a > b or a != a else b


@njit
def _bfloat16_to_float(bits):
    return float_of_bits(uint32(bits) << uint32(16))


@njit
def _float_to_bfloat16(number):
    bits = bits_of_float(number)
    rounded = (bits + uint32(0x7FFF) + ((bits >> uint32(16)) & uint32(1))) >> uint32(16)
    return uint16(0x7FC0) if number != number else uint16(rounded)


def _combine_integers(destination, source, count, op, divisor):
    if op == SUM:
        for i in range(count):
            destination[i] += source[i]
    elif op == PRODUCT:
        for i in range(count):
            destination[i] *= source[i]
    elif op == MIN:
        for i in range(count):
            destination[i] = _least(destination[i], source[i])
    elif op == MAX:
        for i in range(count):
            destination[i] = _greatest(destination[i], source[i])
    else:
        for i in range(count):
            destination[i] = divide_toward_zero(int64(destination[i]), divisor)


def _combine_float32(destination, source, count, op, divisor):
    if op == SUM:
        for i in range(count):
            destination[i] += source[i]
    elif op == PRODUCT:
        for i in range(count):
            destination[i] *= source[i]
    elif op == MIN:
        for i in range(count):
            destination[i] = _least(destination[i], source[i])
    elif op == MAX:
        for i in range(count):
            destination[i] = _greatest(destination[i], source[i])
    else:
        by = float32(divisor)
        for i in range(count):
            destination[i] /= by


def _combine_float64(destination, source, count, op, divisor):
    if op == SUM:
        for i in range(count):
            destination[i] += source[i]
    elif op == PRODUCT:
        for i in range(count):
            destination[i] *= source[i]
    elif op == MIN:
        for i in range(count):
            destination[i] = _least(destination[i], source[i])
    elif op == MAX:
        for i in range(count):
            destination[i] = _greatest(destination[i], source[i])
    else:
        by = float64(divisor)
        for i in range(count):
            destination[i] /= by


def _combine_bfloat16(destination, source, count, op, divisor):
    if op == SUM:
        for i in range(count):
            destination[i] = _float_to_bfloat16(_bfloat16_to_float(destination[i]) + _bfloat16_to_float(source[i]))
    elif op == PRODUCT:
        for i in range(count):
            destination[i] = _float_to_bfloat16(_bfloat16_to_float(destination[i]) * _bfloat16_to_float(source[i]))
    elif op == MIN:
        for i in range(count):
            least = _least(_bfloat16_to_float(destination[i]), _bfloat16_to_float(source[i]))
            destination[i] = _float_to_bfloat16(least)
    elif op == MAX:
        for i in range(count):
            greatest = _greatest(_bfloat16_to_float(destination[i]), _bfloat16_to_float(source[i]))
            destination[i] = _float_to_bfloat16(greatest)
    else:
        by = float32(divisor)
        for i in range(count):
            destination[i] = _float_to_bfloat16(_bfloat16_to_float(destination[i]) / by)


def _combine_float16(destination, source, count, op, divisor):
    if op == SUM:
        for i in range(count):
            destination[i] = float_to_half(half_to_float(destination[i]) + half_to_float(source[i]))
    elif op == PRODUCT:
        for i in range(count):
            destination[i] = float_to_half(half_to_float(destination[i]) * half_to_float(source[i]))
    elif op == MIN:
        for i in range(count):
            destination[i] = float_to_half(_least(half_to_float(destination[i]), half_to_float(source[i])))
    elif op == MAX:
        for i in range(count):
            destination[i] = float_to_half(_greatest(half_to_float(destination[i]), half_to_float(source[i])))
    else:
        by = float32(divisor)
        for i in range(count):
            destination[i] = float_to_half(half_to_float(destination[i]) / by)


_ARITHMETIC: dict[torch.dtype, tuple[Callable[..., None], Any]] = {
    torch.float16: (_combine_float16, uint16),
    torch.bfloat16: (_combine_bfloat16, uint16),
    torch.float32: (_combine_float32, float32),
    torch.float64: (_combine_float64, float64),
    torch.uint8: (_combine_integers, uint8),
    torch.int8: (_combine_integers, int8),
    torch.int16: (_combine_integers, int16),
    torch.int32: (_combine_integers, int32),
    torch.int64: (_combine_integers, int64),
}


def arithmetic(dtype: torch.dtype) -> Any:
    """The C function for a dtype, compiled now or loaded from the cache: (destination, source, count, op, divisor)."""
    function, memory = _ARITHMETIC[dtype]
    pointer = types.CPointer(memory)
    signature = types.void(pointer, pointer, int64, int64, int64)
    return compiled(cfunc, signature, error_model="numpy")(function)


# What the kernels below share with the process that calls them: a block of 64-bit fields, private to the process.

(
    RANK,  # of this process among those of the segment
    SIZE,
    SPINS,  # beats that a wait spins before it gives way
    YIELD_NS,  # how long a wait gives way before it sleeps
    BLOCK,  # bytes that are reduced at once, so that they stay in the first-level cache
    ABORTED,  # 1 when this process is to wait no more
    PATIENT,  # 1 when the last wait has been long: sleep at once
    RANKS,  # address of the ranks' lines, RANK_BYTES each
    WHOLE,  # address of two slots a rank for small messages
    WHOLE_BYTES,  # of a slot
    STAGING,  # address of DEPTH * SIZE * SIZE chunks
    CHUNK_BYTES,
    DEPTH,
    SLOTS,  # shared allocations that a rank may have
    BASES,  # address of SIZE * SLOTS words: where this process has mapped them, 0 where it has not
    KNOWN,  # address of SIZE words: the version of each rank's allocations up to which this process has mapped them
    ANNOUNCED,  # address of SIZE words: the version of each rank's allocations in the last operation
    FAILED,  # 1 when this process could not map one
    CHUNKS,  # staged before this operation
    PHASE,  # of the operation that was interrupted, 0 for none
    MINE_STAGED,
    MINE_REDUCED,
    MINE_COPIED,
    DIRECT,  # 1 when the operation goes without a copy
    PEER,  # whom the last wait for a message was for; -1 where it was for all whose word in WAIT_LINE was below WAIT_LEAST
    WAIT_LINE,
    WAIT_LEAST,
    NEWS,  # 1 when a rank has announced a version that is not KNOWN, in this operation
    FIELDS,
) = range(29)

# A rank's lines in the segment, each apart from the others, so that no two processes write to one cache line.
LINE = 128
HEADERS = 0  # two, for operations of even and odd number
DONE, STAGED, REDUCED, COPIED, STATE, VERSION = (line * LINE for line in range(2, 8))
RANK_BYTES = 8 * LINE

# What a kernel returns.
FINISHED, FINISHED_WITH_NEWS, PENDING, STOPPED, DISAGREED = range(5)

_SLICE_NS = 50_000_000
_SLEEP_US = 100
_LONG_SLEEP_US = 500


@njit
def _field(context, index):
    return load(context + 8 * index)


@njit
def _set(context, index, value):
    store(context + 8 * index, value)


@njit
def _line(context, rank, line):
    return _field(context, RANKS) + rank * RANK_BYTES + line


@njit
def _rest(context, beats, since):
    """One beat of a wait that began at `since`: spin, then give way, then sleep. What a kernel must return, or FINISHED."""
    if beats < _field(context, SPINS):
        pause()
        return FINISHED
    if _field(context, ABORTED) != 0:
        return STOPPED
    waited = monotonic_ns() - since
    if waited > _SLICE_NS:
        return PENDING
    if _field(context, PATIENT) != 0:
        sleep_us(_LONG_SLEEP_US)
    elif waited < _field(context, YIELD_NS):
        give_way()
    else:
        sleep_us(_SLEEP_US)
    return FINISHED


@compiled(njit, types.void(int64, int64))
def publish(address, value):
    """Set a word at which other processes look, after all that was written before."""
    store(address, value)


@njit
def _waits_for_all(context, line, least):
    _set(context, PEER, -1)
    _set(context, WAIT_LINE, line)
    _set(context, WAIT_LEAST, least)


@njit
def _wait_for_headers(context, header, sequence, tag):
    """Until every rank has written its header of this operation."""
    for peer in range(_field(context, SIZE)):
        theirs = _line(context, peer, header)
        beats = 0
        since = int64(0)
        while True:
            seen = load(theirs)
            if seen == sequence and load(theirs + 48) == tag:
                break
            if seen >= sequence:
                _set(context, PEER, peer)
                return DISAGREED
            if beats == 0:
                since = monotonic_ns()
            status = _rest(context, beats, since)
            if status != FINISHED and load(theirs) == seen:  # what came before the end of the wait counts
                _waits_for_all(context, header, sequence)
                return status
            beats += 1
    return FINISHED


@njit
def _wait_for_line(context, line, least):
    """Until the word in every rank's line is at least so much."""
    for peer in range(_field(context, SIZE)):
        theirs = _line(context, peer, line)
        beats = 0
        since = int64(0)
        while load(theirs) < least:
            if beats == 0:
                since = monotonic_ns()
            status = _rest(context, beats, since)
            if status != FINISHED and load(theirs) < least:
                _waits_for_all(context, line, least)
                return status
            beats += 1
    return FINISHED


@njit
def _least_of(context, line):
    """The least word in the ranks' lines."""
    least = load(_line(context, 0, line))
    for peer in range(1, _field(context, SIZE)):
        least = min(least, load(_line(context, peer, line)))
    return least


@njit
def _read_headers(context, header):
    """Decide whether the operation goes without a copy, alike on all ranks: every tensor lies in an allocation that had been
    announced in an earlier operation, and no rank failed to map one."""
    direct = 1
    news = 0
    for peer in range(_field(context, SIZE)):
        theirs = _line(context, peer, header)
        known = _field(context, KNOWN) + 8 * peer
        slot, born, version, failed = load(theirs + 8), load(theirs + 24), load(theirs + 32), load(theirs + 40)
        if slot < 0 or failed != 0 or born > load(known):
            direct = 0
        if version != load(known):
            news = 1
        store(_field(context, ANNOUNCED) + 8 * peer, version)
    _set(context, DIRECT, direct)
    _set(context, NEWS, news)


@njit
def _reduce_without_copy(context, header, nbytes, itemsize, function, op, divisor):
    """Reduce this rank's span of all ranks' buffers in rank order, and write the result to all."""
    rank, size, block = _field(context, RANK), _field(context, SIZE), _field(context, BLOCK)
    share = (nbytes + size * LINE - 1) // (size * LINE) * LINE
    stop = min(nbytes, (rank + 1) * share)
    position = rank * share
    first = _address(context, 0, header)
    while position < stop:
        length = min(block, stop - position)
        count = length // itemsize
        for peer in range(1, size):
            combine(function, first + position, _address(context, peer, header) + position, count, op, divisor)
        if divisor != 1:
            combine(function, first + position, first + position, count, DIVIDE, divisor)
        for peer in range(1, size):
            copy(_address(context, peer, header) + position, first + position, length)
        position += length


@njit
def _address(context, rank, header):
    """Where this process sees the tensor that a rank announced."""
    theirs = _line(context, rank, header)
    slot = rank * _field(context, SLOTS) + load(theirs + 8)
    return load(_field(context, BASES) + 8 * slot) + load(theirs + 16)


@njit
def _reduce_whole(context, parity, data, nbytes, itemsize, function, op, divisor):
    """Every rank reduces all of a small message by itself."""
    rank, size, slot_bytes = _field(context, RANK), _field(context, SIZE), _field(context, WHOLE_BYTES)
    slots = _field(context, WHOLE) + parity * slot_bytes
    count = nbytes // itemsize
    if rank != 0:
        copy(data, slots, nbytes)
    for peer in range(1, size):
        combine(function, data, slots + 2 * peer * slot_bytes, count, op, divisor)
    if divisor != 1:
        combine(function, data, data, count, DIVIDE, divisor)


@njit
def _chunk(context, owner, number, sub):
    """Where the contribution of rank `sub` to a chunk of the owner's span is staged."""
    size = _field(context, SIZE)
    place = (owner * _field(context, DEPTH) + number % _field(context, DEPTH)) * size + sub
    return _field(context, STAGING) + place * _field(context, CHUNK_BYTES)


@njit
def _allreduce_staged(context, data, nbytes, itemsize, function, op, divisor):
    """Chunk by chunk: hand the others their part of this rank's tensor, reduce the own part, take the results.

    The result of a chunk is left in rank 0's place of it (the owner 0 uses rank 1's).
    """
    rank, size, depth = _field(context, RANK), _field(context, SIZE), _field(context, DEPTH)
    chunk_bytes, before, block = _field(context, CHUNK_BYTES), _field(context, CHUNKS), _field(context, BLOCK)
    share = (nbytes + size * LINE - 1) // (size * LINE) * LINE
    chunks = (share + chunk_bytes - 1) // chunk_bytes
    staged, reduced, copied = _field(context, MINE_STAGED), _field(context, MINE_REDUCED), _field(context, MINE_COPIED)
    beats = 0
    since = int64(0)
    status = FINISHED
    last_look = False
    while copied < chunks:
        moved = False
        if copied < reduced and _least_of(context, REDUCED) > before + copied:
            for step in range(1, size):
                owner = (rank + step) % size
                start = owner * share + copied * chunk_bytes
                length = min(chunk_bytes, min(nbytes, (owner + 1) * share) - start)
                if length > 0:
                    copy(data + start, _chunk(context, owner, before + copied, 1 if owner == 0 else 0), length)
            copied += 1
            store(_line(context, rank, COPIED), before + copied)
            moved = True
        if reduced < staged and _least_of(context, STAGED) > before + reduced:
            start = rank * share + reduced * chunk_bytes
            stop = min(min(nbytes, (rank + 1) * share), start + chunk_bytes)
            offset = 0
            while start < stop:
                length = min(block, stop - start)
                count = length // itemsize
                own = data + start
                number = before + reduced
                if rank == 0:
                    result = _chunk(context, rank, number, 1) + offset
                    for peer in range(1, size):
                        combine(function, own, _chunk(context, rank, number, peer) + offset, count, op, divisor)
                    if divisor != 1:
                        combine(function, own, own, count, DIVIDE, divisor)
                    copy(result, own, length)
                else:
                    result = _chunk(context, rank, number, 0) + offset
                    for peer in range(1, size):
                        theirs = own if peer == rank else _chunk(context, rank, number, peer) + offset
                        combine(function, result, theirs, count, op, divisor)
                    if divisor != 1:
                        combine(function, result, result, count, DIVIDE, divisor)
                    copy(own, result, length)
                start += length
                offset += length
            reduced += 1
            store(_line(context, rank, REDUCED), before + reduced)
            moved = True
        if staged < chunks and (staged < depth or _least_of(context, COPIED) > before + staged - depth):
            for step in range(1, size):
                owner = (rank + step) % size
                start = owner * share + staged * chunk_bytes
                length = min(chunk_bytes, min(nbytes, (owner + 1) * share) - start)
                if length > 0:
                    copy(_chunk(context, owner, before + staged, rank), data + start, length)
            staged += 1
            store(_line(context, rank, STAGED), before + staged)
            moved = True
        if moved:
            _set(context, PATIENT, 0)
            beats = 0
            last_look = False
            status = FINISHED
        elif last_look:
            break
        elif copied < chunks:
            if beats == 0:
                since = monotonic_ns()
            status = _rest(context, beats, since)
            if status != FINISHED:
                if copied < reduced:
                    _waits_for_all(context, REDUCED, before + copied + 1)
                elif reduced < staged:
                    _waits_for_all(context, STAGED, before + reduced + 1)
                else:
                    _waits_for_all(context, COPIED, before + staged - depth + 1)
                last_look = True  # what came before the end of the wait counts
            beats += 1
    _set(context, MINE_STAGED, staged)
    _set(context, MINE_REDUCED, reduced)
    _set(context, MINE_COPIED, copied)
    if status == FINISHED:
        _set(context, CHUNKS, before + chunks)
    return status


_START, _ANNOUNCED, _STAGING_NOW, _REDUCED_NOW = range(4)


@compiled(njit, int64(*[int64] * 12), nogil=True)
def allreduce(context, data, nbytes, itemsize, function, op, divisor, sequence, tag, slot, offset, born):
    """Reduce `nbytes` at `data` over the ranks of a segment, in place. PENDING: call again with the same arguments.

    sequence, tag: what all ranks must agree on, the operation's number and what is called. slot, offset, born: where the tensor
    lies in this rank's shared allocations; slot is -1 for one that does not.
    """
    rank, phase = _field(context, RANK), _field(context, PHASE)
    if _field(context, ABORTED) != 0:
        return STOPPED
    parity = sequence & 1
    header = parity * LINE
    small = nbytes <= _field(context, WHOLE_BYTES)
    if phase == _START:
        if small:
            slots = _field(context, WHOLE)
            copy(slots + (2 * rank + parity) * _field(context, WHOLE_BYTES), data, nbytes)
        mine = _line(context, rank, header)
        store(mine + 8, slot)
        store(mine + 16, offset)
        store(mine + 24, born)
        store(mine + 32, load(_line(context, rank, VERSION)))
        store(mine + 40, _field(context, FAILED))
        store(mine + 48, tag)
        store(mine, sequence)
        phase = _ANNOUNCED
        _set(context, PHASE, phase)
    if phase == _ANNOUNCED:
        status = _wait_for_headers(context, header, sequence, tag)
        if status != FINISHED:
            return status
        _set(context, PATIENT, 0)
        _read_headers(context, header)
        if small:
            _reduce_whole(context, parity, data, nbytes, itemsize, function, op, divisor)
            _set(context, PHASE, _START)
            return FINISHED_WITH_NEWS if _field(context, NEWS) != 0 else FINISHED
        if _field(context, DIRECT) == 1:
            _reduce_without_copy(context, header, nbytes, itemsize, function, op, divisor)
            store(_line(context, rank, DONE), sequence)
            phase = _REDUCED_NOW
        else:
            _set(context, MINE_STAGED, 0)
            _set(context, MINE_REDUCED, 0)
            _set(context, MINE_COPIED, 0)
            phase = _STAGING_NOW
        _set(context, PHASE, phase)
    if phase == _STAGING_NOW:
        status = _allreduce_staged(context, data, nbytes, itemsize, function, op, divisor)
    else:
        status = _wait_for_line(context, DONE, sequence)
    if status == FINISHED:
        _set(context, PHASE, _START)
        return FINISHED_WITH_NEWS if _field(context, NEWS) != 0 else FINISHED
    return status


# Messages: a ring of bytes per ordered pair of ranks, with one writer and one reader. A message is a line with its tag and
# length, then its bytes, filled up to a whole line. What a process has posted is a table of rows, in the order posted.

RING_LINE = 64
HEAD, TAIL, RING_BYTES = 0, LINE, 2 * LINE  # of a ring: bytes written so far, bytes read so far, where its data begins
(ROW_SENDS, ROW_PEER, ROW_TAG, ROW_ADDRESS, ROW_NBYTES, ROW_MOVED, ROW_DONE, ROW_START, ROW_FIELDS) = range(9)
_UNSTARTED = -1


@njit
def _copy_in(ring, capacity, position, source, length):
    start = position % capacity
    before_end = min(length, capacity - start)
    copy(ring + RING_BYTES + start, source, before_end)
    if length > before_end:
        copy(ring + RING_BYTES, source + before_end, length - before_end)


@njit
def _copy_out(ring, capacity, position, destination, length):
    start = position % capacity
    before_end = min(length, capacity - start)
    copy(destination, ring + RING_BYTES + start, before_end)
    if length > before_end:
        copy(destination + before_end, ring + RING_BYTES, length - before_end)


@njit
def _send_some(ring, capacity, row):
    """Write what fits of a message, at most a quarter of the ring, so that the reader can begin. True if any.

    A message is not done before its reader has found a row for it: who calls something else than the others must not get away.
    """
    head = load(ring + HEAD)
    if load(row + 8 * ROW_MOVED) == load(row + 8 * ROW_NBYTES):
        taken = load(ring + TAIL) > load(row + 8 * ROW_START)
        if taken:
            store(row + 8 * ROW_DONE, 1)
        return taken
    free = capacity - (head - load(ring + TAIL))
    if free < RING_LINE:
        return False
    moved, nbytes = load(row + 8 * ROW_MOVED), load(row + 8 * ROW_NBYTES)
    if moved == _UNSTARTED:
        place = ring + RING_BYTES + head % capacity
        store(place, load(row + 8 * ROW_TAG))
        store(place + 8, nbytes)
        store(row + 8 * ROW_START, head)
        head += RING_LINE
        free -= RING_LINE
        moved = 0
    length = min(min(free, capacity // 4), nbytes - moved)
    if length > 0:
        _copy_in(ring, capacity, head, load(row + 8 * ROW_ADDRESS) + moved, length)
        head += (length + RING_LINE - 1) // RING_LINE * RING_LINE
        moved += length
    store(ring + HEAD, head)
    store(row + 8 * ROW_MOVED, moved)
    return True


@njit
def _receive_some(ring, capacity, row):
    """Read what is there of the message that a row is receiving. True if any."""
    tail = load(ring + TAIL)
    moved, nbytes = load(row + 8 * ROW_MOVED), load(row + 8 * ROW_NBYTES)
    length = min(min(load(ring + HEAD) - tail, capacity // 4), nbytes - moved)
    if length > 0:
        _copy_out(ring, capacity, tail, load(row + 8 * ROW_ADDRESS) + moved, length)
        moved += length
        store(ring + TAIL, tail + (length + RING_LINE - 1) // RING_LINE * RING_LINE)
        store(row + 8 * ROW_MOVED, moved)
    if moved == nbytes:
        store(row + 8 * ROW_DONE, 1)
    return length > 0


@njit
def _move_some(context, rings, capacity, table, first, count, blocked):
    """Advance every message that can be. blocked: 2 * SIZE words. How many moved, or -1 - peer on lengths that differ."""
    rank, size = _field(context, RANK), _field(context, SIZE)
    stride = RING_BYTES + capacity
    for index in range(2 * size):
        store(blocked + 8 * index, 0)
    for index in range(first, count):
        row = table + 8 * ROW_FIELDS * index
        if load(row + 8 * ROW_SENDS) == 0 and load(row + 8 * ROW_MOVED) >= 0 and load(row + 8 * ROW_DONE) == 0:
            store(blocked + 16 * load(row + 8 * ROW_PEER), 1)  # what comes next in that ring is not a beginning
    moves = 0
    for index in range(first, count):
        row = table + 8 * ROW_FIELDS * index
        if load(row + 8 * ROW_DONE) != 0:
            continue
        peer, sends = load(row + 8 * ROW_PEER), load(row + 8 * ROW_SENDS)
        turn = blocked + 8 * (2 * peer + sends)
        if sends == 1:
            if load(turn) == 0:
                moves += _send_some(rings + (rank * size + peer) * stride, capacity, row)
                if load(row + 8 * ROW_MOVED) < load(row + 8 * ROW_NBYTES):
                    store(turn, 1)
            continue
        ring = rings + (peer * size + rank) * stride
        if load(row + 8 * ROW_MOVED) == _UNSTARTED:
            tail = load(ring + TAIL)
            if load(turn) != 0:
                continue
            if load(ring + HEAD) == tail:
                store(turn, 1)  # what comes from now on is for this row before later ones
                continue
            place = ring + RING_BYTES + tail % capacity
            if load(place) != load(row + 8 * ROW_TAG):
                continue
            if load(place + 8) != load(row + 8 * ROW_NBYTES):
                return -1 - peer
            store(ring + TAIL, tail + RING_LINE)
            store(row + 8 * ROW_MOVED, 0)
        moves += _receive_some(ring, capacity, row)
        store(turn, 1)  # one message a pass: the next one may be for a row that was passed over
    return moves


@compiled(njit, int64(*[int64] * 8), nogil=True)
def move(context, rings, capacity, table, first, count, blocked, wanted):
    """Move the messages in rows [first, count) until row `wanted` is done; with wanted = -1 only what can be moved at once."""
    if _field(context, ABORTED) != 0:
        return STOPPED
    beats = 0
    since = int64(0)
    while True:
        moves = _move_some(context, rings, capacity, table, first, count, blocked)
        if moves < 0:
            _set(context, PEER, -1 - moves)
            return DISAGREED
        if wanted < 0 or load(table + 8 * ROW_FIELDS * wanted + 8 * ROW_DONE) != 0:
            return FINISHED
        if moves > 0:
            _set(context, PATIENT, 0)
            beats = 0
            continue
        if beats == 0:
            since = monotonic_ns()
            _set(context, PEER, load(table + 8 * ROW_FIELDS * wanted + 8 * ROW_PEER))
        status = _rest(context, beats, since)
        if status != FINISHED:
            # What came before the end of the wait counts.
            if _move_some(context, rings, capacity, table, first, count, blocked) == 0:
                return status
            beats = -1
        beats += 1
