"""The codec onebit: a sign for each number, and a mean magnitude for each block."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import float32, int32, int64, njit, types, uint8, uint16

from gradwire.collectives.kernels.cpu.blocks import (
    INFINITY,
    NAN,
    ONE,
    ZERO,
    always,
    block_by_block,
    corrected,
    ordered_sum,
    pad16,
    put,
)
from gradwire.collectives.kernels.cpu.intrinsics import (
    FLOAT,
    I16,
    field,
    float32_at,
    instruction,
    splat,
    uint8_at,
    uint16_at,
)
from gradwire.collectives.kernels.cpu.scratch import PIECE, room, settle, stream, streams

_VECTOR = ir.VectorType(FLOAT, 16)


def _taking_signs(corrects: bool) -> Any:
    @instruction(uint16, int64, int64, float32)
    def take(builder, values, residual, magnitude):
        place, residual_place = (builder.inttoptr(address, _VECTOR.as_pointer()) for address in (values, residual))
        numbers = builder.load(place, align=4)
        if corrects:
            numbers = builder.fadd(numbers, builder.load(residual_place, align=4))
        mask = builder.fcmp_ordered(">=", numbers, ir.Constant(_VECTOR, [0.0] * 16))
        if corrects:
            plus = splat(builder, magnitude, 16)
            lost = builder.fsub(numbers, builder.select(mask, plus, builder.fneg(plus)))
            builder.store(lost, residual_place, align=4)
        return builder.bitcast(mask, I16)

    return take


#: Return which of 16 values, or values + residuals, are >= 0, as 16 bits. The second writes what these signs lost.
_signs, _corrected_signs = _taking_signs(False), _taking_signs(True)


def _putting_signs(add: bool) -> Any:
    @instruction(types.void, int64, uint16, float32)
    def put(builder, address, signs, magnitude):
        place = builder.inttoptr(address, _VECTOR.as_pointer())
        plus = splat(builder, magnitude, 16)
        mask = builder.bitcast(signs, ir.VectorType(ir.IntType(1), 16))
        numbers = builder.select(mask, plus, builder.fneg(plus))
        if add:
            numbers = builder.fadd(builder.load(place, align=4), numbers)
        builder.store(numbers, place, align=4)

    return put


#: Set the 16 floats at an address to, or increase them by, magnitude or -magnitude.
_set_signs, _add_signs = _putting_signs(False), _putting_signs(True)


@njit
def _taken(values, residual, codes, digits, n, scale, factor, limit, way, start, seed):
    words = uint16_at(codes)
    if residual != 0:
        for j in range(n // 16):
            words[j] = _corrected_signs(values + 64 * j, residual + 64 * j, scale)
    else:
        for j in range(n // 16):
            words[j] = _signs(values + 64 * j, residual, scale)
    v, r, byte = float32_at(values), float32_at(residual), uint8_at(codes)
    for j in range(n // 16 * 2, (n + 7) // 8):
        bits = int32(0)
        for i in range(8 * j, min(n, 8 * j + 8)):
            c = corrected(v, r, i, residual != 0)
            positive = c >= ZERO
            bits = int32(bits | int32(int32(positive) << int32(i % 8)))
            if residual != 0:
                r[i] = c - (scale if positive else -scale)
        byte[j] = uint8(bits)


@njit
def _onebit_decoded(codes, out, n, magnitude, add):
    words = uint16_at(codes)
    if add:
        for j in range(n // 16):
            _add_signs(out + 64 * j, words[j], magnitude)
    else:
        for j in range(n // 16):
            _set_signs(out + 64 * j, words[j], magnitude)
    o, byte = float32_at(out), uint8_at(codes)
    for i in range(n // 16 * 16, n):
        put(o, i, magnitude if (byte[i // 8] >> (i % 8)) & 1 else -magnitude, add)


@njit
def _to_mean(values, residual, n, limit, partials):
    total = ordered_sum(values, residual, n, partials, ONE, False)
    return total / float32(n) if total < INFINITY else NAN, ZERO


onebit_encode, _ = block_by_block(1, 4, always(0), _to_mean, _taken, None)


def onebit_decode(wire, out, numel, settings, add, scale):
    block = field(settings, 0)
    scales = float32_at(wire + pad16((numel + 7) // 8))
    streaming, piece = add == 0 and streams(out, numel), room()
    for index in range((numel + block - 1) // block):
        start = index * block
        n = min(block, numel - start)
        for at in range(start, start + n, PIECE):
            target, length = out + 4 * at, min(PIECE, start + n - at)
            _onebit_decoded(wire + at // 8, piece if streaming else target, length, scales[index] * scale, add != 0)
            if streaming:
                stream(piece, target, length)
    if streaming:
        settle()
    return 0
