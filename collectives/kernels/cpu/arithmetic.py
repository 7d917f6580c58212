"""The arithmetic of reductions, destination[i] = destination[i] (op) source[i], or destination[i] / divisor.

C functions, one per dtype, called by address, so that the kernels which move data need not be compiled for every dtype. Floats
of 16 bits are widened to float32 for each operation and rounded to nearest even after it, as torch does.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import int64, njit, types
from numba.extending import intrinsic

from gradwire.collectives.kernels.cpu.intrinsics import (
    I64,
    bfloat16_of,
    float32_at,
    float64_at,
    float_of_bfloat16,
    float_of_half,
    half_of,
    instruction,
    int8_at,
    int16_at,
    int32_at,
    int64_at,
    uint8_at,
    uint16_at,
)
from gradwire.collectives.kernels.layout import MAX, MIN, PRODUCT, SUM


@instruction(types.void, *[int64] * 6)
def combine(builder, function, destination, source, count, op, divisor):
    """Call one of the functions of this module by its address."""
    kind = ir.FunctionType(I64, [I64] * 5)
    builder.call(builder.inttoptr(function, kind.as_pointer()), (destination, source, count, op, divisor))


@intrinsic
def _divided(context: Any, number: Any, divisor: Any) -> Any:
    """Return the quotient of a number and an int64: of a float in its own precision, of an integer as C has it."""
    is_float = isinstance(number, types.Float)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if is_float:
            return builder.fdiv(arguments[0], builder.sitofp(arguments[1], arguments[0].type))
        return builder.sdiv(context.cast(builder, arguments[0], number, int64), arguments[1])

    return (number if is_float else int64)(number, int64), generate


@njit
def _least(a, b):
    return a if a < b or a != a else b


@njit
def _greatest(a, b):
    return a if a > b or a != a else b


@njit
def _same(number):
    return number


def _reducing(numbers_at, wide=_same, narrow=_same):
    """Return the function of a dtype. wide, narrow: convert a number to the type that is computed with, and back."""

    def reduce(destination, source, count, op, divisor):
        out, other = numbers_at(destination), numbers_at(source)
        if op == SUM:
            for i in range(count):
                out[i] = narrow(wide(out[i]) + wide(other[i]))
        elif op == PRODUCT:
            for i in range(count):
                out[i] = narrow(wide(out[i]) * wide(other[i]))
        elif op == MIN:
            for i in range(count):
                out[i] = narrow(_least(wide(out[i]), wide(other[i])))
        elif op == MAX:
            for i in range(count):
                out[i] = narrow(_greatest(wide(out[i]), wide(other[i])))
        else:
            for i in range(count):
                out[i] = narrow(_divided(wide(out[i]), divisor))
        return 0

    return reduce


reduce_float16 = _reducing(uint16_at, float_of_half, half_of)
reduce_bfloat16 = _reducing(uint16_at, float_of_bfloat16, bfloat16_of)
reduce_float32, reduce_float64 = _reducing(float32_at), _reducing(float64_at)
reduce_uint8, reduce_int8, reduce_int16 = _reducing(uint8_at), _reducing(int8_at), _reducing(int16_at)
reduce_int32, reduce_int64 = _reducing(int32_at), _reducing(int64_at)
