"""The plots of a report, as SVG inside the page. The page's style sheet sets the colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import numpy as np

from gradwire.trainer.tools.report.measured import Floats

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 820, 230, 52, 16, 10, 34
_BINS = 190


def binned(values: Floats, bins: int = _BINS) -> tuple[list[int], list[Floats]]:
    """Return at most `bins` groups of neighbours on the last axis, all equally long except the last, after the index at
    which each begins."""
    places = list(range(0, values.shape[-1], math.ceil(values.shape[-1] / bins)))
    return places, np.split(values, places[1:], axis=-1)


def over_steps(first: int, seconds: Floats, waited: Floats) -> str:
    """Return a plot of the milliseconds of each step: of neighbouring steps, the median, the band from the 10th to the
    90th percentile, and the median wait. seconds, waited: (ranks, steps), from step number `first` on. Steps that took
    much longer than nearly all others are cut off at the top."""
    places, parts = binned(seconds * 1e3)
    low, median, high = np.array([np.nanpercentile(part, (10, 50, 90)) for part in parts]).T
    waits = np.array([np.nanmedian(part) for part in binned(waited * 1e3)[1]])
    top = 1.15 * float(np.percentile(high, 97))
    steps = seconds.shape[1]

    def points(ys: Floats, order: int = 1) -> str:
        across = (_WIDTH - _LEFT - _RIGHT) / max(1, places[-1])
        pairs = [
            (_LEFT + x * across, _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - y / top))
            for x, y in zip(places, ys, strict=True)
        ]
        return " ".join(f"{x:.1f},{max(y, _TOP):.1f}" for x, y in pairs[::order])

    ground = np.zeros_like(waits)
    shapes = [
        f'<polygon class="wait" points="{points(waits)} {points(ground, -1)}"/>',
        f'<polygon class="band" points="{points(low)} {points(high, -1)}"/>',
        f'<polyline class="median" points="{points(median)}"/>',
    ]
    for value in _ticks(top):
        y = _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - value / top)
        shapes.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        shapes.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in [first, *(tick for tick in _ticks(first + steps - 1) if tick > first and tick == int(tick))]:
        x = _LEFT + (value - first) * (_WIDTH - _LEFT - _RIGHT) / max(1, steps - 1)
        shapes.append(f'<text x="{x:.1f}" y="{_HEIGHT - 14}" text-anchor="middle">{value:g}</text>')
    return _svg("Milliseconds of each step", _HEIGHT, shapes)


def who_was_late(late_s: Floats, ranks: Sequence[int]) -> str:
    """Return a drawing with a row for each rank, darker where it began exchanges later. late_s: (ranks, exchanges)."""
    places, parts = binned(late_s, 76)
    means = np.array([part.mean(axis=-1) for part in parts]).T
    most = means.max() or 1.0
    tall = 24 if len(ranks) <= 16 else 12
    width = (_WIDTH - _LEFT - _RIGHT) / len(parts)
    shapes = []
    for row, (rank, values) in enumerate(zip(ranks, means, strict=True)):
        shapes.append(f'<text x="{_LEFT - 8}" y="{row * tall + tall / 2 + 4}" text-anchor="end">{rank}</text>')
        shapes += [
            f'<rect class="late" x="{_LEFT + i * width:.1f}" y="{row * tall}" width="{width - 1:.1f}" height="{tall - 2}" '
            f'fill-opacity="{0.06 + 0.94 * value / most:.2f}"><title>rank {rank}, from exchange {place + 2} on: '
            f"{value * 1e3:.2f} ms late</title></rect>"
            for i, (place, value) in enumerate(zip(places, values, strict=True))
        ]
    return _svg("How late each rank began each exchange", len(ranks) * tall, shapes)


def _ticks(top: float) -> list[float]:
    """Return round numbers from 0 to top, three to six of them."""
    power = 10 ** math.floor(math.log10(top / 3))
    step = next(power * factor for factor in (10, 5, 2, 1) if top / (power * factor) >= 2.4)
    return [step * i for i in range(int(top / step) + 1)]


def _svg(name: str, height: int, shapes: Sequence[str]) -> str:
    content = "".join(shapes)
    return f'<div class="wide"><svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(name)}">{content}</svg></div>'
