"""The selection of the largest of n numbers by their keys, as indices and values, for the sparse codecs."""

from __future__ import annotations

import numpy as np
from numba import float32, int32, int64, njit

from gradwire.collectives.kernels.cpu.blocks import random_bits
from gradwire.collectives.kernels.cpu.intrinsics import float32_at, float_of, int32_at
from gradwire.collectives.kernels.cpu.keys import (
    INFINITY_KEY,
    LANES,
    NAN_KEY,
    TILE,
    bits_set,
    forget_non_finite,
    key_of,
    kth_largest,
    lowest_bit,
    reaching,
)
from gradwire.collectives.kernels.layout import SELECT_LEAST, SELECT_SAMPLES

_AHEAD = 4  # as many of a word are appended without asking
SMALL = SELECT_LEAST  # numbers that are not worth a guess
SAMPLES = SELECT_SAMPLES  # that a guess looks at, at most
SIDE_BY_SIDE = 4  # of them, read from memory at once; of more, too many might be alike


@njit
def _gather(source, begin, end, key, indices, found, capacity, count):
    """Append the numbers in [begin, end) that reach a key. Return their count, which may exceed the room.

    The number of matches in a word is unpredictable, so _AHEAD are appended without a branch; surplus ones are overwritten.
    """
    numbers, bits = float32_at(source), int32_at(source)
    indices_at, found_at = int32_at(indices), float32_at(found)
    for block in range(begin, end, LANES):
        mask = 0
        if block + LANES <= end:
            mask = reaching(source + 4 * block, key)
            if count + _AHEAD <= capacity:
                after = count + bits_set(mask)
                for ahead in range(_AHEAD):
                    i = block + (lowest_bit(mask) & (LANES - 1))
                    indices_at[count + ahead] = i
                    found_at[count + ahead] = numbers[i]
                    mask &= mask - 1
                count = min(after, count + _AHEAD)
        else:
            for lane in range(end - block):
                mask |= int64((int64(bits[block + lane]) & 0x7FFFFFFF) >= key) << lane
        if count > capacity:
            count += bits_set(mask)
            continue
        while mask != 0:
            i = block + lowest_bit(mask)
            indices_at[count] = i
            found_at[count] = numbers[i]
            count += 1
            mask &= mask - 1
    return count


@njit
def _scan(values, residual, momentum, decay, n, key, indices, found, capacity):
    """Set momentum = decay * momentum + values, add it or else the values to the residual, and gather from the sums."""
    v, r, m = float32_at(values), float32_at(residual), float32_at(momentum)
    count = 0
    for begin in range(0, n, TILE):
        end = min(begin + TILE, n)
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
    """Return a key that k numbers and a few more will reach, four deviations of a count in a sample.

    drawn: room for the sample.
    """
    if n <= SMALL:
        return 0
    v, r, m, sample = float32_at(values), float32_at(residual), float32_at(momentum), float32_at(drawn)
    places = min(max(n // 256, 1024), SAMPLES) // SIDE_BY_SIDE
    samples = places * SIDE_BY_SIDE
    expected = samples * k / n
    wanted = int64(expected + 4 * np.sqrt(expected) + 4)
    if wanted >= samples:
        return 0
    stride = n // places - SIDE_BY_SIDE + 1
    for place in range(places):
        # No stride that the rows of a matrix might share.
        first = place * n // places + ((random_bits(place, 0) * stride) >> 32)
        for i in range(first, first + SIDE_BY_SIDE):
            number = v[i]
            if momentum != 0:
                number += decay * m[i]
            if residual != 0:
                number += r[i]
            sample[place * SIDE_BY_SIDE + i - first] = number
    key, _ = kth_largest(drawn, samples, wanted)
    return max(key, 1)  # where most are zero, those that are not are few


@njit
def _emit(indices, found, count, key, ties, wanted, written, wire_indices, wire_values, residual, momentum):
    """Send the numbers above the key, and the first `ties` of those that have it. Return (written, ties left)."""
    numbers, bits, places = float32_at(found), int32_at(found), int32_at(indices)
    out_i, out_v, r, m = int32_at(wire_indices), float32_at(wire_values), float32_at(residual), float32_at(momentum)
    begin = written
    for e in range(count):
        if written == wanted:
            break
        number_key = key_of(bits[e])
        tie = (number_key == key) & (ties > 0)
        sent = (number_key > key) | tie
        # Whether a number is sent is unpredictable, so it is written without a branch: if not sent, the next one overwrites it.
        out_i[written] = places[e]
        out_v[written] = numbers[e] if number_key < NAN_KEY else float32(np.nan)
        written += sent
        ties -= tie
    if residual != 0:
        for e in range(begin, written):
            r[out_i[e]] = 0
    if momentum != 0:
        for e in range(begin, written):
            m[out_i[e]] = 0
    return written, ties


def select(
    values, residual, momentum, decay, n, k, tau, slack, wire_indices, wire_values, slots, indices, found, capacity
):
    """Write the largest of n numbers as indices and values, then zeros up to `slots`. Return how many, without `tau` k.

    The numbers that reach a guessed key are gathered in the pass that adds the residual; the k-th largest is searched among
    them, or if the guess was bad, among all.
    """
    if k == 0:
        return 0
    sums = residual if residual != 0 else values

    key = key_of(int32_at(tau)[0]) if tau != 0 else 0
    adapted = key > 0
    if not adapted:
        key = _guess(values, residual, momentum, decay, n, k, found)
    count = _scan(values, residual, momentum, decay, n, key, indices, found, capacity)
    wanted = ties = count
    gathered = True
    if adapted and k - slack <= count <= k + slack:
        now = float32_at(tau)[0]
        float32_at(tau)[0] = now * (float32(1) + float32(count - k) / float32(8 * k))
    else:
        if adapted and not k <= count <= capacity:
            key = _guess(sums, 0, 0, decay, n, k, found)
            count = _scan(sums, 0, 0, decay, n, key, indices, found, capacity)
        wanted = k
        if k <= count <= capacity:
            key, ties = kth_largest(found, count, k)
        else:
            gathered = False
            if count < k and key == 1:  # all that is not zero, and some zeros
                key, ties = 0, k - count
            else:
                key, ties = kth_largest(sums, n, k)
        if tau != 0:
            float32_at(tau)[0] = float_of(int32(key)) if key < INFINITY_KEY else 0

    written = 0
    if gathered:
        written, ties = _emit(
            indices, found, count, key, ties, wanted, written, wire_indices, wire_values, residual, momentum
        )
    else:
        for begin in range(0, n, TILE):
            end, least = min(begin + TILE, n), key if ties > 0 else key + 1
            count = _gather(sums, begin, end, least, indices, found, capacity, 0)
            written, ties = _emit(
                indices, found, count, key, ties, wanted, written, wire_indices, wire_values, residual, momentum
            )
            if written == wanted:
                break
    if residual != 0 and key >= INFINITY_KEY:
        forget_non_finite(residual, momentum, n)
    for e in range(written, slots):
        int32_at(wire_indices)[e] = 0
        float32_at(wire_values)[e] = 0
    return written
