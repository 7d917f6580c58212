"""A 64-bit hash of memory, and copies of memory that add up what they copy: see reference.memory."""

from __future__ import annotations

from llvmlite import ir
from numba import int64, njit, types, uint64
from numba.core import cgutils

from gradwire.collectives.kernels.cpu.intrinsics import I32, I64, copy, instruction, uint8_at, uint64_at
from gradwire.collectives.kernels.cpu.scratch import room, settle
from gradwire.collectives.kernels.layout import LINE_BYTES

_LINE = ir.VectorType(I64, LINE_BYTES // 8)


def _lines(*, copies):
    def add(builder, source, target, count, sums):
        """Add lines to the sums; copies: and store them, past the caches, since nobody reads them again soon."""

        def line_at(address, offset):
            return builder.inttoptr(builder.add(address, offset), _LINE.as_pointer())

        places = [line_at(sums, ir.Constant(I64, offset)) for offset in (0, LINE_BYTES)]
        first, second = (cgutils.alloca_once_value(builder, builder.load(place, align=8)) for place in places)
        with cgutils.for_range(builder, count) as each:
            offset = builder.mul(each.index, ir.Constant(I64, LINE_BYTES))
            line = builder.load(line_at(source, offset), align=1)
            if copies:
                store = builder.store(line, line_at(target, offset), align=LINE_BYTES)
                store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(I32, 1)]))
            builder.store(builder.add(builder.load(first), line), first)
            builder.store(builder.add(builder.load(second), builder.load(first)), second)
        for place, kept in zip(places, (first, second), strict=True):
            builder.store(builder.load(kept), place, align=8)

    return instruction(types.void, *[int64] * 4)(add)


_copy_lines, _read_lines = _lines(copies=True), _lines(copies=False)


@njit
def add_lines(source, target, count, sums):
    """Add lines of memory to the two lines of sums; copy them, too, unless the target is 0."""
    if target != 0:
        _copy_lines(source, target, count, sums)
    else:
        _read_lines(source, target, count, sums)


def add_pieces(table, count, target, sums):
    pieces, last = uint64_at(table), room()
    for i in range(count):
        source, nbytes = int64(pieces[2 * i]), int64(pieces[2 * i + 1])
        lines = nbytes // LINE_BYTES
        whole = lines * LINE_BYTES
        add_lines(source, target, lines, sums)
        target += whole if target != 0 else 0
        if nbytes > whole:
            for j in range(LINE_BYTES):
                uint8_at(last)[j] = 0
            copy(last, source + whole, nbytes - whole)
            add_lines(last, target, 1, sums)
            target += LINE_BYTES if target != 0 else 0
    settle()
    return count


def hash_words(words, count, place):
    w = uint64_at(words)
    total = uint64(0)
    for i in range(count):
        x = w[i] ^ (uint64(i + place) * uint64(0x9E3779B97F4A7C15))
        x = (x ^ (x >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> uint64(27))) * uint64(0x94D049BB133111EB)
        total += x ^ (x >> uint64(31))
    return total
