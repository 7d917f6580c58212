"""Integer maths on half-open ranges: how a buffer is cut into blocks, and blocks into segments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """The half-open range [start, stop)."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


#: The place of each block of a schedule in a buffer, in elements; one Span per block.
Layout = tuple[Span, ...]

#: The blocks of a message with all of a buffer that is one block.
WHOLE: Layout = (Span(0, 1),)


def split(span: Span, parts: int) -> Layout:
    """Cut a span into `parts` consecutive spans whose lengths differ by at most one, the longer ones first."""
    base, extra = divmod(span.length, parts)
    return consecutive([base + 1] * extra + [base] * (parts - extra), span.start)


def split_aligned(span: Span, parts: int, alignment: int) -> Layout:
    """Cut a span into `parts` consecutive spans at multiples of `alignment` from its start, as equal as that allows."""
    units = split(Span(0, -(-span.length // alignment)), parts)
    cuts = [min(span.stop, span.start + unit.stop * alignment) for unit in units]
    return tuple(map(Span, [span.start, *cuts], cuts))


def consecutive(lengths: Sequence[int], start: int = 0) -> Layout:
    """Return spans of the given lengths, one after the other."""
    spans = []
    for length in lengths:
        spans.append(Span(start, start + length))
        start += length
    return tuple(spans)


def only(rank: int, size: int, length: int) -> Layout:
    """Return the layout of a buffer that holds the block of one rank and no other."""
    return tuple(Span(0, length if r == rank else 0) for r in range(size))


def circular(start: int, count: int, size: int) -> tuple[Span, ...]:
    """Return the `count` positions from `start` on, modulo `size`, as one span, or as two if they wrap around."""
    start %= size
    if count == 0:
        return ()
    if start + count <= size:
        return (Span(start, start + count),)
    return (Span(start, size), Span(0, start + count - size))


def segments_of_buffer(numel: int, blocks: int, segment: int) -> tuple[Layout, ...]:
    """Cut a buffer into consecutive segments, each cut into `blocks`: for operations that may choose the owner of each element.

    segment: the wanted number of elements in one block of one segment. There is at least one segment, even if numel is 0.
    """
    count = max(1, -(-numel // (segment * blocks)))
    return tuple(split(part, blocks) for part in split(Span(0, numel), count))


def segments_of_blocks(layout: Layout, segment: int) -> tuple[Layout, ...]:
    """Cut every block of a given layout into the same number of slices: for operations whose blocks have owners."""
    longest = max((span.length for span in layout), default=0)
    count = max(1, -(-longest // segment))
    sliced = [split(span, count) for span in layout]
    return tuple(tuple(slices[i] for slices in sliced) for i in range(count))


def joined(spans: Sequence[Span]) -> list[Span]:
    """Return the same positions with adjacent spans merged and empty ones dropped, in order."""
    merged: list[Span] = []
    for span in spans:
        if span.length == 0:
            continue
        if merged and merged[-1].stop == span.start:
            merged[-1] = Span(merged[-1].start, span.stop)
        else:
            merged.append(span)
    return merged
