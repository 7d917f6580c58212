"""Words of memory that several processes read and write, and the beats of a wait for one."""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import int64, types
from numba.core import cgutils

from gradwire.collectives.kernels.cpu.intrinsics import I32, I64, call, instruction

#: What tells a waiting core to leave its power and its sibling's units alone.
_PAUSE = {"x86_64": ("llvm.x86.sse2.pause",), "aarch64": ("llvm.aarch64.hint", ir.Constant(I32, 1))}


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, I64.as_pointer())


@instruction(int64, int64)
def load(builder, address):
    """Return the 64-bit word at an address, with acquire order: what was stored before it was released is seen."""
    return builder.load_atomic(_word(builder, address), "acquire", 8)


@instruction(types.void, int64, int64)
def store(builder, address, value):
    """Set the 64-bit word at an address, with release order: who loads it sees all that was stored before."""
    builder.store_atomic(value, _word(builder, address), "release", 8)


@instruction(types.void)
def pause(builder):
    """Let one beat of a spinning wait pass."""
    name, *operands = _PAUSE.get(platform.machine(), ("llvm.donothing",))
    call(builder, name, ir.VoidType(), *operands)


@instruction(types.void)
def give_way(builder):
    """Offer the core to others: sched_yield."""
    call(builder, "sched_yield", I32)


@instruction(types.void, int64)
def sleep_us(builder, microseconds):
    """Sleep for so long: usleep."""
    call(builder, "usleep", I32, builder.trunc(microseconds, I32))


@instruction(int64)
def monotonic_ns(builder):
    """Return what the clock of time.monotonic() says, in nanoseconds."""
    time = cgutils.alloca_once(builder, ir.ArrayType(I64, 2))
    call(builder, "clock_gettime", I32, ir.Constant(I32, 1), time)
    words = builder.load(time)
    seconds = builder.mul(builder.extract_value(words, 0), ir.Constant(I64, 1_000_000_000))
    return builder.add(seconds, builder.extract_value(words, 1))
