"""Operations that many kernels need and Numba lacks: numbers at an address, their bits, vectors, and floats of 16 bits.

Addresses are plain integers, so that one compiled signature serves every dtype.
"""

from __future__ import annotations

import inspect
import platform
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import float32, float64, int8, int16, int32, int64, njit, types, uint8, uint16, uint64
from numba.core import cgutils
from numba.extending import intrinsic

I8, I16, I32, I64, FLOAT, HALF = *(ir.IntType(bits) for bits in (8, 16, 32, 64)), ir.FloatType(), ir.HalfType()


def instruction(result: Any, *kinds: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return an intrinsic for kernels, from a function (builder, *arguments) that generates the LLVM code of the call.

    result, kinds: Numba's types of the result and the arguments. A function that returns None is for types.void.
    """

    def finish(generate: Callable[..., Any]) -> Any:
        def typed(context: Any, *_: Any) -> Any:
            def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
                value = generate(builder, *arguments)
                return context.get_dummy_value() if value is None else value

            return result(*kinds), code

        builder, *parameters = inspect.signature(generate).parameters.values()
        typed.__name__, typed.__doc__ = generate.__name__, generate.__doc__
        typed.__signature__ = inspect.Signature([builder.replace(name="context"), *parameters])  # type: ignore[attr-defined]
        return intrinsic(typed)

    return finish


def call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Generate a call of a function of C or LLVM by its name."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _numbers_at(kind: Any, stored: Any) -> Any:
    def numbers_at(builder: Any, address: Any) -> Any:
        return builder.inttoptr(address, stored.as_pointer())

    return instruction(types.CPointer(kind), int64)(numbers_at)


#: Return the numbers of a dtype that begin at an address, as something to index.
uint8_at, int8_at = _numbers_at(uint8, I8), _numbers_at(int8, I8)
uint16_at, int16_at = _numbers_at(uint16, I16), _numbers_at(int16, I16)
int32_at = _numbers_at(int32, I32)
int64_at, uint64_at = _numbers_at(int64, I64), _numbers_at(uint64, I64)
float32_at, float64_at = _numbers_at(float32, FLOAT), _numbers_at(float64, ir.DoubleType())


def splat(builder: Any, number: Any, lanes: int) -> Any:
    """Return what generates a vector that has the same number in all lanes."""
    first = builder.insert_element(
        ir.Constant(ir.VectorType(number.type, lanes), ir.Undefined), number, ir.Constant(I32, 0)
    )
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))


@instruction(types.void, int64, int64, int64)
def copy(builder, destination, source, nbytes):
    """Copy bytes that do not overlap: memcpy."""
    to, from_ = (builder.inttoptr(address, I8.as_pointer()) for address in (destination, source))
    cgutils.raw_memcpy(builder, to, from_, nbytes, 1)


@instruction(int32, float32)
def bits_of(builder, number):
    """Return the bits of a float32 as an int32."""
    return builder.bitcast(number, I32)


@instruction(float32, int32)
def float_of(builder, bits):
    """Return the float32 that has the bits of an int32."""
    return builder.bitcast(bits, FLOAT)


@instruction(uint16, float32)
def half_of(builder, number):
    """Return a float32 as 16 bits of IEEE half precision, rounded to nearest even."""
    return builder.bitcast(builder.fptrunc(number, HALF), I16)


@instruction(float32, uint16)
def float_of_half(builder, half):
    """Return the float32 that 16 bits of IEEE half precision stand for."""
    return builder.fpext(builder.bitcast(half, HALF), FLOAT)


@njit
def bfloat16_of(number):
    """Return a float32 as 16 bits of bfloat16, rounded to nearest even; all NaN become one."""
    bits = bits_of(number)
    rounded = int32(bits + int32(0x7FFF) + ((bits >> int32(16)) & int32(1))) >> int32(16)
    return uint16(0x7FC0) if number != number else uint16(rounded)


@njit
def float_of_bfloat16(code):
    """Return the float32 that 16 bits of bfloat16 stand for."""
    return float_of(int32(int32(code) << int32(16)))


#: The instruction by which a spinning core saves power and leaves execution units to its sibling.
_PAUSE = {"x86_64": ("llvm.x86.sse2.pause",), "aarch64": ("llvm.aarch64.hint", ir.Constant(I32, 1))}


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, I64.as_pointer())


@instruction(int64, int64)
def load(builder, address):
    """Return the 64-bit word at an address, with acquire order: this process then sees all stores before the matching
    release."""
    return builder.load_atomic(_word(builder, address), "acquire", 8)


@instruction(int64, int64)
def load_unaligned(builder, address):
    """Return 64 bits that begin at any address, which no other process writes."""
    return builder.load(_word(builder, address), align=1)


@instruction(types.void, int64, int64)
def store_unaligned(builder, address, value):
    """Set 64 bits that begin at any address, which no other process reads."""
    builder.store(value, _word(builder, address), align=1)


@instruction(types.void, int64, int64)
def store(builder, address, value):
    """Set the 64-bit word at an address, with release order: a process that loads it sees all earlier stores."""
    builder.store_atomic(value, _word(builder, address), "release", 8)


@njit
def field(address, index):
    """Return a 64-bit field of a table, such as the context of a kernel. address: of the table's first field."""
    return load(address + 8 * index)


@njit
def set_field(address, index, value):
    """Set a 64-bit field of a table."""
    store(address + 8 * index, value)


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
    """Sleep for some microseconds: usleep."""
    call(builder, "usleep", I32, builder.trunc(microseconds, I32))


@instruction(int64)
def monotonic_ns(builder):
    """Return the time of time.monotonic()'s clock, in nanoseconds."""
    time = cgutils.alloca_once(builder, ir.ArrayType(I64, 2))
    call(builder, "clock_gettime", I32, ir.Constant(I32, 1), time)
    words = builder.load(time)
    seconds = builder.mul(builder.extract_value(words, 0), ir.Constant(I64, 1_000_000_000))
    return builder.add(seconds, builder.extract_value(words, 1))
