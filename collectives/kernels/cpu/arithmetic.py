"""The arithmetic of reductions, destination[i] = destination[i] (op) source[i], or destination[i] / divisor.

C functions, one per dtype, called by address, so that what moves the data need not be compiled for every dtype. Floats
of 16 bits are widened to float32 for each operation and rounded to nearest even after it, as torch does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from llvmlite import ir
from numba import cfunc, float32, float64, int8, int16, int32, int64, njit, types, uint8, uint16
from numba.extending import intrinsic

from gradwire.collectives.kernels.cpu.compiling import compiled
from gradwire.collectives.kernels.cpu.intrinsics import bfloat16_of, float_of_bfloat16, float_of_half, half_of

_I64 = ir.IntType(64)


SUM, PRODUCT, MIN, MAX, DIVIDE = range(5)
OPS = {"sum": SUM, "average": SUM, "product": PRODUCT, "min": MIN, "max": MAX}


@intrinsic
def combine(context: Any, function: Any, destination: Any, source: Any, count: Any, op: Any, divisor: Any) -> Any:
    """Call a function of arithmetic() by its address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_I64] * 5)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


@intrinsic
def _divide_toward_zero(context: Any, number: Any, divisor: Any) -> Any:
    """Return the quotient of two int64, as C has it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.sdiv(arguments[0], arguments[1])

    return types.int64(types.int64, types.int64), generate


@njit
def _least(a, b):
    return a if a < b or a != a else b


@njit
def _greatest(a, b):
    return a if a > b or a != a else b


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
            destination[i] = _divide_toward_zero(int64(destination[i]), divisor)


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
            destination[i] = bfloat16_of(float_of_bfloat16(destination[i]) + float_of_bfloat16(source[i]))
    elif op == PRODUCT:
        for i in range(count):
            destination[i] = bfloat16_of(float_of_bfloat16(destination[i]) * float_of_bfloat16(source[i]))
    elif op == MIN:
        for i in range(count):
            least = _least(float_of_bfloat16(destination[i]), float_of_bfloat16(source[i]))
            destination[i] = bfloat16_of(least)
    elif op == MAX:
        for i in range(count):
            greatest = _greatest(float_of_bfloat16(destination[i]), float_of_bfloat16(source[i]))
            destination[i] = bfloat16_of(greatest)
    else:
        by = float32(divisor)
        for i in range(count):
            destination[i] = bfloat16_of(float_of_bfloat16(destination[i]) / by)


def _combine_float16(destination, source, count, op, divisor):
    if op == SUM:
        for i in range(count):
            destination[i] = half_of(float_of_half(destination[i]) + float_of_half(source[i]))
    elif op == PRODUCT:
        for i in range(count):
            destination[i] = half_of(float_of_half(destination[i]) * float_of_half(source[i]))
    elif op == MIN:
        for i in range(count):
            destination[i] = half_of(_least(float_of_half(destination[i]), float_of_half(source[i])))
    elif op == MAX:
        for i in range(count):
            destination[i] = half_of(_greatest(float_of_half(destination[i]), float_of_half(source[i])))
    else:
        by = float32(divisor)
        for i in range(count):
            destination[i] = half_of(float_of_half(destination[i]) / by)


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

#: What can be reduced.
DTYPES = tuple(_ARITHMETIC)


def arithmetic(dtype: torch.dtype) -> Any:
    """Return the C function (destination, source, count, op, divisor) of a dtype, compiled or loaded from the disk."""
    function, memory = _ARITHMETIC[dtype]
    pointer = types.CPointer(memory)
    signature = types.void(pointer, pointer, int64, int64, int64)
    return compiled(cfunc, signature, error_model="numpy")(function)
