"""Room on the stack, and stores that bypass the caches, for kernels on the CPU (Numba)."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import int64, njit, types, uint8
from numba.core import cgutils

from gradwire.collectives.kernels.cpu.intrinsics import FLOAT, I32, I64, float32_at, instruction, uint8_at

PIECE = 1024  # numbers for which there is room

#: From this many numbers on, a result is written past the caches. An ordinary store first reads the line that it overwrites,
#: which pays only if the line is read again before the caches, of about 1 MiB a core, evict it.
_MANY = 1 << 18

_LANES = 16
_ALIGNMENT = 64
_VECTOR = ir.VectorType(FLOAT, _LANES)


def room_for(nbytes: int) -> Any:
    """Return an intrinsic without arguments, which returns the address of so many bytes and a vector, aligned to vectors, valid
    until the calling function returns."""

    @instruction(int64)
    def room(builder):
        vectors = cgutils.alloca_once(builder, ir.ArrayType(_VECTOR, nbytes // _ALIGNMENT + 1))
        vectors.align = _ALIGNMENT
        return builder.ptrtoint(vectors, I64)

    return room


room = room_for(4 * PIECE)


@instruction(types.void, int64, int64)
def _stream_vector(builder, source, target):
    source, target = (builder.inttoptr(address, _VECTOR.as_pointer()) for address in (source, target))
    store = builder.store(builder.load(source, align=4), target, align=_ALIGNMENT)
    store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(I32, 1)]))


@instruction(types.void)
def settle(builder):
    """Make streamed stores visible before any later store: the processor does not order them otherwise."""
    builder.fence("seq_cst")


@njit
def streams(target, numel):
    """Return whether a result of so many float32 at an address is to be streamed."""
    return numel >= _MANY and target % _ALIGNMENT == 0


@njit
def stream(source, target, numel):
    """Copy float32 past the caches. target: an address that _ALIGNMENT divides."""
    whole = numel // _LANES * _LANES
    for i in range(0, whole, _LANES):
        _stream_vector(source + 4 * i, target + 4 * i)
    for i in range(whole, numel):
        float32_at(target)[i] = float32_at(source)[i]


@njit
def clear_bytes(address, nbytes):
    """Set bytes to zero."""
    p = uint8_at(address)
    for i in range(nbytes):
        p[i] = uint8(0)


@njit
def clear(out, n):
    """Set numbers to zero, many of them past the caches."""
    zeros = room()
    if not streams(out, n):
        clear_bytes(out, 4 * n)
        return
    for i in range(PIECE):
        float32_at(zeros)[i] = 0
    for begin in range(0, n, PIECE):
        stream(zeros, out + 4 * begin, min(PIECE, n - begin))
    settle()
