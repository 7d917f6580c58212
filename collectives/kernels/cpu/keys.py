"""Magnitudes as the integers that their bits are, the *keys*: in the same order, every NaN alike and above infinity."""

from __future__ import annotations

from llvmlite import ir
from numba import int64, njit
from numba.core import cgutils

from gradwire.collectives.kernels.cpu.intrinsics import I32, I64, float32_at, instruction, int32_at, int64_at, splat
from gradwire.collectives.kernels.cpu.scratch import room_for
from gradwire.collectives.kernels.layout import SELECT_AHEAD

LANES = SELECT_AHEAD  # numbers that are compared at once: the bits of a word
TILE = 2048  # numbers that are added, then searched, while they are in the first-level cache
_BINS = 2048
INFINITY_KEY = 0x7F800000
NAN_KEY = 0x7F800001  # the key of every NaN


@instruction(int64, int64, int64)
def reaching(builder, address, key):
    """Return which of the LANES float32 at an address have at least this key: one bit each, the first the lowest."""
    vector = ir.VectorType(I32, LANES)
    bits = builder.load(builder.inttoptr(address, vector.as_pointer()), align=4)
    keys = builder.and_(bits, ir.Constant(vector, [ir.Constant(I32, 0x7FFFFFFF)] * LANES))
    least = splat(builder, builder.trunc(key, I32), LANES)
    return builder.bitcast(builder.icmp_signed(">=", keys, least), I64)


@instruction(int64, int64)
def lowest_bit(builder, word):
    """Return the number of the lowest bit that is set; 64 for a word that is 0."""
    return builder.cttz(word, cgutils.false_bit)


@instruction(int64, int64)
def bits_set(builder, word):
    """Return how many bits are set."""
    return builder.ctpop(word)


@njit
def key_of(bits):
    """Return the key of a number with these bits."""
    return min(int64(bits) & 0x7FFFFFFF, NAN_KEY)


_bins = room_for(8 * _BINS)


@njit
def kth_largest(numbers, count, k):
    """Return the k-th largest key of `count` numbers, 0 < k <= count, and how many that have it are among the k."""
    bits = int32_at(numbers)
    histogram = int64_at(_bins())
    key, wanted = 0, k
    for shift, width in ((20, 11), (10, 10), (0, 10)):
        for i in range(_BINS):
            histogram[i] = 0
        for i in range(count):
            prefix = key_of(bits[i]) >> shift
            if prefix >> width == key:
                histogram[prefix & ((1 << width) - 1)] += 1
        digit = (1 << width) - 1
        while histogram[digit] < wanted:
            wanted -= histogram[digit]
            digit -= 1
        key = key << width | digit
    return key, wanted


@njit
def forget_non_finite(residual, momentum, n):
    """Set numbers that are not finite to 0: those that were not sent would return in every later sum."""
    bits, r, m = int32_at(residual), float32_at(residual), float32_at(momentum)
    for i in range(n):
        if int64(bits[i]) & 0x7FFFFFFF >= INFINITY_KEY:
            r[i] = 0
            if momentum != 0:
                m[i] = 0
