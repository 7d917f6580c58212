"""Instructions that compute: floats with denormals, rounded to nearest even, and with the one NaN that a GPU gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.cuda_machine.decoder import HANDLERS, Action, Decoder, Handler, dtype_of, handles
from tests.cuda_machine.memory import Array
from tests.cuda_machine.ptx import PtxError

_INTEGERS = ("s16", "u16", "s32", "u32", "s64", "u64")
_BITS = ("b16", "b32", "b64", "pred")
_FLOATS = ("f32", "rn.f32", "rn.f64")
_NAN = {
    np.dtype(np.float32): np.array([0x7FFFFFFF], np.uint32).view(np.float32),
    np.dtype(np.float64): np.array([0x7FFFFFFFFFFFFFFF], np.uint64).view(np.float64),
}


def one_nan(value: Array) -> Array:
    """Whatever NaN went in, this one comes out."""
    return np.where(np.isnan(value), _NAN[value.dtype], value)


def _elementwise(function: Callable[..., Array], forms: tuple[str, ...], result: str | None = None) -> Handler:
    """Operands and result of the type that the last modifier names. forms: the modifiers, joined, that are known."""

    def handler(decoder: Decoder, modifiers: list[str], operands: tuple[str, ...]) -> Action:
        if ".".join(modifiers) not in forms:
            raise PtxError("form")
        write = decoder.write(operands[0], result or modifiers[-1])
        first, *rest = [decoder.read(operand, modifiers[-1]) for operand in operands[1:]]
        if dtype_of(modifiers[-1]).kind == "f":
            return lambda threads: write(threads, one_nan(function(first(threads), *[read(threads) for read in rest])))
        return lambda threads: write(threads, function(first(threads), *[read(threads) for read in rest]))

    return handler


def _extreme(function: Any, of_zeros: Any) -> Callable[[Array, Array], Array]:
    """fmin or fmax, for which -0 is less than +0."""

    def apply(a: Array, b: Array) -> Array:
        value = function(a, b)
        if value.dtype.kind != "f":
            return value
        zeros = of_zeros(a.view(np.uint32), b.view(np.uint32)).view(np.float32)
        return np.where((a == 0) & (b == 0), zeros, value)

    return apply


def _shifted(function: Any) -> Handler:
    """By more bits than there are, a number is shifted out, or what is left is its sign."""

    def handler(decoder: Decoder, modifiers: list[str], operands: tuple[str, ...]) -> Action:
        (kind,) = modifiers
        dtype = dtype_of(kind)
        most = dtype.type(8 * dtype.itemsize - 1)
        write, a = decoder.write(operands[0], kind), decoder.read(operands[1], kind)
        amount = decoder.read(operands[2], "u32")

        def act(threads: Any) -> None:
            by = amount(threads).astype(dtype)
            value = function(a(threads), np.minimum(by, most))
            signed = function is np.right_shift and dtype.kind == "i"
            write(threads, value if signed else np.where(by > most, dtype.type(0), value))

        return act

    return handler


def _signed(of_float: Any, mask: int, of_integer: Any) -> Handler:
    """abs and neg, which change only the sign of a float, of a NaN's too."""

    def handler(decoder: Decoder, modifiers: list[str], operands: tuple[str, ...]) -> Action:
        (kind,) = modifiers
        bits = "b32" if kind == "f32" else kind
        write, a = decoder.write(operands[0], bits), decoder.read(operands[1], bits)
        if kind == "f32":
            return lambda threads: write(threads, of_float(a(threads), np.uint32(mask)))
        return lambda threads: write(threads, of_integer(a(threads)))

    return handler


