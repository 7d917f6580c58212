"""The arithmetic of reductions, destination[i] = destination[i] (op) source[i], or destination[i] / divisor.

C functions, one per dtype, called by address, so that the kernels which move data need not be compiled for every dtype. Floats
of 16 bits are widened to float32 for each operation and rounded to nearest even after it, as torch does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from llvmlite import ir

from gradwire.collectives.kernels.cpu.compiling import compiled
from gradwire.collectives.kernels.cpu.deferred import (
    int64,
    intrinsic,
    njit,
    types,
)
from gradwire.collectives.kernels.cpu.intrinsics import (
    I64,
    bfloat16_of,
    float_of_bfloat16,
    float_of_half,
    half_of,
    instruction,
)
from gradwire.collectives.kernels.cpu.object_files import CFunction

SUM, PRODUCT, MIN, MAX, DIVIDE = range(5)
OPS = {"sum": SUM, "average": SUM, "product": PRODUCT, "min": MIN, "max": MAX}


@instruction(types.void, *[int64] * 6)
def combine(builder, function, destination, source, count, op, divisor):
    """Call a function of arithmetic() by its address."""
    kind = ir.FunctionType(ir.VoidType(), [I64] * 5)
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


def _combine(destination, source, count, op, divisor):
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
            destination[i] = _divided(destination[i], divisor)


@njit
def _wide(code, is_half):
    return float_of_half(code) if is_half else float_of_bfloat16(code)


@njit
def _narrow(number, is_half):
    return half_of(number) if is_half else bfloat16_of(number)


def _combine_16_bits(is_half: bool) -> Callable[..., None]:
    def combine(destination, source, count, op, divisor):
        if op == SUM:
            for i in range(count):
                destination[i] = _narrow(_wide(destination[i], is_half) + _wide(source[i], is_half), is_half)
        elif op == PRODUCT:
            for i in range(count):
                destination[i] = _narrow(_wide(destination[i], is_half) * _wide(source[i], is_half), is_half)
        elif op == MIN:
            for i in range(count):
                destination[i] = _narrow(_least(_wide(destination[i], is_half), _wide(source[i], is_half)), is_half)
        elif op == MAX:
            for i in range(count):
                destination[i] = _narrow(_greatest(_wide(destination[i], is_half), _wide(source[i], is_half)), is_half)
        else:
            for i in range(count):
                destination[i] = _narrow(_divided(_wide(destination[i], is_half), divisor), is_half)

    combine.__name__ = "_combine_float16" if is_half else "_combine_bfloat16"
    return combine


_ARITHMETIC: dict[torch.dtype, tuple[Callable[..., None], str]] = {
    torch.float16: (_combine_16_bits(True), "uint16"),
    torch.bfloat16: (_combine_16_bits(False), "uint16"),
    torch.float32: (_combine, "float32"),
    torch.float64: (_combine, "float64"),
    torch.uint8: (_combine, "uint8"),
    torch.int8: (_combine, "int8"),
    torch.int16: (_combine, "int16"),
    torch.int32: (_combine, "int32"),
    torch.int64: (_combine, "int64"),
}

#: The dtypes that can be reduced.
DTYPES = tuple(_ARITHMETIC)


def arithmetic(dtype: torch.dtype) -> CFunction:
    """Return the C function (destination, source, count, op, divisor) of a dtype, compiled or loaded from the disk."""
    function, memory = _ARITHMETIC[dtype]
    return compiled(f"void(CPointer({memory}), CPointer({memory}), int64, int64, int64)")(function)
