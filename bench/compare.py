"""Two competitors of one run beside each other: the only figure that outlives the machine it was measured on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from gradwire.bench.cases import Job
from gradwire.bench.table import Row, format_us
from gradwire.bench.timing import Times
from gradwire.collectives.notation import format_size

RESAMPLES = 2000
FEWEST_TURNS = 8
"""With fewer there is no telling how they scatter, and no interval is given."""


def speedup_interval(seconds: Times, peer_seconds: Times) -> tuple[float, float] | None:
    """Return the 95 % bootstrap interval of the peer's median over ours: where it would fall if the same turns were drawn again.

    None for fewer than FEWEST_TURNS.
    """
    if len(seconds) < FEWEST_TURNS:
        return None
    draw = np.random.default_rng(0)
    ours = np.median(draw.choice(seconds, (RESAMPLES, len(seconds))), axis=1)
    peers = np.median(draw.choice(peer_seconds, (RESAMPLES, len(peer_seconds))), axis=1)
    low, high = np.quantile(peers / ours, [0.025, 0.975])
    return float(low), float(high)


def format_interval(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f"[{interval[0]:.2f}, {interval[1]:.2f}]"


def format_comparison(
    measured: Sequence[tuple[Job, Row, Times]], algorithm: str, peer: str, chosen: Callable[[int], str]
) -> list[str]:
    """Return lines that say how many times as fast `algorithm` is as `peer`, job by job; none where one of them did not run.

    `chosen`: bytes -> what `algorithm` ran as there.
    """
    peers = {job: (row, seconds) for job, row, seconds in measured if row.algorithm == peer}
    ours = [
        (row, seconds, *peers[job]) for job, row, seconds in measured if row.algorithm == algorithm and job in peers
    ]
    if not ours:
        return []
    lines = [
        f"# How many times as fast {algorithm} is as {peer} in this run, with the 95 % interval",
        f"#{'size':>12} {'type':>8} {'redop':>8} {algorithm + ' us':>10} {peer + ' us':>10} {'times':>7}",
    ]
    speedups = [peer_row.time_us / row.time_us for row, _, peer_row, _ in ours]
    for (row, seconds, peer_row, peer_seconds), speedup in zip(ours, speedups, strict=True):
        what = f"#{format_size(row.bytes):>12} {row.dtype:>8} {row.op:>8}"
        times = f"{format_us(row.time_us):>10} {format_us(peer_row.time_us):>10}"
        interval = format_interval(speedup_interval(seconds, peer_seconds))
        lines.append(f"{what} {times} {speedup:7.2f}  {interval:16}  {chosen(row.bytes)}")
    mean = math.exp(sum(map(math.log, speedups)) / len(speedups))
    return [*lines, f"# Geometric mean       : {mean:.2f}  (best {max(speedups):.2f}, worst {min(speedups):.2f})", "#"]
