"""What Numba has no words for and many kernels need: numbers at an address, their bits, vectors, and floats of 16 bits.

Addresses are plain integers, so that one compiled signature serves every dtype.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import float32, int8, int32, njit, types, uint8, uint16, uint64
from numba.core import cgutils
from numba.extending import intrinsic

_I8, _I16, _I32, _FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()


def _pointer_to(kind: Any) -> Any:
    @intrinsic
    def pointer(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    return pointer


#: Return the numbers of a dtype that begin at an address, as something to index.
uint8_at, int8_at, uint16_at, int32_at, float32_at, uint64_at = map(
    _pointer_to, (uint8, int8, uint16, int32, float32, uint64)
)


def splat(builder: Any, number: Any, lanes: int) -> Any:
    """Return what generates a vector that has the same number in all lanes."""
    first = builder.insert_element(
        ir.Constant(ir.VectorType(number.type, lanes), ir.Undefined), number, ir.Constant(_I32, 0)
    )
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes))


@intrinsic
def copy(context: Any, destination: Any, source: Any, nbytes: Any) -> Any:
    """Copy bytes that do not overlap: memcpy."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointers = [builder.inttoptr(argument, _I8.as_pointer()) for argument in arguments[:2]]
        cgutils.raw_memcpy(builder, pointers[0], pointers[1], arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def bits_of(context: Any, number: Any) -> Any:
    """Return the bits of a float32 as an int32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _I32)

    return types.int32(types.float32), generate


@intrinsic
def float_of(context: Any, bits: Any) -> Any:
    """Return the float32 that has the bits of an int32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _FLOAT)

    return types.float32(types.int32), generate


@intrinsic
def half_of(context: Any, number: Any) -> Any:
    """Return a float32 as 16 bits of IEEE half precision, rounded to nearest even."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), _I16)

    return types.uint16(types.float32), generate


@intrinsic
def float_of_half(context: Any, half: Any) -> Any:
    """Return the float32 that 16 bits of IEEE half precision stand for."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), _FLOAT)

    return types.float32(types.uint16), generate


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
