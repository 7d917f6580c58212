"""Batches are divided so that the slowest rank's step is shortest, within bounds; speeds are learned from measured steps."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.trainer.division import USEFUL, WORTH, Cost, Speed, better, divide, equal_parts

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
        with pytest.raises(ValueError, match="global_batch must be at"):
            divide(samples, by, least, most)
        return
    found = divide(samples, by, least, most)
    assert found in allowed
    assert slowest(found, by) <= min(slowest(parts, by) for parts in allowed) * (1 + 1e-9)
    now, equal = slowest(allowed[0], by), equal_parts(samples, ranks, least, most)
    changed = better(allowed[0], by, least, most)
    is_equal = changed == equal and now > (1 - USEFUL) * slowest(equal, by)
    assert changed is None or is_equal or slowest(changed, by) < (1 - WORTH) * now


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


def test_a_rank_that_has_changed_keeps_what_is_fixed_until_it_is_measured_anew() -> None:
    assert cost_after({8: 6.0}, {8: 3.0}) == pytest.approx((0.0, 3.0 / 8))
    assert cost_after({8: 3.0, 16: 5.0}, {16: 15.0}) == pytest.approx((3.0, 0.75))
    assert cost_after({8: 3.0, 16: 5.0}, {16: 15.0}, {8: 13.0}) == pytest.approx((11.0, 0.25))
    assert cost_after({8: 1.0}, {16: 9.0}, {8: 5.0}) == pytest.approx((1.0, 0.5))  # 16 is measured after the change


def test_an_impossible_line_is_not_used() -> None:
    assert cost_after({8: 3.0}, {16: 2.9}) == pytest.approx((2.9, 0.0), abs=1e-3)
    assert cost_after({8: 1.0}, {16: 4.0}) == pytest.approx((0.0, 4.0 / 16))


@pytest.mark.parametrize(
    ("fast", "slow", "changes"),
    [
        (Cost(5, 0.003), Cost(30, 0.003), [[54, 10], [32, 32]]),  # shares cannot help
        (Cost(0, 0.25), Cost(0, 1), [[51, 13]]),
        (Cost(5, 0.25), Cost(10, 1), [[49, 15], [55, 9]]),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_failed_prediction_is_not_repeated(fast: Cost, slow: Cost, changes: list[list[int]], seed: int) -> None:
    """By measurements that vary by half a percent."""
    noise, speeds, parts, found = random.Random(seed), (Speed(), Speed()), [32, 32], []
    for _ in range(20):
        for speed, cost, part in zip(speeds, (fast, slow), parts, strict=True):
            speed.measured({part: cost.seconds(part) * noise.uniform(0.995, 1.005)})
        by = [cost for speed in speeds if (cost := speed.cost) is not None]
        if (changed := better(parts, by, 1, None)) is not None:
            found.append(parts := changed)
    assert len(found) == len(changes)
    assert sum((one - other) ** 2 for one, other in zip(found[-1], changes[-1], strict=True)) <= 8
