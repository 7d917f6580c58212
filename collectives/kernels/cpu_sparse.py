# mypy: ignore-errors
"""The sparse and low-rank codecs on the CPU (Numba): the same bytes as collectives.kernels.reference_sparse, which says
what they mean.

Numbers are reached through addresses, 0 for a tensor that is not there. Magnitudes are compared as the integers that
their bits are, the *keys*: the same order, with every NaN made equal and larger than infinity.

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
from numba import float32, int64, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from collectives.kernels.compiling import compiled
from collectives.kernels.stack import PIECE, room, settle, stream, streams
from collectives.kernels.wire import pad16

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_F32 = ir.FloatType()

_LANES = 64  # numbers that are compared at once: the bits of a word
_AHEAD = 4  # as many of a word are appended without asking
_TILE = 2048  # numbers that are added, then searched, while they are in the first-level cache
_SMALL = 4096  # numbers that are not worth a guess
_SAMPLES = 65536  # at most
_SIDE_BY_SIDE = 4  # of them, read from memory at once; of more, too many might be alike
_BINS = 2048
_INFINITY = 0x7F800000
_NAN = 0x7F800001  # the key of every NaN


@cache
def _compiled(function: Callable[..., Any]) -> Any:
    """A function on addresses and lengths (int64) and a factor (float32), compiled."""
    kinds = [float32 if name in ("scale", "decay") else int64 for name in inspect.signature(function).parameters]
    return compiled(njit, tuple(kinds), nogil=True, error_model="numpy")(function)


@intrinsic
def _floats(context: Any, address: Any) -> Any:
    """The float32 at an address, as something to index."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], _F32.as_pointer())

    return types.CPointer(types.float32)(types.int64), generate


