"""Words of memory that several processes read and write, and the beats of a wait for one."""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)


#: What a waiting core is told, so that it leaves its power and its sibling's units alone.
_PAUSE = {"x86_64": ("llvm.x86.sse2.pause", [], []), "aarch64": ("llvm.aarch64.hint", [_I32], [ir.Constant(_I32, 1)])}


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _I64.as_pointer())


@intrinsic
def load(context: Any, address: Any) -> Any:
    """Return the 64-bit word at an address, with acquire order: what was stored before it was released is seen."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_word(builder, arguments[0]), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def store(context: Any, address: Any, value: Any) -> Any:
    """Set the 64-bit word at an address, with release order: who loads it sees all that was stored before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], _word(builder, arguments[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def pause(context: Any) -> Any:
    """Let one beat of a spinning wait pass."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        name, kinds, operands = _PAUSE.get(platform.machine(), ("llvm.donothing", [], []))
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), kinds), name)
        builder.call(function, operands)
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def give_way(context: Any) -> Any:
    """Offer the core to others: sched_yield."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_I32, []), "sched_yield")
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def sleep_us(context: Any, microseconds: Any) -> Any:
    """Sleep for so long: usleep."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_I32, [_I32]), "usleep")
        builder.call(function, [builder.trunc(arguments[0], _I32)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def monotonic_ns(context: Any) -> Any:
    """Return what the clock of time.monotonic() says, in nanoseconds."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        time = cgutils.alloca_once(builder, ir.ArrayType(_I64, 2))
        kind = ir.FunctionType(_I32, [_I32, time.type])
        function = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        builder.call(function, [ir.Constant(_I32, 1), time])
        words = builder.load(time)
        seconds = builder.mul(builder.extract_value(words, 0), ir.Constant(_I64, 1_000_000_000))
        return builder.add(seconds, builder.extract_value(words, 1))

    return types.int64(), generate
