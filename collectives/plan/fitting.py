"""Costs that cannot be measured alone, fitted so that the walk through programs takes as long as was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from gradwire.collectives.plan.cost import Costs, LinkCost
from gradwire.collectives.plan.program import Program
from gradwire.collectives.plan.walk import Leg, price

#: The relative error at which a fit ends.
_CLOSE = 0.002


def legs(programs: Sequence[Program]) -> list[list[Leg]]:
    """Return by rank its program, of float32, as price() takes it."""
    return [[Leg(program, 4)] for program in programs]


def fitted(costs: Costs, link: str, name: str, programs: Sequence[Program], seconds: float) -> Costs:
    """Return costs with one number of a link fitted, so that the predicted time of the programs is `seconds`."""

    def made(x: float) -> Costs:
        return replace(costs, **{link: replace(getattr(costs, link), **{name: x})})

    return made(fit(made, programs, seconds, getattr(getattr(costs, link), name)))


def scaled(costs: Costs, factor: float, *names: str) -> Costs:
    """Return costs in which the named numbers of the links are multiplied by a factor."""

    def times(link: LinkCost) -> LinkCost:
        return replace(link, **{name: factor * getattr(link, name) for name in names})

    return replace(costs, inside=times(costs.inside), between=times(costs.between))


def fit(made: Callable[[float], Costs], programs: Sequence[Program], seconds: float, guess: float) -> float:
    """Return the number x for which made(x) predicts `seconds` for the programs."""
    by_rank = legs(programs)
    return root(lambda x: price(made(x), by_rank), seconds, guess or 1e-6)


def root(seconds_at: Callable[[float], float], seconds: float, guess: float) -> float:
    """Return x >= 0 at which an increasing function of x has the value `seconds`: 0 if it is larger there already, `guess` if
    it never reaches it."""
    low, high = 0.0, guess
    at_low, at_high = seconds_at(low), seconds_at(high)
    if at_low >= seconds:
        return 0.0
    while at_high < (1 - _CLOSE) * seconds:
        low, at_low, high = high, at_high, 4 * high
        if high > 1e6 * guess:
            return guess
        at_high = seconds_at(high)
    if at_high <= (1 + _CLOSE) * seconds:
        return high
    for _ in range(12):
        middle = low + (high - low) * min(0.9, max(0.1, (seconds - at_low) / (at_high - at_low)))
        at_middle = seconds_at(middle)
        if abs(at_middle - seconds) <= _CLOSE * seconds:
            return middle
        if at_middle < seconds:
            low, at_low = middle, at_middle
        else:
            high, at_high = middle, at_middle
    return high
