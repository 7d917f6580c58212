"""Planning of buckets, by property, and the order in which they come."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from gradwire.trainer.reducer.layout import ALIGNMENT_BYTES, Item, plan_buckets

KINDS = {"a": 4, "b": 2, "c": 8}


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[Item], list[int], int]:
    """Items, a subset of them in some order, and first_bucket_bytes."""
    kinds = draw(st.lists(st.sampled_from(sorted(KINDS)), max_size=30))
    most = {kind: draw(st.integers(1, 2000)) for kind in KINDS}
    items = [Item(draw(st.integers(0, 200)), KINDS[kind], kind, most[kind]) for kind in kinds]
    order = draw(st.permutations(range(len(items))))[: draw(st.integers(0, len(items)))]
    return items, list(order), draw(st.integers(1, 500))


def nbytes(item: Item) -> int:
    return -(-item.numel * item.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@given(plans())
def test_every_item_has_a_place_of_its_own(case: tuple[list[Item], list[int], int]) -> None:
    items, order, first = case
    planned = plan_buckets(items, order, first_bucket_bytes=first)
    assert sorted(index for bucket in planned for index in bucket.items) == sorted(order)
    for bucket in planned:
        assert len({items[index].kind for index in bucket.items}) == 1
        spans = [(start, start + items[i].numel) for i, start in zip(bucket.items, bucket.offsets, strict=True)]
        for (_, stop), (start, _) in zip(spans, [*spans[1:], (bucket.presence_offset, 0)], strict=True):
            assert stop <= start
        assert bucket.numel == bucket.presence_offset + len(bucket.items)
        for index, offset in zip(bucket.items, bucket.offsets, strict=True):
            assert offset * items[index].itemsize % ALIGNMENT_BYTES == 0


@given(plans())
def test_buckets_keep_to_their_size(case: tuple[list[Item], list[int], int]) -> None:
    items, order, first = case
    planned = plan_buckets(items, order, first_bucket_bytes=first)
    for bucket in planned:
        assert bucket.items
        assert (
            len(bucket.items) == 1 or sum(nbytes(items[i]) for i in bucket.items) <= items[bucket.items[0]].bucket_bytes
        )


@given(plans())
def test_buckets_come_in_the_order_in_which_they_fill(case: tuple[list[Item], list[int], int]) -> None:
    items, order, first = case
    planned = plan_buckets(items, order, first_bucket_bytes=first)
    position = {index: place for place, index in enumerate(order)}
    for bucket in planned:
        assert sorted(bucket.items, key=position.__getitem__) == list(bucket.items)
    assert sorted(planned, key=lambda bucket: position[bucket.items[-1]]) == list(planned)
    for kind in KINDS:
        of_kind = [index for bucket in planned if items[bucket.items[0]].kind == kind for index in bucket.items]
        assert of_kind == [index for index in order if items[index].kind == kind]


@given(plans())
def test_buckets_are_not_needlessly_many(case: tuple[list[Item], list[int], int]) -> None:
    """A bucket is closed when the next item of its kind does not fit in; one, the first to be full, earlier than others."""
    items, order, first = case
    planned = plan_buckets(items, order, first_bucket_bytes=first)
    wanted = []
    for kind in KINDS:
        buckets = [bucket.items for bucket in planned if items[bucket.items[0]].kind == kind]
        wanted += [
            (sum(nbytes(items[i]) for i in (*bucket, following[0])), items[bucket[0]].bucket_bytes)
            for bucket, following in itertools.pairwise(buckets)
        ]
    early = [total for total, most in wanted if total <= most]
    assert len(early) <= 1
    assert all(total > first for total in early)


def test_an_example() -> None:
    """Four gradients of 1024 bytes and one of 8192: the first bucket takes one, the large one stays alone."""
    items = [Item(256, 4, "a", 2048) for _ in range(4)] + [Item(2048, 4, "a", 2048)]
    planned = plan_buckets(items, [3, 2, 1, 4, 0], first_bucket_bytes=1024)
    assert [bucket.items for bucket in planned] == [(3,), (2, 1), (4,), (0,)]
    assert planned[1].offsets == (0, 256)
    assert (planned[1].presence_offset, planned[1].numel) == (512, 514)
