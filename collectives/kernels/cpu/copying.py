"""Copies of memory that add up what they copy: see gradwire.collectives.kernels.reference.copying."""

from __future__ import annotations

import torch
from llvmlite import ir

from gradwire.collectives.kernels.cpu.calling import addresses, kernel_of
from gradwire.collectives.kernels.cpu.deferred import cgutils, int64, njit, types
from gradwire.collectives.kernels.cpu.intrinsics import I32, I64, copy, instruction, uint8_at, uint64_at
from gradwire.collectives.kernels.cpu.stack import room, settle
from gradwire.collectives.kernels.reference.copying import LINE_BYTES

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
def _add_lines(source, target, count, sums):
    if target != 0:
        _copy_lines(source, target, count, sums)
    else:
        _read_lines(source, target, count, sums)


def _add_pieces(table, count, target, sums):
    pieces, last = uint64_at(table), room()
    for i in range(count):
        source, nbytes = int64(pieces[2 * i]), int64(pieces[2 * i + 1])
        lines = nbytes // LINE_BYTES
        whole = lines * LINE_BYTES
        _add_lines(source, target, lines, sums)
        target += whole if target != 0 else 0
        if nbytes > whole:
            for j in range(LINE_BYTES):
                uint8_at(last)[j] = 0
            copy(last, source + whole, nbytes - whole)
            _add_lines(last, target, 1, sums)
            target += LINE_BYTES if target != 0 else 0
    settle()
    return count


def add_pieces(sums, pieces, target=None):
    table = torch.tensor([(piece.data_ptr(), piece.nbytes) for piece in pieces], dtype=torch.int64, device="cpu")
    kernel_of(_add_pieces).call(table.data_ptr(), len(table), *addresses(target, sums))
