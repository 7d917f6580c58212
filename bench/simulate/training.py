"""A replay of a training step: when backward computes each gradient, and when the exchange of the gradient ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from gradwire.bench.simulate.models import Weight
from gradwire.trainer.reducer.layout import LARGE_BUCKET_BYTES, Item, plan_buckets

#: How gradients are exchanged: all at once after backward; each one as soon as it is ready; in the buckets of
#: DistributedOptimizer; merged if waiting for the next gradient costs less than a message (MG-WFBP, Shi et al., 2019).
EXCHANGES = ("bsp", "wfbp", "buckets", "mg-wfbp")

Times = NDArray[np.float64]


#: Backward takes two thirds of the computing: it has two multiplications for each one of the forward pass.
_BACKWARD = 2 / 3


@dataclass(frozen=True)
class SimulatedBucket:
    """Gradients that are exchanged together. ready: the share of a step's computing after which all of them are ready."""

    ready: float
    numel: int


def gradients(weights: Sequence[Weight]) -> list[SimulatedBucket]:
    """Return the gradients in the order of the backward pass. The time of each is proportional to its forward operations."""
    total = sum(weight.operations for weight in weights)
    done = accumulate(weight.operations for weight in reversed(weights))
    return [
        SimulatedBucket(1 - _BACKWARD * (1 - share / total), weight.numel)
        for share, weight in zip(done, reversed(weights), strict=True)
    ]


def buckets(
    exchange: str, weights: Sequence[Weight], step_s: float, seconds: Callable[[int], float]
) -> list[SimulatedBucket]:
    """Return the buckets, in order. exchange: one of EXCHANGES. seconds: returns the time to exchange numel numbers."""
    arriving = gradients(weights)
    if exchange == "bsp":
        return [SimulatedBucket(1.0, sum(each.numel for each in arriving))]
    if exchange == "wfbp":
        return arriving
    if exchange == "mg-wfbp":
        return _merged(arriving, step_s, seconds)
    items = [Item(each.numel, 4, None, LARGE_BUCKET_BYTES) for each in arriving]
    plans = plan_buckets(items, range(len(items)))
    return [SimulatedBucket(arriving[plan.items[-1]].ready, plan.numel) for plan in plans]


def _merged(
    arriving: Sequence[SimulatedBucket], step_s: float, seconds: Callable[[int], float]
) -> list[SimulatedBucket]:
    """Merge a gradient with those before it, if it is ready less than a message's time after their exchange can begin."""
    message_s = seconds(1)
    merged: list[SimulatedBucket] = []
    last, free_s = arriving[0], 0.0
    for each in arriving[1:]:
        begins_s = max(free_s, last.ready * step_s)
        if each.ready * step_s < begins_s + message_s:
            last = SimulatedBucket(each.ready, last.numel + each.numel)
        else:
            merged.append(last)
            free_s, last = begins_s + seconds(last.numel), each
    return [*merged, last]


def step_seconds(computing_s: Times, exchanged: Sequence[SimulatedBucket], seconds: Callable[[int], float]) -> Times:
    """Return the seconds of each step, of shape (steps,). computing_s: the computing time of the slowest rank in each step.
    Every exchange waits for that rank."""
    free_s = np.zeros_like(computing_s)
    for bucket in exchanged:
        free_s = np.maximum(free_s, bucket.ready * computing_s) + seconds(bucket.numel)
    return np.maximum(free_s, computing_s)


def slowest(sigma: float, seed: int, steps: int, ranks: int, every: int) -> Times:
    """Return the slowest rank's computing time for `every` steps, over its mean, of shape (steps,). A rank's time in a step is
    lognormal with mean 1; sigma: the standard deviation of its logarithm."""
    generator = np.random.default_rng(seed)
    draws = (generator.lognormal(-(sigma**2) / 2, sigma, (every, ranks)) for _ in range(steps))
    return np.array([each.sum(axis=0).max() / every for each in draws])


def useful_share(
    rank_hours: float, checkpoint_s: float, restart_s: float, ranks: int, spare: int = 0, seed: int = 0
) -> float:
    """Return the share of the time that failures of ranks leave. A failure costs the work since the last checkpoint, and
    restart_s. Writing a checkpoint takes no time here.

    rank_hours: the mean time until a rank fails. spare: the number of ranks that may fail without a restart.
    """
    draws = np.random.default_rng(seed).exponential(rank_hours * 3600, (10_000, spare + 1))
    lasts_s = (draws / (ranks - np.arange(spare + 1))).sum(axis=1)
    kept_s = np.floor(lasts_s / checkpoint_s) * checkpoint_s
    return float(kept_s.sum() / (lasts_s + restart_s).sum())