@intrinsic
def _integers(context: Any, address: Any) -> Any:
    """The int32 at an address, as something to index."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], _I32.as_pointer())

    return types.CPointer(types.int32)(types.int64), generate


@intrinsic
def _float_of_key(context: Any, key: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.trunc(arguments[0], _I32), _F32)

    return types.float32(types.int64), generate


@intrinsic
def _reaching(context: Any, address: Any, key: Any) -> Any:
    """Which of the _LANES float32 at an address have at least this key: one bit each, the first the lowest."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(_I32, _LANES)
        bits = builder.load(builder.inttoptr(arguments[0], vector.as_pointer()), align=4)
        keys = builder.and_(bits, ir.Constant(vector, [ir.Constant(_I32, 0x7FFFFFFF)] * _LANES))
        first = ir.Constant(_I32, 0)
        least = builder.insert_element(ir.Constant(vector, ir.Undefined), builder.trunc(arguments[1], _I32), first)
        least = builder.shuffle_vector(least, least, ir.Constant(vector, [first] * _LANES))
        return builder.bitcast(builder.icmp_signed(">=", keys, least), _I64)

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _lowest_bit(context: Any, word: Any) -> Any:
    """The number of the lowest bit that is set; 64 of a word that is 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], cgutils.false_bit)

    return types.int64(types.int64), generate


@intrinsic
def _bits_set(context: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.int64), generate


@njit
def _mix(index, seed):
    x = (index * 0x9E3779B9 + seed) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


@njit
def _key(bits):
    return min(int64(bits) & 0x7FFFFFFF, _NAN)


@njit
def _kth_largest(numbers, count, k):
    """The k-th largest key of `count` numbers, 1 <= k <= count, and how many of those that have it are among the k."""
    bits = _integers(numbers)
    histogram = np.empty(_BINS, np.int64)
    key, wanted = 0, k
    for shift, width in ((20, 11), (10, 10), (0, 10)):
        histogram[:] = 0
        for i in range(count):
            prefix = _key(bits[i]) >> shift
            if prefix >> width == key:
                histogram[prefix & ((1 << width) - 1)] += 1
        digit = (1 << width) - 1
        while histogram[digit] < wanted:
            wanted -= histogram[digit]
            digit -= 1
        key = key << width | digit
    return key, wanted


@njit
def _gather(source, begin, end, key, indices, found, capacity, count):
    """Append the numbers in [begin, end) that have at least this key, and count them even where there is no room for
    more.

    How many there are in a word is not to be predicted, so _AHEAD are appended at any rate; those there are not will be
    written over.
    """
    numbers, bits = _floats(source), _integers(source)
    indices_at, found_at = _integers(indices), _floats(found)
    for block in range(begin, end, _LANES):
        mask = 0
        if block + _LANES <= end:
            mask = _reaching(source + 4 * block, key)
            if count + _AHEAD <= capacity:
                after = count + _bits_set(mask)
                for ahead in range(_AHEAD):
                    i = block + (_lowest_bit(mask) & (_LANES - 1))
                    indices_at[count + ahead] = i
                    found_at[count + ahead] = numbers[i]
                    mask &= mask - 1
                count = min(after, count + _AHEAD)
        else:
            for lane in range(end - block):
                mask |= int64((int64(bits[block + lane]) & 0x7FFFFFFF) >= key) << lane
        if count > capacity:
            count += _bits_set(mask)
            continue
        while mask != 0:
            i = block + _lowest_bit(mask)
            indices_at[count] = i
            found_at[count] = numbers[i]
            count += 1
            mask &= mask - 1
    return count


@njit
def _scan(values, residual, momentum, decay, n, key, indices, found, capacity):
    """momentum = decay * momentum + values; residual += the momentum, or else the values; then gather from what that
    gave.
    """
    v, r, m = _floats(values), _floats(residual), _floats(momentum)
    count = 0
    for begin in range(0, n, _TILE):
        end = min(begin + _TILE, n)
        if momentum != 0:
            for i in range(begin, end):
                m[i] = decay * m[i] + v[i]
            for i in range(begin, end):
                r[i] += m[i]
        elif residual != 0:
            for i in range(begin, end):
                r[i] += v[i]
        count = _gather(residual if residual != 0 else values, begin, end, key, indices, found, capacity, count)
    return count


@njit
def _guess(values, residual, momentum, decay, n, k, drawn):
    """A key that a few more than k of the numbers will reach, by a sample, in which that is four deviations of a count
    away.

    drawn: room for the sample.
    """
    if n <= _SMALL:
        return 0
    v, r, m, sample = _floats(values), _floats(residual), _floats(momentum), _floats(drawn)
    places = min(max(n // 256, 1024), _SAMPLES) // _SIDE_BY_SIDE
    samples = places * _SIDE_BY_SIDE
    expected = samples * k / n
    wanted = int64(expected + 4 * np.sqrt(expected) + 4)
    if wanted >= samples:
        return 0
    stride = n // places - _SIDE_BY_SIDE + 1
    for place in range(places):
        # No stride that the rows of a matrix might share.
        first = place * n // places + ((_mix(place, 0) * stride) >> 32)
        for i in range(first, first + _SIDE_BY_SIDE):
            number = v[i]
            if momentum != 0:
                number += decay * m[i]
            if residual != 0:
                number += r[i]
            sample[place * _SIDE_BY_SIDE + i - first] = number
    key, _ = _kth_largest(drawn, samples, wanted)
    return max(key, 1)  # where most are zero, those that are not are few


@njit
def _emit(indices, found, count, key, ties, wanted, written, wire_indices, wire_values, residual, momentum):
    """Send the gathered numbers above the key, and the first `ties` of those that have it. (written, ties that are
    left)
    """
    numbers, bits, places = _floats(found), _integers(found), _integers(indices)
    out_i, out_v, r, m = _integers(wire_indices), _floats(wire_values), _floats(residual), _floats(momentum)
    begin = written
    for e in range(count):
        if written == wanted:
            break
        number_key = _key(bits[e])
        tie = (number_key == key) & (ties > 0)
        sent = (number_key > key) | tie
        # Whether it is sent is not to be predicted, so all is written at any rate: the next one goes to the same place.
        out_i[written] = places[e]
        out_v[written] = numbers[e] if number_key < _NAN else float32(np.nan)
        written += sent
        ties -= tie
    if residual != 0:
        for e in range(begin, written):
            r[out_i[e]] = 0
    if momentum != 0:
        for e in range(begin, written):
            m[out_i[e]] = 0
    return written, ties


@njit
def _forget_non_finite(residual, momentum, n):
    """Numbers that are not finite, and were not sent for want of room, would come back in every later sum."""
    bits, r, m = _integers(residual), _floats(residual), _floats(momentum)
    for i in range(n):
        if int64(bits[i]) & 0x7FFFFFFF >= _INFINITY:
            r[i] = 0
            if momentum != 0:
                m[i] = 0


def _select(
    values, residual, momentum, decay, n, k, tau, slack, wire_indices, wire_values, slots, indices, found, capacity
):
    """Write the largest of n numbers as indices and values, then zeros up to `slots`; how many. Without `tau` (an
    address) k.

    The numbers that reach a guessed key are gathered in the pass that adds the residual; the k-th largest is looked for
    among them. If the guess was bad, it is looked for among all.
    """
    if k == 0:
        return 0
    sums = residual if residual != 0 else values

    key = _key(_integers(tau)[0]) if tau != 0 else 0
    adapted = key > 0
    if not adapted:
        key = _guess(values, residual, momentum, decay, n, k, found)
    count = _scan(values, residual, momentum, decay, n, key, indices, found, capacity)
    wanted = ties = count
    gathered = True
    if adapted and k - slack <= count <= k + slack:
        now = _floats(tau)[0]
        _floats(tau)[0] = now * (float32(1) + float32(count - k) / float32(8 * k))
    else:
        if adapted and not k <= count <= capacity:
            key = _guess(sums, 0, 0, decay, n, k, found)
            count = _scan(sums, 0, 0, decay, n, key, indices, found, capacity)
        wanted = k
        if k <= count <= capacity:
            key, ties = _kth_largest(found, count, k)
        else:
            gathered = False
            if count < k and key == 1:  # all that is not zero, and some zeros
                key, ties = 0, k - count
            else:
                key, ties = _kth_largest(sums, n, k)
        if tau != 0:
            _floats(tau)[0] = _float_of_key(key) if key < _INFINITY else 0

    written = 0
    if gathered:
        written, ties = _emit(
            indices, found, count, key, ties, wanted, written, wire_indices, wire_values, residual, momentum
        )
    else:
        for begin in range(0, n, _TILE):
            end, least = min(begin + _TILE, n), key if ties > 0 else key + 1
            count = _gather(sums, begin, end, least, indices, found, capacity, 0)
            written, ties = _emit(
                indices, found, count, key, ties, wanted, written, wire_indices, wire_values, residual, momentum
            )
            if written == wanted:
                break
    if residual != 0 and key >= _INFINITY:
        _forget_non_finite(residual, momentum, n)
    for e in range(written, slots):
        _integers(wire_indices)[e] = 0
        _floats(wire_values)[e] = 0
    return written


@njit
def _scatter_past_the_caches(wire_indices, wire_values, count, out, n, scale):
    places, numbers, piece = _integers(wire_indices), _floats(wire_values), room()
    to, e = _floats(piece), 0
    for begin in range(0, n, PIECE):
        length = min(PIECE, n - begin)
        for i in range(length):
            to[i] = 0
        while e < count and begin <= places[e] < begin + length:
            to[places[e] - begin] += numbers[e] * scale
            e += 1
        stream(piece, out + 4 * begin, length)
    settle()
    return count - e


def _scatter(wire_indices, wire_values, count, out, n, add, scale):
    """Put the numbers where their indices say; how many indices lie outside; or, where that is seen, do not ascend."""
    if add == 0 and streams(out, n):
        return _scatter_past_the_caches(wire_indices, wire_values, count, out, n, scale)
    places, numbers, to = _integers(wire_indices), _floats(wire_values), _floats(out)
    outside = 0
    if add == 0:
        for i in range(n):
            to[i] = 0
    for e in range(count):
        i = int64(places[e])
        if i < 0 or i >= n:
            outside += 1
        else:
            to[i] += numbers[e] * scale
    return outside


@njit
def _begins(n, k, seed):
    """Where the ring of n that random-k divides into k parts begins."""
    return (_mix(k, seed) * n) >> 32


@njit
def _drawn(j, k, n, seed, begins):
    """The index, n too large if it lies beyond the end, that random-k takes from the j-th part."""
    begin = j * n // k
    return begins + begin + ((_mix(j, seed) * ((j + 1) * n // k - begin)) >> 32)


def _draw(values, residual, n, k, seed, wire, slots):
    v, r, out = _floats(values), _floats(residual), _floats(wire)
    sums = residual if residual != 0 else values
    numbers = _floats(sums)
    for j in range(k, slots):
        out[j] = 0
    # In the order of the indices, which begins with the first part beyond the end, they are read from the cache.
    begins = _begins(n, k, seed)
    j = 0
    while j < k and _drawn(j, k, n, seed, begins) < n:
        j += 1
    taken, j = 0, j % max(k, 1)
    i = _drawn(j, k, n, seed, begins) % n if k > 0 else n
    finite = True
    for begin in range(0, n, _TILE):
        end = min(begin + _TILE, n)
        if residual != 0:
            for e in range(begin, end):
                r[e] += v[e]
        for block in range(begin, end - _LANES + 1, _LANES):
            finite &= _reaching(sums + 4 * block, _INFINITY) == 0
        for e in range(end - (end - begin) % _LANES, end):
            finite &= int64(_integers(sums)[e]) & 0x7FFFFFFF < _INFINITY
        while i < end and taken < k:
            out[j] = numbers[i]
            if residual != 0:
                r[i] = 0
            taken, j = taken + 1, (j + 1 if j + 1 < k else 0)
            i = _drawn(j, k, n, seed, begins)
            i = i - n if i >= n else i
    if not finite:
        for j in range(k):
            out[j] = float32(np.nan)
        if residual != 0:
            _forget_non_finite(residual, 0, n)


def _place(wire, out, n, k, seed, add, scale):
    numbers, to = _floats(wire), _floats(out)
    if add == 0:
        for i in range(n):
            to[i] = 0
    begins = _begins(n, k, seed)
    for j in range(k):
        i = _drawn(j, k, n, seed, begins)
        i = i - n if i >= n else i
        to[i] += numbers[j] * scale


@njit
def _dot(a, b):
    """The sum of a * b, of a length that 128 divides, in the order of reference.block_sums."""
    sums = np.zeros(128)
    for begin in range(0, len(a), 128):
        for e in range(128):
            sums[e] += a[begin + e] * b[begin + e]
    for j in range(32):
        sums[j] = (sums[4 * j] + sums[4 * j + 1]) + (sums[4 * j + 2] + sums[4 * j + 3])
    for half in (16, 8, 4, 2, 1):
        for j in range(half):
            sums[j] += sums[j + half]
    return sums[0]


def _orthonormalize(vectors, batch, rank, length):
    done = np.zeros((rank, (length + 127) // 128 * 128))
    for b in range(batch):
        for a in range(rank):
            vector, left = _floats(vectors + 4 * (b * rank + a) * length), done[a]
            for e in range(length):
                left[e] = vector[e]
            before = _dot(left, left)
            for other in done[:a]:
                part = _dot(other, left)
                for e in range(length):
                    left[e] -= part * other[e]
            after = _dot(left, left)
            norm = np.sqrt(after)
            lost = after <= 1e-12 * before and before < np.inf
            for e in range(length):
                left[e] = 0.0 if lost else left[e] / norm
                vector[e] = left[e]


def _multiply(left, right, out, rank, rows, columns):
    streaming = streams(out, rows * columns) and columns % 16 == 0  # so that every row begins where a vector may
    piece = room()
    for begin in range(0, columns, PIECE):
        n = min(PIECE, columns - begin)
        for i in range(rows):
            target = out + 4 * (i * columns + begin)
            to = _floats(piece if streaming else target)
            for a in range(rank):
                factor, row = _floats(left)[a * rows + i], _floats(right + 4 * (a * columns + begin))
                if a == 0:
                    for e in range(n):
                        to[e] = factor * row[e]
                else:
                    for e in range(n):
                        to[e] += factor * row[e]
            if streaming:
                stream(piece, target, n)
    if streaming:
        settle()


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _selected(
    values: torch.Tensor,
    residual: torch.Tensor | None,
    k: int,
    places: int,
    entries: int,
    *,
    momentum: torch.Tensor | None = None,
    decay: float = 0.0,
    tau: torch.Tensor | None = None,
) -> int:
    """_select, into the part of a wire that begins at an address and holds so many entries."""
    n, slots = values.numel(), pad16(4 * entries) // 4
    capacity = min(n, max(4 * k + _SMALL, _SAMPLES))
    gathered = torch.empty((2, capacity + _LANES), dtype=torch.int32)  # their indices, and they
    addresses = values.data_ptr(), _address(residual), _address(momentum)
    parts = places, places + 4 * slots, slots
    lists = gathered[0].data_ptr(), gathered[1].data_ptr(), capacity
    return int(_compiled(_select)(*addresses, decay, n, k, _address(tau), entries - k, *parts, *lists))


def topk_encode(values: torch.Tensor, residual: torch.Tensor | None, wire: torch.Tensor, k: int) -> None:
    _selected(values, residual, k, wire.data_ptr(), k)


def dgc_encode(
    values: torch.Tensor, residual: torch.Tensor, wire: torch.Tensor, k: int, momentum: torch.Tensor, decay: float
) -> None:
    _selected(values, residual, k, wire.data_ptr(), k, momentum=momentum, decay=decay)


def threshold_encode(
    values: torch.Tensor,
    residual: torch.Tensor | None,
    wire: torch.Tensor,
    k: int,
    slack: int,
    tau: torch.Tensor | None,
) -> None:
    if tau is None:
        tau = torch.zeros(1)
    count = _selected(values, residual, k, wire.data_ptr() + 16, k + slack, tau=tau)
    wire[:16].view(torch.int32).copy_(torch.tensor([count, 0, 0, 0], dtype=torch.int32))


def _scattered(places: int, entries: int, count: int, out: torch.Tensor, add: bool, scale: float) -> None:
    """_scatter, from the part of a wire that begins at an address and has room for so many entries, of which `count`
    are used.
    """
    n = out.numel()
    if _compiled(_scatter)(places, places + pad16(4 * entries), count, out.data_ptr(), n, add, scale):
        raise ValueError(
            f"the wire holds indices outside of [0, {n}) or out of order: it was not encoded from as many numbers"
        )


def topk_decode(wire: torch.Tensor, out: torch.Tensor, k: int, add: bool, scale: float) -> None:
    _scattered(wire.data_ptr(), k, k, out, add, scale)


def threshold_decode(wire: torch.Tensor, out: torch.Tensor, k: int, slack: int, add: bool, scale: float) -> None:
    count = int(wire[:4].view(torch.int32))
    if not 0 <= count <= k + slack:
        raise ValueError(f"the wire holds {count} numbers where there is room for {k + slack}")
    _scattered(wire.data_ptr() + 16, k + slack, count, out, add, scale)


def randomk_encode(values: torch.Tensor, residual: torch.Tensor | None, wire: torch.Tensor, k: int, seed: int) -> None:
    _compiled(_draw)(values.data_ptr(), _address(residual), values.numel(), k, seed, wire.data_ptr(), pad16(4 * k) // 4)


def randomk_decode(wire: torch.Tensor, out: torch.Tensor, k: int, seed: int, add: bool, scale: float) -> None:
    _compiled(_place)(wire.data_ptr(), out.data_ptr(), out.numel(), k, seed, add, scale)


def powersgd_orthonormalize(vectors: torch.Tensor) -> None:
    _compiled(_orthonormalize)(vectors.data_ptr(), *vectors.shape)


def powersgd_multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    _compiled(_multiply)(left.data_ptr(), right.data_ptr(), out.data_ptr(), *left.shape, right.shape[1])
