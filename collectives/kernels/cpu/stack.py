"""What kernels on the CPU (Numba) do with memory beyond indexing it: room on the stack, and writing past the caches."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from gradwire.collectives.kernels.cpu.intrinsics import float32_at

PIECE = 1024  # numbers for which there is room

#: Numbers of a result that is written past the caches. An ordinary store first reads the line that it overwrites, which
#: pays only if somebody looks at the line before the caches, of 1 MiB or so for a core, need its place.
_MANY = 1 << 18

_LANES = 16
_ALIGNMENT = 64
_VECTOR = ir.VectorType(ir.FloatType(), _LANES)


@intrinsic
def room(context: Any) -> Any:
    """Return the address of 4 * PIECE bytes and a vector, aligned to vectors, until the function that asks returns.

    (An array gives its memory back after its last mention, whoever still has the address.)
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vectors = cgutils.alloca_once(builder, ir.ArrayType(_VECTOR, PIECE // _LANES + 1))
        vectors.align = _ALIGNMENT
        return builder.ptrtoint(vectors, ir.IntType(64))

    return types.int64(), generate


@intrinsic
def _stream_vector(context: Any, source: Any, target: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, target = (builder.inttoptr(address, _VECTOR.as_pointer()) for address in arguments)
        store = builder.store(builder.load(source, align=4), target, align=_ALIGNMENT)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def settle(context: Any) -> Any:
    """Settle what was streamed before anybody else is told of it: such stores are not ordered with others."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


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
