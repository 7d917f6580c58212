# mypy: ignore-errors
"""The dense quantizers on the CPU (Numba): the same bytes as collectives.kernels.reference, which says what they mean.

Each works block by block, and passes several times over a block, which stays in the first-level cache: memory is read and written
once. Error feedback is fused in: every pass adds the residual to the values, and the last one writes what was lost.
Loops are written so that LLVM turns them into vector code: no early exit, 32-bit lanes, maxima and tests on the bits of a float
(as integers they have an order that NaN and Inf do not disturb), rounding by adding a constant.

Each function is compiled, or loaded from the disk, when it is first called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import float32, int8, int32, int64, njit, types, uint8, uint16, uint32
from numba.core import cgutils
from numba.extending import intrinsic

from collectives.kernels.compiling import compiled
from collectives.kernels.stack import PIECE, room, settle, stream, streams

_I16, _I32, _FLOAT = ir.IntType(16), ir.IntType(32), ir.FloatType()

_NAN, _INFINITY = np.float32(np.nan), np.float32(np.inf)
_NAN_BITS, _INFINITY_BITS = np.int32(0x7FC00000), np.int32(0x7F800000)
_ZERO, _ONE = np.float32(0), np.float32(1)
_SIGN = np.int32(-(2**31))
_STEP = np.float32(2.0**-24)
_NATURAL_OFFSET = np.int32(127 - 77)  # exponent field of a float less the code of its power of two: 1 stands for 2^-76
_SMALLEST = np.int32((127 - 100) << 23)  # the bits of 2^-100: a block whose largest magnitude is below is zero
_LARGEST = np.int32((127 + 127) << 23)  # of 2^127: from here on, and with NaN or Inf, a block is not finite
_ROUND = np.float32(1.5 * 2**23)  # added to a number below 2^22, rounds it, half to even, and puts that in the low bits


@cache
def _compiled(function: Callable[..., None]) -> Any:
    """A function on addresses and lengths (int64) and a `scale` (float32), compiled."""
    kinds = [float32 if name == "scale" else int64 for name in inspect.signature(function).parameters]
    return compiled(njit, types.void(*kinds), nogil=True, error_model="numpy")(function)


def _addresses(*tensors: torch.Tensor | None) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


# What Numba has no words for.


def _pointer_to(kind: Any) -> Any:
    @intrinsic
    def pointer(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    return pointer


_bytes, _signed_bytes, _words, _float_bits, _floats = map(_pointer_to, (uint8, int8, uint16, int32, float32))


@intrinsic
def _bits(context: Any, number: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _I32)

    return types.int32(types.float32), generate


@intrinsic
def _float_of(context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _FLOAT)

    return types.float32(types.int32), generate


@intrinsic
def _half_of(context: Any, number: Any) -> Any:
    """IEEE half precision, rounded to nearest even."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), _I16)

    return types.uint16(types.float32), generate


@intrinsic
def _float_of_half(context: Any, half: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), _FLOAT)

    return types.float32(types.uint16), generate