def _quotient(a: Array, b: Array) -> Array:
    """Of integers, towards zero."""
    if a.dtype.kind == "f":
        return np.divide(a, b)
    return np.where((a < 0) != (b < 0), -(np.abs(a) // np.abs(b)), np.abs(a) // np.abs(b)).astype(a.dtype)


def _reversed(a: Array) -> Array:
    result = np.zeros_like(a)
    for bit in range(32):
        result = result | (a >> np.uint32(bit) & np.uint32(1)) << np.uint32(31 - bit)
    return result


def _leading_zeros(a: Array) -> Array:
    """And all bits for 0, as an instruction that looks for a bit has it."""
    places = np.uint32(31) - np.log2(np.maximum(a, 1).astype(np.float64)).astype(np.uint32)
    return np.where(a == 0, np.uint32(0xFFFFFFFF), places)


HANDLERS.update(
    {
        "brev": _elementwise(_reversed, ("b32",)),
        "bfind": _elementwise(_leading_zeros, ("shiftamt.u32",)),
        "add": _elementwise(np.add, _INTEGERS + _FLOATS),
        "sub": _elementwise(np.subtract, _INTEGERS + _FLOATS),
        "div": _elementwise(_quotient, (*_INTEGERS, "rn.f32", "rn.f64")),
        "rcp": _elementwise(np.reciprocal, ("rn.f32",)),
        "sqrt": _elementwise(np.sqrt, ("rn.f32", "rn.f64")),
        "min": _elementwise(_extreme(np.fmin, np.bitwise_or), (*_INTEGERS, "f32")),
        "max": _elementwise(_extreme(np.fmax, np.bitwise_and), (*_INTEGERS, "f32")),
        "and": _elementwise(np.bitwise_and, _BITS),
        "or": _elementwise(np.bitwise_or, _BITS),
        "xor": _elementwise(np.bitwise_xor, _BITS),
        "not": _elementwise(np.invert, _BITS),
        "popc": _elementwise(np.bitwise_count, ("b32",), "u32"),
        "shl": _shifted(np.left_shift),
        "shr": _shifted(np.right_shift),
        "abs": _signed(np.bitwise_and, 0x7FFFFFFF, np.abs),
        "neg": _signed(np.bitwise_xor, 0x80000000, np.negative),
    }
)


@handles("mov")
def _mov(decoder: Decoder, modifiers: list[str], operands: tuple[str, ...]) -> Action:
    (kind,) = modifiers
    if operands[0].startswith("{") or operands[1].startswith("{"):
        return _split_or_join(decoder, kind, operands)
    write, read = decoder.write(operands[0], kind), decoder.read(operands[1], kind)
    return lambda threads: write(threads, read(threads))


def _split_or_join(decoder: Decoder, kind: str, operands: tuple[str, ...]) -> Action:
    """Between a register and those that hold its parts, the lowest bits first."""
    parts, whole = decoder.vector(operands[0]), dtype_of(kind)
    if len(parts) > 1:
        part = f"b{8 * whole.itemsize // len(parts)}"
        writes, read = [decoder.write(name, part) for name in parts], decoder.read(operands[1], kind)

        def split(threads: Any) -> None:
            value = read(threads)
            for place, write in enumerate(writes):
                write(threads, value >> whole.type(place * int(part[1:])))

        return split
    parts = decoder.vector(operands[1])
    part = f"b{8 * whole.itemsize // len(parts)}"
    write, reads = decoder.write(operands[0], kind), [decoder.read(name, part) for name in parts]

    def join(threads: Any) -> None:
        value = np.zeros(1, whole)
        for place, read in enumerate(reads):
            value = value | read(threads).astype(whole) << whole.type(place * int(part[1:]))
        write(threads, value)

    return join


@handles("cvta")
def _cvta(decoder: Decoder, modifiers: list[str], operands: tuple[str, ...]) -> Action:
    if modifiers != ["to", "global", "u64"]:  # global memory has the same addresses in both spaces
        raise PtxError("form")
    return _mov(decoder, ["u64"], operands)


@handles("mul", "mad")
def _multiply(decoder: Decoder, modifiers: list[str], operands: tuple[str, ...]) -> Action:
    how, kind = modifiers
    if how == "rn" and kind in ("f32", "f64") and len(operands) == 3:
        return _elementwise(np.multiply, _FLOATS)(decoder, modifiers, operands)
    if how not in ("lo", "hi", "wide") or kind not in _INTEGERS or (kind.endswith("64") and how != "lo"):
        raise PtxError("form")
    wide = kind if how != "wide" else f"{kind[0]}{2 * int(kind[1:])}"
    a, b = decoder.read(operands[1], kind), decoder.read(operands[2], kind)
    addend = decoder.read(operands[3], wide) if len(operands) == 4 else None
    write = decoder.write(operands[0], wide)
    room = dtype_of(wide if how != "hi" else f"{kind[0]}{2 * int(kind[1:])}")

    def act(threads: Any) -> None:
        product = a(threads).astype(room) * b(threads).astype(room)
        if how == "hi":
            product = (product >> room.type(4 * room.itemsize)).astype(dtype_of(kind))
        write(threads, product if addend is None else product + addend(threads))

    return act


_COMPARE: dict[str, Any] = {
    "eq": np.equal,
    "ne": lambda a, b: (a < b) | (a > b) if a.dtype.kind == "f" else a != b,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    # Also true if one of them is a NaN.
    "equ": lambda a, b: ~((a < b) | (a > b)),
    "neu": np.not_equal,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
}


@handles("setp")
def _setp(decoder: Decoder, modifiers: list[str], operands: tuple[str, ...]) -> Action:
    (compare, kind) = modifiers
    if kind not in ("f32", "f64") and compare not in ("eq", "ne", "lt", "le", "gt", "ge"):
        raise PtxError("form")
    write, function = decoder.write(operands[0], "pred"), _COMPARE[compare]
    a, b = decoder.read(operands[1], kind), decoder.read(operands[2], kind)
    return lambda threads: write(threads, function(a(threads), b(threads)))


@handles("selp")
def _selp(decoder: Decoder, modifiers: list[str], operands: tuple[str, ...]) -> Action:
    """As bits, so that a NaN stays as it is."""
    kind = modifiers[0].replace("f", "b")
    first, second = (
        str(int(operand[2:], 16)) if operand.startswith(("0f", "0d")) else operand for operand in operands[1:3]
    )
    write, a, b = decoder.write(operands[0], kind), decoder.read(first, kind), decoder.read(second, kind)
    condition = decoder.read(operands[3], "pred")
    return lambda threads: write(threads, np.where(condition(threads), a(threads), b(threads)))


@handles("prmt")
def _prmt(decoder: Decoder, modifiers: list[str], operands: tuple[str, ...]) -> Action:
    if modifiers != ["b32"]:
        raise PtxError("form")
    write = decoder.write(operands[0], "b32")
    a, b, selector = (decoder.read(operand, "u32") for operand in operands[1:])

    def act(threads: Any) -> None:
        both = a(threads).astype(np.uint64) | b(threads).astype(np.uint64) << np.uint64(32)
        choice, result = selector(threads), np.uint32(0)
        for place in range(4):
            which = (choice >> np.uint32(4 * place)) & np.uint32(0xF)
            taken = (both >> (np.uint64(8) * (which & np.uint32(7)))).astype(np.uint32) & np.uint32(0xFF)
            sign = np.where(taken & np.uint32(0x80), np.uint32(0xFF), np.uint32(0))
            result = result | np.where(which & np.uint32(8), sign, taken) << np.uint32(8 * place)
        write(threads, np.asarray(result))

    return act


@handles("bfi")
def _bit_field(decoder: Decoder, modifiers: list[str], operands: tuple[str, ...]) -> Action:
    """Only of fields at a constant place, inside of the number."""
    (kind,) = modifiers
    position, length = (int(operand) for operand in operands[-2:])
    if length == 0 or position + length > 8 * dtype_of(kind).itemsize:
        raise PtxError("field")
    number = np.dtype(f"u{dtype_of(kind).itemsize}").type
    write, a, base = decoder.write(operands[0], kind), decoder.read(operands[1], kind), decoder.read(operands[2], kind)
    mask = number(((1 << length) - 1) << position)
    return lambda threads: write(threads, a(threads) << number(position) & mask | base(threads) & ~mask)


_ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor}
_FLOAT8 = {"e4m3x2": torch.float8_e4m3fn, "e5m2x2": torch.float8_e5m2}
_HALVES = {"f16x2": torch.float16, "bf16x2": torch.bfloat16}


@handles("cvt")
def _cvt(decoder: Decoder, modifiers: list[str], operands: tuple[str, ...]) -> Action:
    *how, to, of = modifiers
    if to in _HALVES:
        if how != ["rn"] or of != "f32":
            raise PtxError("form")
        return _cvt_halves(decoder, _HALVES[to], operands)
    if to in _FLOAT8:
        if how != ["rn", "satfinite"] or of != "f32":
            raise PtxError("form")
        return _cvt_float8(decoder, _FLOAT8[to], operands)
    write, read = decoder.write(operands[0], to), decoder.read(operands[1], of)
    target = dtype_of(to)
    if of == "f32" and to == "f32":
        (rounding,) = how
        return lambda threads: write(threads, one_nan(_ROUND[rounding](read(threads))))
    if of == "f32" and to in ("s32", "u32"):
        (rounding,) = how
        bounds = np.iinfo(target)

        def to_integer(threads: Any) -> None:
            number = _ROUND[rounding](np.nan_to_num(read(threads).astype(np.float64), nan=0.0))
            write(threads, np.clip(number, bounds.min, bounds.max).astype(target))

        return to_integer
    widened = (of, to) in (("f16", "f32"), ("f32", "f64"))
    narrowed = (to, of) in (("f16", "f32"), ("f32", "f64"))
    rounded = to[0] == "f" and not widened
    if how != (["rn"] if rounded else []) or (of[0] == "f" and not (widened or narrowed)):
        raise PtxError("form")
    return lambda threads: write(threads, read(threads).astype(target))


def _cvt_halves(decoder: Decoder, dtype: torch.dtype, operands: tuple[str, ...]) -> Action:
    """Of two numbers: the first becomes the upper half."""
    write = decoder.write(operands[0], "b32")
    high, low = (decoder.read(operand, "f32") for operand in operands[1:])

    def bits(number: Array) -> Array:
        half = torch.from_numpy(number.copy()).to(dtype).view(torch.int16).numpy().view(np.uint16)
        return np.where(np.isnan(number), np.uint32(0x7FFF), half.astype(np.uint32))

    return lambda threads: write(threads, bits(high(threads)) << np.uint32(16) | bits(low(threads)))


def _cvt_float8(decoder: Decoder, dtype: torch.dtype, operands: tuple[str, ...]) -> Action:
    write = decoder.write(operands[0], "b16")
    high, low = (decoder.read(operand, "f32") for operand in operands[1:])
    limit = torch.finfo(dtype).max

    def bits(number: Array) -> Array:
        code = torch.from_numpy(np.clip(number, -limit, limit).copy()).to(dtype).view(torch.uint8)
        return np.where(np.isnan(number), np.uint16(0x7F), code.numpy().astype(np.uint16))

    return lambda threads: write(threads, bits(high(threads)) << np.uint16(8) | bits(low(threads)))
