"""Cutting buffers: every element lands in exactly one place, evenly, for any numbers."""

from hypothesis import given
from hypothesis import strategies as st

from gradwire.collectives.schedules.spans import (
    Span,
    circular,
    consecutive,
    joined,
    segments_of_blocks,
    segments_of_buffer,
    split,
)

COUNTS = st.integers(0, 10_000)
PARTS = st.integers(1, 70)


@given(COUNTS, COUNTS, PARTS)
def test_split_is_even_and_complete(start: int, length: int, parts: int) -> None:
    spans = split(Span(start, start + length), parts)
    assert len(spans) == parts
    assert joined(spans) == ([Span(start, start + length)] if length else [])
    lengths = [span.length for span in spans]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@given(COUNTS, PARTS, st.integers(1, 500))
def test_segments_of_a_buffer_cover_it(numel: int, blocks: int, segment: int) -> None:
    segments = segments_of_buffer(numel, blocks, segment)
    assert all(len(layout) == blocks for layout in segments)
    assert joined([span for layout in segments for span in layout]) == ([Span(0, numel)] if numel else [])
    assert max(span.length for layout in segments for span in layout) <= segment


@given(st.lists(st.integers(0, 2000), min_size=1, max_size=20), st.integers(1, 500))
def test_segments_of_blocks_keep_the_owners(lengths: list[int], segment: int) -> None:
    layout = consecutive(lengths)
    segments = segments_of_blocks(layout, segment)
    for block, span in enumerate(layout):
        assert joined([slices[block] for slices in segments]) == ([span] if span.length else [])
    assert max(span.length for slices in segments for span in slices) <= segment


@given(st.integers(-200, 200), st.integers(1, 64), st.data())
def test_circular_names_each_position_once(start: int, size: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, size))
    positions = [p for span in circular(start, count, size) for p in range(*span)]
    assert positions == [(start + i) % size for i in range(count)]
