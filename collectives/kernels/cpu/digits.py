"""Small integers ("digits"), a byte each, packed into 4 or 2 bits, and decoded from there."""

from __future__ import annotations

from numba import float32, int32, njit, uint8, uint16

from gradwire.collectives.kernels.cpu.blocks import put, residual_at
from gradwire.collectives.kernels.cpu.intrinsics import float32_at, int32_at, uint8_at, uint16_at
from gradwire.collectives.kernels.cpu.scratch import PIECE


@njit
def pack_fours(digits, codes, n):
    """Pack n digits to 4 bits each. The digit behind an odd number of them is overwritten."""
    uint8_at(digits)[n] = uint8(0)
    pairs, codes = uint16_at(digits), uint8_at(codes)
    for j in range((n + 1) // 2):
        pair = int32(pairs[j])
        codes[j] = uint8((pair & int32(0x0F)) | int32(int32(pair >> int32(4)) & int32(0xF0)))


@njit
def unpack_fours(codes, digits, n):
    """Unpack codes to digits that are 8 more than they stand for; one more of them if n is odd."""
    codes, pairs = uint8_at(codes), uint16_at(digits)
    for j in range((n + 1) // 2):
        byte = int32(codes[j])
        pairs[j] = uint16(((byte & int32(0x0F)) | int32(int32(byte & int32(0xF0)) << int32(4))) ^ int32(0x0808))


@njit
def pack_twos(digits, codes, n):
    """Pack n digits to 2 bits each. Up to 3 digits behind them are overwritten."""
    for i in range(n, (n + 3) // 4 * 4):
        uint8_at(digits)[i] = uint8(0)
    fours, codes = int32_at(digits), uint8_at(codes)
    for j in range((n + 3) // 4):
        four = fours[j]
        low = int32(four & int32(0x03)) | int32(int32(four >> int32(6)) & int32(0x0C))
        high = int32(int32(four >> int32(12)) & int32(0x30)) | int32(int32(four >> int32(18)) & int32(0xC0))
        codes[j] = uint8(low | high)


@njit
def unpack_twos(codes, digits, n):
    """Unpack codes to digits that are 2 more than they stand for; up to 3 more of them."""
    codes, fours = uint8_at(codes), int32_at(digits)
    for j in range((n + 3) // 4):
        byte = int32(codes[j])
        low = int32(byte & int32(0x03)) | int32(int32(byte & int32(0x0C)) << int32(6))
        high = int32(int32(byte & int32(0x30)) << int32(12)) | int32(int32(byte & int32(0xC0)) << int32(18))
        fours[j] = int32(int32(low | high) ^ int32(0x02020202))


@njit
def _decode_digits(digits, offset, out, n, block_scale, scale, add):
    digits, out = uint8_at(digits), float32_at(out)
    for i in range(n):
        put(out, i, float32(int32(int32(digits[i]) - offset)) * block_scale * scale, add)


def packing(write, pack, per_byte):
    """Return a `coding` for block_by_block() of codes smaller than a byte. write: writes digits and residual of a piece of a
    block."""

    @njit(inline="always")
    def coding(values, residual, codes, digits, n, scale, factor, limit, way, start, seed):
        for at in range(0, n, PIECE):
            v, r, length = values + 4 * at, residual_at(residual, at), min(PIECE, n - at)
            write(v, r, digits, length, scale, factor, limit, way, start + at, seed)
            pack(digits, codes + at // per_byte, length)

    return coding


def _unpacking(unpack, per_byte, offset):
    @njit
    def decoding(codes, digits, out, n, block_scale, way, scale, add):
        for at in range(0, n, PIECE):
            length = min(PIECE, n - at)
            unpack(codes + at // per_byte, digits, length)
            _decode_digits(digits, int32(offset), out + 4 * at, length, block_scale, scale, add)

    return decoding


#: The `decoding` of codes of 4 and of 2 bits for block_by_block().
decode_fours, decode_twos = _unpacking(unpack_fours, 2, 8), _unpacking(unpack_twos, 4, 2)
