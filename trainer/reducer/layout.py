"""The layout of gradients in buckets, as pure functions without tensors."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

SMALL_BUCKET_BYTES = 4 * 1024 * 1024
"""The default size of a bucket of gradients on the CPU without a codec. The exchange of a small bucket begins earlier in
backward. With rules.NextForward, a module that waits for the buckets of its parameters waits for few other gradients."""
LARGE_BUCKET_BYTES = 25 * 1024 * 1024
"""The default size of all other buckets: exchanges of codes, and exchanges on GPUs, are short compared with their latency."""
FIRST_BUCKET_BYTES = 1024 * 1024
"""The first bucket is smaller, so that communication starts soon after backward begins."""
ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Item:
    """Describes a gradient. Only gradients of one kind (dtype, device, encoding, group) share a bucket.

    bucket_bytes: the maximum bytes of gradients in its bucket, infinite for no limit; the same for all gradients of its kind.
    grouped: whether all gradients of its kind share one bucket of any size.
    """

    numel: int
    itemsize: int
    kind: Hashable
    bucket_bytes: float
    grouped: bool = False


@dataclass(frozen=True)
class BucketPlan:
    """The places of gradients in one buffer, in elements.

    Gradient items[i] starts at offsets[i], a multiple of ALIGNMENT_BYTES. From presence_offset on there is one element per
    gradient, in the same order: the number of ranks that have it. numel: length of the buffer.
    """

    items: tuple[int, ...]
    offsets: tuple[int, ...]
    presence_offset: int
    numel: int


def plan_buckets(
    items: Sequence[Item], order: Sequence[int], *, first_bucket_bytes: float = FIRST_BUCKET_BYTES
) -> tuple[BucketPlan, ...]:
    """Distribute items over buckets, following the order in which gradients are expected; order holds indices of items.

    A bucket holds at most the bucket_bytes of its items, and the first bucket to fill at most first_bucket_bytes. Exceptions
    are groups, and a single larger gradient, which has its own bucket. Buckets are in the order in which they fill up.
    """
    filling: dict[Hashable, list[int]] = {}
    filled_bytes: Counter[Hashable] = Counter()
    full: list[list[int]] = []
    for index in order:
        kind, wanted = items[index].kind, _padded_bytes(items[index])
        limit = items[index].bucket_bytes if full else min(first_bucket_bytes, items[index].bucket_bytes)
        if kind in filling and not items[index].grouped and filled_bytes[kind] + wanted > limit:
            full.append(filling.pop(kind))
            filled_bytes[kind] = 0
        filling.setdefault(kind, []).append(index)
        filled_bytes[kind] += wanted
    position = {index: place for place, index in enumerate(order)}
    buckets = sorted([*full, *filling.values()], key=lambda members: position[members[-1]])
    return tuple(lay_out(items, members) for members in buckets)


def lay_out(items: Sequence[Item], members: Sequence[int]) -> BucketPlan:
    """Return the plan of a bucket for some of the items, in this order."""
    numels = (_padded_bytes(items[index]) // items[index].itemsize for index in members)
    *offsets, end = itertools.accumulate(numels, initial=0)
    return BucketPlan(tuple(members), tuple(offsets), presence_offset=end, numel=end + len(members))


def packed(members: Sequence[int], shapes: Sequence[Sequence[int]]) -> BucketPlan:
    """Return the plan of a buffer in which tensors of these shapes follow each other, without elements for presence."""
    *offsets, numel = itertools.accumulate(map(math.prod, shapes), initial=0)
    return BucketPlan(tuple(members), tuple(offsets), presence_offset=numel, numel=numel)


def _padded_bytes(item: Item) -> int:
    return -(-item.numel * item.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
