"""The codecs fp16 and bf16: a number of 16 bits for each of 32."""

from __future__ import annotations

from numba import uint16

from gradwire.collectives.kernels.cpu.blocks import clear_padding, corrected, loss, put
from gradwire.collectives.kernels.cpu.calling import decoder, encoder
from gradwire.collectives.kernels.cpu.intrinsics import (
    bfloat16_of,
    float32_at,
    float_of_bfloat16,
    float_of_half,
    half_of,
    uint16_at,
)


def _fp16_encode(values, residual, wire, numel, seed):
    v, r, codes = float32_at(values), float32_at(residual), uint16_at(wire)
    for i in range(numel):
        c = corrected(v, r, i, residual != 0)
        code = uint16(0x7E00) if c != c else half_of(c)
        codes[i] = code
        if residual != 0:
            r[i] = loss(c, float_of_half(code))
    clear_padding(wire, 2 * numel, 0)


def _fp16_decode(wire, out, numel, add, scale):
    codes, o = uint16_at(wire), float32_at(out)
    for i in range(numel):
        put(o, i, float_of_half(codes[i]) * scale, add)


def _bf16_encode(values, residual, wire, numel, seed):
    v, r, codes = float32_at(values), float32_at(residual), uint16_at(wire)
    for i in range(numel):
        c = corrected(v, r, i, residual != 0)
        code = bfloat16_of(c)
        codes[i] = code
        if residual != 0:
            r[i] = loss(c, float_of_bfloat16(code))
    clear_padding(wire, 2 * numel, 0)


def _bf16_decode(wire, out, numel, add, scale):
    codes, o = uint16_at(wire), float32_at(out)
    for i in range(numel):
        put(o, i, float_of_bfloat16(codes[i]) * scale, add)


fp16_encode, fp16_decode = encoder(_fp16_encode), decoder(_fp16_decode)
bf16_encode, bf16_decode = encoder(_bf16_encode), decoder(_bf16_decode)
