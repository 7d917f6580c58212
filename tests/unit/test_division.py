"""Batches are divided so that the slowest rank's step is shortest, within bounds; speeds are learned from measured steps."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.trainer.division import WORTH, Cost, Speed, better, divide

costs = st.builds(Cost, st.floats(0, 10), st.floats(0.01, 10))


def slowest(found: list[int], by: list[Cost]) -> float:
    return max(cost.seconds(part) for cost, part in zip(by, found, strict=True))


@given(st.lists(costs, min_size=1, max_size=3), st.integers(1, 14), st.integers(1, 3), st.integers(1, 8))
def test_no_other_division_is_faster(by: list[Cost], samples: int, least: int, span: int) -> None:
    ranks, most = len(by), least + span
    allowed = [
        list(parts) for parts in itertools.product(range(least, most + 1), repeat=ranks) if sum(parts) == samples
    ]
    if not allowed:
        with pytest.raises(ValueError, match="samples are too"):
            divide(samples, by, least, most)
        return
    found = divide(samples, by, least, most)
    assert found in allowed
    assert slowest(found, by) <= min(slowest(parts, by) for parts in allowed) * (1 + 1e-9)
    changed = better(allowed[0], by, least, most)
    assert changed is None or slowest(changed, by) < (1 - WORTH) * slowest(allowed[0], by)


@given(st.lists(costs, min_size=1, max_size=50), st.integers(50, 100_000))
def test_every_sample_of_a_large_batch_is_given_once(by: list[Cost], samples: int) -> None:
    parts = divide(samples, by)
    assert sum(parts) == samples
    assert min(parts) >= 1


@pytest.mark.parametrize(
    ("weights", "samples", "parts"),
    [([3, 1], 8, [6, 2]), ([1, 1], 7, [4, 3]), ([1, 1, 2], 8, [2, 2, 4]), ([1, 1000], 10, [1, 9])],
)
def test_by_hand(weights: list[float], samples: int, parts: list[int]) -> None:
    assert divide(samples, [Cost(0.0, 1 / weight) for weight in weights]) == parts


def cost_after(*measurements: dict[int, float]) -> Cost | None:
    speed = Speed()
    for each in measurements:
        speed.measured(each)
    return speed.cost


def test_a_speed_is_proportional_until_other_batches_show_what_is_fixed() -> None:
    assert cost_after() is None
    assert cost_after({}, {8: 2.0}) == (0.0, 0.25)
    assert cost_after({8: 2.0}, {9: 2.1}) == pytest.approx((0.0, 2.1 / 9))  # the batches are too similar
    assert cost_after({8: 3.0}, {16: 5.0}) == pytest.approx((1.0, 0.25))
    assert cost_after({8: 3.0, 16: 5.0}, {24: 7.0}) == pytest.approx((1.0, 0.25))


@pytest.mark.parametrize("changed", [{8: 6.0}, {24: 20.0}, {16: 2.0}])
def test_measurements_of_a_rank_that_has_changed_are_forgotten(changed: dict[int, float]) -> None:
    (samples, seconds), *_ = changed.items()
    assert cost_after({8: 3.0, 16: 5.0}, changed) == pytest.approx((0.0, seconds / samples))


def test_an_impossible_line_is_not_used() -> None:
    assert cost_after({8: 3.0}, {16: 2.9}) == pytest.approx((0.0, 2.9 / 16))
    assert cost_after({8: 1.0}, {16: 4.0}) == pytest.approx((0.0, 4.0 / 16))