@intrinsic
def _floor(context: Any, number: Any) -> Any:
    """The largest integer that is not above, as a float (math.floor makes 64-bit integers)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_FLOAT, [_FLOAT])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.floor.f32"), arguments)

    return types.float32(types.float32), generate


def _splat(builder: Any, number: Any) -> Any:
    vector = ir.VectorType(_FLOAT, 16)
    lane = builder.insert_element(ir.Constant(vector, ir.Undefined), number, ir.Constant(_I32, 0))
    return builder.shuffle_vector(lane, lane, ir.Constant(ir.VectorType(_I32, 16), [0] * 16))


def _taking_signs(corrects: bool) -> Any:
    @intrinsic
    def take(context: Any, values: Any, residual: Any, magnitude: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            vector = ir.VectorType(_FLOAT, 16)
            place, residual_place = (builder.inttoptr(address, vector.as_pointer()) for address in arguments[:2])
            numbers = builder.load(place, align=4)
            if corrects:
                numbers = builder.fadd(numbers, builder.load(residual_place, align=4))
            mask = builder.fcmp_ordered(">=", numbers, ir.Constant(vector, [0.0] * 16))
            if corrects:
                plus = _splat(builder, arguments[2])
                lost = builder.fsub(numbers, builder.select(mask, plus, builder.fneg(plus)))
                builder.store(lost, residual_place, align=4)
            return builder.bitcast(mask, _I16)

        return types.uint16(types.int64, types.int64, types.float32), generate

    return take


#: 16 bits: which of 16 values, or values + residuals, are >= 0. The second one writes what magnitude with these signs lost.
_signs, _corrected_signs = _taking_signs(False), _taking_signs(True)


def _putting_signs(add: bool) -> Any:
    @intrinsic
    def put(context: Any, address: Any, signs: Any, magnitude: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            vector = ir.VectorType(_FLOAT, 16)
            place = builder.inttoptr(arguments[0], vector.as_pointer())
            plus = _splat(builder, arguments[2])
            mask = builder.bitcast(arguments[1], ir.VectorType(ir.IntType(1), 16))
            numbers = builder.select(mask, plus, builder.fneg(plus))
            if add:
                numbers = builder.fadd(builder.load(place, align=4), numbers)
            builder.store(numbers, place, align=4)
            return context.get_dummy_value()

        return types.void(types.int64, types.uint16, types.float32), generate

    return put


#: The 16 floats at an address become, or are increased by, magnitude or -magnitude.
_set_signs, _add_signs = _putting_signs(False), _putting_signs(True)


# Common parts. Addresses are int64. What is encoded are n numbers c: values, or values + residual where the residual's address
# is not 0.


@njit
def _pad16(nbytes):
    return (nbytes + 15) // 16 * 16


@njit
def _blocks(numel, block):
    return (numel + block - 1) // block


@njit
def _zero(address, nbytes):
    p = _bytes(address)
    for i in range(nbytes):
        p[i] = uint8(0)


@njit
def _zero_padding(wire, code_bytes, scale_bytes):
    _zero(wire + code_bytes, _pad16(code_bytes) - code_bytes)
    _zero(wire + _pad16(code_bytes) + scale_bytes, _pad16(scale_bytes) - scale_bytes)


@njit
def _forget(codes, nbytes, residual, n):
    """A block that is not finite: its codes are zero and so is its residual."""
    _zero(codes, nbytes)
    if residual != 0:
        _zero(residual, 4 * n)


@njit
def _of_block(residual, start):
    return residual + 4 * start if residual != 0 else int64(0)


@njit
def _corrected(v, r, i, corrects):
    return v[i] + r[i] if corrects else v[i]


@njit
def _largest(values, residual, n):
    """The bits of the largest magnitude; a NaN is larger than Inf."""
    v, r = _floats(values), _floats(residual)
    largest = int32(0)
    for i in range(n):
        magnitude = int32(_bits(_corrected(v, r, i, residual != 0)) & int32(0x7FFFFFFF))
        largest = magnitude if magnitude > largest else largest
    return largest


@njit
def _maximum(largest):
    """The number with these bits, 0 for a block that is zero."""
    return _float_of(largest) if largest >= _SMALLEST else _ZERO


@njit
def _quotient(numerator, maximum):
    return numerator / maximum if maximum > _ZERO else _ZERO


@njit
def _add_terms(v, r, s, n, inverse_power, squared, corrects):
    for j in range(n):
        number = _corrected(v, r, j, corrects)
        scaled = number * inverse_power
        s[j] += scaled * scaled if squared else abs(number)


@njit
def _sum(values, residual, n, partials, inverse_power, squared):
    """Of the magnitudes, or of the squares of c * inverse_power.

    partials: room for 128 floats.
    """
    s = _floats(partials)
    for j in range(128):
        s[j] = _ZERO
    corrects = residual != 0
    for start in range(0, n, 128):
        v, r = _floats(values + 4 * start), _floats(residual + 4 * start)
        if n - start >= 128:
            _add_terms(v, r, s, 128, inverse_power, squared, corrects)
        else:
            _add_terms(v, r, s, n - start, inverse_power, squared, corrects)
    for j in range(32):
        s[j] = (s[4 * j] + s[4 * j + 1]) + (s[4 * j + 2] + s[4 * j + 3])
    for half in (16, 8, 4, 2, 1):
        for j in range(half):
            s[j] += s[j + half]
    return s[0]


@njit
def _mix(index, seed):
    x = uint32(uint32(uint32(index) * uint32(0x9E3779B9)) + seed)
    x = uint32(uint32(x ^ (x >> uint32(16))) * uint32(0x7FEB352D))
    x = uint32(uint32(x ^ (x >> uint32(15))) * uint32(0x846CA68B))
    return uint32(x ^ (x >> uint32(16)))


@njit
def _uniform(index, seed):
    return float32(int32(_mix(index, seed) >> uint32(8))) * _STEP


@njit
def _rounded_stochastically(number, index, seed):
    below = _floor(number)
    return below + (_ONE if _uniform(index, seed) < number - below else _ZERO)


@njit
def _put(out, i, number, add):
    out[i] = out[i] + number if add else number


@njit
def _lost(c, decoded):
    return c - decoded if abs(decoded) < _INFINITY else _ZERO


# Casts


@njit
def _bfloat16_of(number):
    bits = _bits(number)
    rounded = int32(bits + int32(0x7FFF) + ((bits >> int32(16)) & int32(1))) >> int32(16)
    return uint16(0x7FC0) if number != number else uint16(rounded)


@njit
def _float_of_bfloat16(code):
    return _float_of(int32(int32(code) << int32(16)))


def _fp16_encode(values, residual, wire, numel):
    v, r, codes = _floats(values), _floats(residual), _words(wire)
    for i in range(numel):
        c = _corrected(v, r, i, residual != 0)
        code = uint16(0x7E00) if c != c else _half_of(c)
        codes[i] = code
        if residual != 0:
            r[i] = _lost(c, _float_of_half(code))
    _zero_padding(wire, 2 * numel, 0)


def _fp16_decode(wire, out, numel, add, scale):
    codes, o = _words(wire), _floats(out)
    for i in range(numel):
        _put(o, i, _float_of_half(codes[i]) * scale, add)


def _bf16_encode(values, residual, wire, numel):
    v, r, codes = _floats(values), _floats(residual), _words(wire)
    for i in range(numel):
        c = _corrected(v, r, i, residual != 0)
        code = _bfloat16_of(c)
        codes[i] = code
        if residual != 0:
            r[i] = _lost(c, _float_of_bfloat16(code))
    _zero_padding(wire, 2 * numel, 0)


def _bf16_decode(wire, out, numel, add, scale):
    codes, o = _words(wire), _floats(out)
    for i in range(numel):
        _put(o, i, _float_of_bfloat16(codes[i]) * scale, add)


# natural: bits of the magnitude + 23 random ones, whose carry is the rounding; the exponent that is then there, less an offset


@njit
def _natural_of(number, index, seed):
    bits = _bits(number)
    magnitude = int32(bits & int32(0x7FFFFFFF))
    exponent = int32(uint32(magnitude + int32(_mix(index, seed) >> uint32(9))) >> uint32(23))
    code = int32(min(max(int32(exponent - _NATURAL_OFFSET), int32(0)), int32(126)))
    code = int32(code | (int32(bits >> int32(24)) & int32(0x80)))
    return uint8(127) if magnitude >= _INFINITY_BITS else uint8(code)


@njit
def _float_of_natural(code):
    exponent = int32(code & int32(127))
    bits = int32(int32(exponent + _NATURAL_OFFSET) << int32(23))
    bits = int32(0) if exponent == int32(0) else bits
    bits = _NAN_BITS if exponent == int32(127) else bits
    return _float_of(int32(bits | int32(int32(code & int32(128)) << int32(24))))


def _natural_encode(values, residual, wire, numel, seed):
    v, r, codes = _floats(values), _floats(residual), _bytes(wire)
    seed = uint32(seed)
    for i in range(numel):
        c = _corrected(v, r, i, residual != 0)
        code = _natural_of(c, i, seed)
        codes[i] = code
        if residual != 0:
            r[i] = _lost(c, _float_of_natural(code))
    _zero_padding(wire, numel, 0)


def _natural_decode(wire, out, numel, add, scale):
    codes, o = _bytes(wire), _floats(out)
    for i in range(numel):
        _put(o, i, _float_of_natural(codes[i]) * scale, add)


# fp8: a magnitude is rounded by adding the number whose last bit is the last that the format keeps at that exponent; what the sum
# has more than that number are the format's units, to which the exponent is added above the mantissa.


@njit
def _float8_block(values, residual, codes, n, inverse, e5m2, scale):
    v, r, codes = _floats(values), _floats(residual), _bytes(codes)
    mantissa = int32(2 if e5m2 else 3)
    limit = float32(57344) if e5m2 else float32(448)
    least = int32(int32(127 - 14 if e5m2 else 127 - 6) << int32(23))  # the bits of the smallest normal number
    drop = int32(int32(23) - mantissa)
    for i in range(n):
        c = _corrected(v, r, i, residual != 0)
        number = c * inverse
        magnitude = min(abs(number), limit)
        exponent = max(int32(_bits(magnitude) & int32(0x7F800000)), least)
        rounder = int32(exponent + int32(drop << int32(23)))
        rounded = magnitude + _float_of(rounder)
        sign = int32(_bits(number) & _SIGN)
        units = int32(_bits(rounded) - rounder)
        codes[i] = uint8(int32(int32(int32(exponent - least) >> drop) + units) | (sign >> int32(24)))
        if residual != 0:
            r[i] = c - _float_of(int32(_bits(rounded - _float_of(rounder)) | sign)) * scale


@njit
def _float8_decoded(codes, out, n, e5m2, block_scale, scale, add):
    codes, out = _bytes(codes), _floats(out)
    mantissa = int32(2 if e5m2 else 3)
    unit = float32(2.0**-16) if e5m2 else float32(2.0**-9)  # of a subnormal number
    offset = int32(int32(127 - 15 if e5m2 else 127 - 7) << int32(23))
    drop = int32(int32(23) - mantissa)
    for i in range(n):
        code = int32(codes[i])
        magnitude = int32(code & int32(127))
        bits = int32(int32(magnitude << drop) + offset)
        bits = bits if magnitude >> mantissa else _bits(float32(magnitude) * unit)
        number = _float_of(int32(bits | int32(int32(code & int32(128)) << int32(24))))
        _put(out, i, number * block_scale * scale, add)


def _fp8_encode(values, residual, wire, numel, e5m2, block):
    limit = float32(57344) if e5m2 else float32(448)
    scales = _floats(wire + _pad16(numel))
    for index in range(_blocks(numel, block)):
        start = index * block
        n = min(block, numel - start)
        codes = wire + start
        v, r = values + 4 * start, _of_block(residual, start)
        largest = _largest(v, r, n)
        if largest >= _LARGEST:
            scales[index] = _NAN
            _forget(codes, n, r, n)
            continue
        maximum = _maximum(largest)
        scale = maximum / limit
        scales[index] = scale
        _float8_block(v, r, codes, n, _quotient(limit, maximum), e5m2, scale)
    _zero_padding(wire, numel, 4 * _blocks(numel, block))


def _fp8_decode(wire, out, numel, e5m2, block, add, scale):
    scales = _floats(wire + _pad16(numel))
    for index in range(_blocks(numel, block)):
        start = index * block
        n = min(block, numel - start)
        _float8_decoded(wire + start, out + 4 * start, n, e5m2, scales[index], scale, add != 0)


# int8, int4, qsgd, terngrad: small integers, a byte each, and where they are shorter, packed from there


@njit
def _integers(values, residual, digits, n, inverse, limit, stochastic, start, seed, scale):
    v, r, digits = _floats(values), _floats(residual), _signed_bytes(digits)
    for i in range(n):
        c = _corrected(v, r, i, residual != 0)
        number = c * inverse
        if stochastic:
            rounded = min(max(_rounded_stochastically(number, start + i, seed), -limit), limit)
            digits[i] = int8(int32(rounded))
        else:  # not beyond the limit, which `number` exceeds by some units in the last place at most
            shifted = number + _ROUND
            rounded = shifted - _ROUND
            digits[i] = int8(_bits(shifted))
        if residual != 0:
            r[i] = c - rounded * scale


@njit
def _levels(values, residual, digits, n, inverse, levels, start, seed, scale):
    v, r, digits = _floats(values), _floats(residual), _signed_bytes(digits)
    for i in range(n):
        c = _corrected(v, r, i, residual != 0)
        level = int32(min(_rounded_stochastically(abs(c) * inverse, start + i, seed), levels))
        sign = _bits(c) >> int32(31)
        digit = int32(int32(level ^ sign) - sign)
        digits[i] = int8(digit)
        if residual != 0:
            r[i] = c - float32(digit) * scale


@njit
def _ternaries(values, residual, digits, n, inverse, start, seed, scale):
    v, r, digits = _floats(values), _floats(residual), _signed_bytes(digits)
    for i in range(n):
        c = _corrected(v, r, i, residual != 0)
        kept = _uniform(start + i, seed) < abs(c) * inverse
        digit = int32((_bits(c) >> int32(31)) | int32(1)) if kept else int32(0)
        digits[i] = int8(digit)
        if residual != 0:
            r[i] = c - float32(digit) * scale


@njit
def _pack_fours(digits, codes, n):
    """n digits to 4 bits each. The digit behind an odd number of them is overwritten."""
    _bytes(digits)[n] = uint8(0)
    pairs, codes = _words(digits), _bytes(codes)
    for j in range((n + 1) // 2):
        pair = int32(pairs[j])
        codes[j] = uint8((pair & int32(0x0F)) | int32(int32(pair >> int32(4)) & int32(0xF0)))


@njit
def _unpack_fours(codes, digits, n):
    """To digits that are 8 more than they stand for; one more of them if n is odd."""
    codes, pairs = _bytes(codes), _words(digits)
    for j in range((n + 1) // 2):
        byte = int32(codes[j])
        pairs[j] = uint16(((byte & int32(0x0F)) | int32(int32(byte & int32(0xF0)) << int32(4))) ^ int32(0x0808))


@njit
def _pack_twos(digits, codes, n):
    """n digits to 2 bits each. Up to 3 digits behind them are overwritten."""
    for i in range(n, (n + 3) // 4 * 4):
        _bytes(digits)[i] = uint8(0)
    fours, codes = _float_bits(digits), _bytes(codes)
    for j in range((n + 3) // 4):
        four = fours[j]
        low = int32(four & int32(0x03)) | int32(int32(four >> int32(6)) & int32(0x0C))
        high = int32(int32(four >> int32(12)) & int32(0x30)) | int32(int32(four >> int32(18)) & int32(0xC0))
        codes[j] = uint8(low | high)


@njit
def _unpack_twos(codes, digits, n):
    """To digits that are 2 more than they stand for; up to 3 more of them."""
    codes, fours = _bytes(codes), _float_bits(digits)
    for j in range((n + 3) // 4):
        byte = int32(codes[j])
        low = int32(byte & int32(0x03)) | int32(int32(byte & int32(0x0C)) << int32(6))
        high = int32(int32(byte & int32(0x30)) << int32(12)) | int32(int32(byte & int32(0xC0)) << int32(18))
        fours[j] = int32(int32(low | high) ^ int32(0x02020202))


@njit
def _int8_decoded(codes, out, n, block_scale, scale, add):
    codes, out = _signed_bytes(codes), _floats(out)
    for i in range(n):
        _put(out, i, float32(codes[i]) * block_scale * scale, add)


@njit
def _digits_decoded(digits, offset, out, n, block_scale, scale, add):
    digits, out = _bytes(digits), _floats(out)
    for i in range(n):
        _put(out, i, float32(int32(int32(digits[i]) - offset)) * block_scale * scale, add)


@njit
def _nibbles_decoded(codes, digits, out, n, block_scale, scale, add):
    for at in range(0, n, PIECE):
        length = min(PIECE, n - at)
        _unpack_fours(codes + at // 2, digits, length)
        _digits_decoded(digits, int32(8), out + 4 * at, length, block_scale, scale, add)


def _int8_encode(values, residual, wire, numel, block, stochastic, seed):
    scales = _floats(wire + _pad16(numel))
    seed = uint32(seed)
    for index in range(_blocks(numel, block)):
        start = index * block
        n = min(block, numel - start)
        codes = wire + start
        v, r = values + 4 * start, _of_block(residual, start)
        largest = _largest(v, r, n)
        if largest >= _LARGEST:
            scales[index] = _NAN
            _forget(codes, n, r, n)
            continue
        maximum = _maximum(largest)
        scale = maximum / float32(127)
        scales[index] = scale
        inverse = _quotient(float32(127), maximum)
        _integers(v, r, codes, n, inverse, float32(127), stochastic, start, seed, scale)
    _zero_padding(wire, numel, 4 * _blocks(numel, block))


def _int8_decode(wire, out, numel, block, add, scale):
    scales = _floats(wire + _pad16(numel))
    for index in range(_blocks(numel, block)):
        start = index * block
        _int8_decoded(wire + start, out + 4 * start, min(block, numel - start), scales[index], scale, add != 0)


def _int4_encode(values, residual, wire, numel, block, stochastic, seed):
    code_bytes = (numel + 1) // 2
    scales = _words(wire + _pad16(code_bytes))
    digits = room()
    seed = uint32(seed)
    for index in range(_blocks(numel, block)):
        start = index * block
        n = min(block, numel - start)
        codes = wire + start // 2
        v, r = values + 4 * start, _of_block(residual, start)
        largest = _largest(v, r, n)
        if largest >= _LARGEST:
            scales[index] = uint16(0x7FC0)
            _forget(codes, (n + 1) // 2, r, n)
            continue
        upper = int32(_bits(_maximum(largest) / float32(7)) + int32(0xFFFF)) >> int32(16)  # rounded up
        scales[index] = uint16(upper)
        scale = _float_of_bfloat16(upper)
        inverse = _quotient(_ONE, scale)
        for at in range(0, n, PIECE):
            length = min(PIECE, n - at)
            _integers(
                v + 4 * at, _of_block(r, at), digits, length, inverse, float32(7), stochastic, start + at, seed, scale
            )
            _pack_fours(digits, codes + at // 2, length)
    _zero_padding(wire, code_bytes, 2 * _blocks(numel, block))


def _int4_decode(wire, out, numel, block, add, scale):
    scales = _words(wire + _pad16((numel + 1) // 2))
    digits = room()
    for index in range(_blocks(numel, block)):
        start = index * block
        n = min(block, numel - start)
        block_scale = _float_of_bfloat16(scales[index])
        _nibbles_decoded(wire + start // 2, digits, out + 4 * start, n, block_scale, scale, add != 0)


@njit
def _norm(values, residual, n, largest, partials):
    """Of a block whose largest magnitude has these bits: squares are of c over the power of two at or below it."""
    if largest < _SMALLEST:
        return _ZERO
    power = int32(largest & int32(0x7F800000))
    inverse_power = _float_of(int32(int32(254 << 23) - power))
    return np.sqrt(_sum(values, residual, n, partials, inverse_power, True)) * _float_of(power)


def _qsgd_encode(values, residual, wire, numel, levels, block, seed):
    code_bytes = (numel + 1) // 2
    scales = _floats(wire + _pad16(code_bytes))
    partials = room()
    digits = room()
    levels = float32(levels)
    seed = uint32(seed)
    for index in range(_blocks(numel, block)):
        start = index * block
        n = min(block, numel - start)
        codes = wire + start // 2
        v, r = values + 4 * start, _of_block(residual, start)
        largest = _largest(v, r, n)
        norm = _norm(v, r, n, largest, partials) if largest < _LARGEST else _INFINITY
        if _bits(norm) >= _LARGEST:
            scales[index] = _NAN
            _forget(codes, (n + 1) // 2, r, n)
            continue
        scale = norm / levels
        scales[index] = scale
        inverse = _quotient(levels, norm)
        for at in range(0, n, PIECE):
            length = min(PIECE, n - at)
            _levels(v + 4 * at, _of_block(r, at), digits, length, inverse, levels, start + at, seed, scale)
            _pack_fours(digits, codes + at // 2, length)
    _zero_padding(wire, code_bytes, 4 * _blocks(numel, block))


def _qsgd_decode(wire, out, numel, block, add, scale):
    scales = _floats(wire + _pad16((numel + 1) // 2))
    digits = room()
    for index in range(_blocks(numel, block)):
        start = index * block
        n = min(block, numel - start)
        _nibbles_decoded(wire + start // 2, digits, out + 4 * start, n, scales[index], scale, add != 0)


def _terngrad_encode(values, residual, wire, numel, block, seed):
    code_bytes = (numel + 3) // 4
    scales = _floats(wire + _pad16(code_bytes))
    digits = room()
    seed = uint32(seed)
    for index in range(_blocks(numel, block)):
        start = index * block
        n = min(block, numel - start)
        codes = wire + start // 4
        v, r = values + 4 * start, _of_block(residual, start)
        largest = _largest(v, r, n)
        if largest >= _LARGEST:
            scales[index] = _NAN
            _forget(codes, (n + 3) // 4, r, n)
            continue
        maximum = _maximum(largest)
        scales[index] = maximum
        inverse = _quotient(_ONE, maximum)
        for at in range(0, n, PIECE):
            length = min(PIECE, n - at)
            _ternaries(v + 4 * at, _of_block(r, at), digits, length, inverse, start + at, seed, maximum)
            _pack_twos(digits, codes + at // 4, length)
    _zero_padding(wire, code_bytes, 4 * _blocks(numel, block))


def _terngrad_decode(wire, out, numel, block, add, scale):
    scales = _floats(wire + _pad16((numel + 3) // 4))
    digits = room()
    for index in range(_blocks(numel, block)):
        start = index * block
        n = min(block, numel - start)
        for at in range(0, n, PIECE):
            length = min(PIECE, n - at)
            _unpack_twos(wire + (start + at) // 4, digits, length)
            _digits_decoded(digits, int32(2), out + 4 * (start + at), length, scales[index], scale, add != 0)


# onebit


@njit
def _onebit_block(values, residual, codes, n, scale):
    words = _words(codes)
    if residual != 0:
        for j in range(n // 16):
            words[j] = _corrected_signs(values + 64 * j, residual + 64 * j, scale)
    else:
        for j in range(n // 16):
            words[j] = _signs(values + 64 * j, residual, scale)
    v, r, byte = _floats(values), _floats(residual), _bytes(codes)
    for j in range(n // 16 * 2, (n + 7) // 8):
        bits = int32(0)
        for i in range(8 * j, min(n, 8 * j + 8)):
            c = _corrected(v, r, i, residual != 0)
            positive = c >= _ZERO
            bits = int32(bits | int32(int32(positive) << int32(i % 8)))
            if residual != 0:
                r[i] = c - (scale if positive else -scale)
        byte[j] = uint8(bits)


@njit
def _onebit_decoded(codes, out, n, magnitude, add):
    words = _words(codes)
    if add:
        for j in range(n // 16):
            _add_signs(out + 64 * j, words[j], magnitude)
    else:
        for j in range(n // 16):
            _set_signs(out + 64 * j, words[j], magnitude)
    o, byte = _floats(out), _bytes(codes)
    for i in range(n // 16 * 16, n):
        _put(o, i, magnitude if (byte[i // 8] >> (i % 8)) & 1 else -magnitude, add)


def _onebit_encode(values, residual, wire, numel, block):
    code_bytes = (numel + 7) // 8
    scales = _floats(wire + _pad16(code_bytes))
    partials = room()
    for index in range(_blocks(numel, block)):
        start = index * block
        n = min(block, numel - start)
        codes = wire + start // 8
        v, r = values + 4 * start, _of_block(residual, start)
        total = _sum(v, r, n, partials, _ONE, False)
        if not total < _INFINITY:
            scales[index] = _NAN
            _forget(codes, (n + 7) // 8, r, n)
            continue
        scale = total / float32(n)
        scales[index] = scale
        _onebit_block(v, r, codes, n, scale)
    _zero_padding(wire, code_bytes, 4 * _blocks(numel, block))


def _onebit_decode(wire, out, numel, block, add, scale):
    scales = _floats(wire + _pad16((numel + 7) // 8))
    streaming, piece = add == 0 and streams(out, numel), room()
    for index in range(_blocks(numel, block)):
        start = index * block
        n = min(block, numel - start)
        for at in range(start, start + n, PIECE):
            target, length = out + 4 * at, min(PIECE, start + n - at)
            _onebit_decoded(wire + at // 8, piece if streaming else target, length, scales[index] * scale, add != 0)
            if streaming:
                stream(piece, target, length)
    if streaming:
        settle()


# The functions of collectives.kernels.reference


def fp16_encode(values, residual, wire, seed):
    _compiled(_fp16_encode)(*_addresses(values, residual, wire), values.numel())


def fp16_decode(wire, out, add, scale):
    _compiled(_fp16_decode)(*_addresses(wire, out), out.numel(), add, scale)


def bf16_encode(values, residual, wire, seed):
    _compiled(_bf16_encode)(*_addresses(values, residual, wire), values.numel())


def bf16_decode(wire, out, add, scale):
    _compiled(_bf16_decode)(*_addresses(wire, out), out.numel(), add, scale)


def fp8_encode(values, residual, wire, format, block, seed):
    _compiled(_fp8_encode)(*_addresses(values, residual, wire), values.numel(), format == "e5m2", block)


def fp8_decode(wire, out, format, block, add, scale):
    _compiled(_fp8_decode)(*_addresses(wire, out), out.numel(), format == "e5m2", block, add, scale)


def int8_encode(values, residual, wire, block, stochastic, seed):
    _compiled(_int8_encode)(*_addresses(values, residual, wire), values.numel(), block, stochastic, seed)


def int8_decode(wire, out, block, add, scale):
    _compiled(_int8_decode)(*_addresses(wire, out), out.numel(), block, add, scale)


def int4_encode(values, residual, wire, block, stochastic, seed):
    _compiled(_int4_encode)(*_addresses(values, residual, wire), values.numel(), block, stochastic, seed)


def int4_decode(wire, out, block, add, scale):
    _compiled(_int4_decode)(*_addresses(wire, out), out.numel(), block, add, scale)


def onebit_encode(values, residual, wire, block, seed):
    _compiled(_onebit_encode)(*_addresses(values, residual, wire), values.numel(), block)


def onebit_decode(wire, out, block, add, scale):
    _compiled(_onebit_decode)(*_addresses(wire, out), out.numel(), block, add, scale)


def qsgd_encode(values, residual, wire, levels, block, seed):
    _compiled(_qsgd_encode)(*_addresses(values, residual, wire), values.numel(), levels, block, seed)


def qsgd_decode(wire, out, block, add, scale):
    _compiled(_qsgd_decode)(*_addresses(wire, out), out.numel(), block, add, scale)


def terngrad_encode(values, residual, wire, block, seed):
    _compiled(_terngrad_encode)(*_addresses(values, residual, wire), values.numel(), block, seed)


def terngrad_decode(wire, out, block, add, scale):
    _compiled(_terngrad_decode)(*_addresses(wire, out), out.numel(), block, add, scale)


def natural_encode(values, residual, wire, seed):
    _compiled(_natural_encode)(*_addresses(values, residual, wire), values.numel(), seed)


def natural_decode(wire, out, add, scale):
    _compiled(_natural_decode)(*_addresses(wire, out), out.numel(), add, scale)
