"""Fit the costs that cannot be measured alone, so that the predicted time of programs equals their measured time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median_low
from typing import NamedTuple, TypeAlias

from gradwire.collectives.schedules.program import Program
from gradwire.collectives.tuning.cost_model import SLOW, Costs, LinkCost, SlowLink
from gradwire.collectives.tuning.simulator import Leg, price

#: The relative error at which a fit ends.
_CLOSE = 0.002

#: A link has bursts if a pause shortens a bulk message by more than this share.
_BURST = 0.05

#: Links whose times differ by less than this factor are taken as equal: measurements of equal ones differ as much.
_EQUAL = 1.2


Programs: TypeAlias = Mapping[int, Program]
"""The programs of all ranks, by rank."""


class Timed(NamedTuple):
    """The programs of all ranks, and the seconds that they took together."""

    programs: Programs
    seconds: float

    @property
    def legs(self) -> list[list[Leg]]:
        """Return by rank its program of float32, in the form that price() takes."""
        return [[Leg(self.programs[rank], 4)] for rank in range(len(self.programs))]


class Pair(NamedTuple):
    """The measurement of two ranks, inside a host or between hosts, while all others are idle.

    swaps: `messages` exchanges of a small message, one after the other; stream: `messages` small messages one way, then one
    back; bulk: an exchange of bulk_bytes each way. saved_s: how many fewer seconds the bulk takes after a pause. moving_byte_s:
    a processor's seconds to send or to receive a byte; None inside a host, where a byte takes no other time.
    """

    swaps: Timed
    stream: Timed
    messages: int
    bulk: Timed
    bulk_bytes: int
    saved_s: float
    moving_byte_s: float | None


class Uplinks(NamedTuple):
    """The measurement of all hosts' uplinks. byte_s: seconds a byte, by host. slow_links: slow connections. of_one_rank:
    whether only one rank of each host took part; a connection is then as fast as its uplink."""

    byte_s: tuple[float, ...]
    slow_links: tuple[SlowLink, ...]
    of_one_rank: bool


class Together(NamedTuple):
    """The measurement of all ranks at once.

    few, many: small allreduces of few and of many messages. inside: large additions inside hosts, on all hosts; None if there
    is one host, or if a host has only one rank. large: a large allreduce.
    """

    few: Timed
    many: Timed
    inside: Timed | None
    large: Timed


def without_waiting(pairs: Sequence[Mapping[int, float]], alone_s: float) -> list[dict[int, float]]:
    """Return the times of pairs of hosts without the waits of ranks that share cores.

    pairs: by host and partner, the seconds a byte with all pairs at once. alone_s: the same of hosts 0 and 1 while all others
    are idle.
    """
    at_once_s = max(_usual(pairs)[:2])
    if pairs[0].get(1, 0.0) > SLOW * at_once_s:  # the connection of these two is slow
        at_once_s = pairs[0][1]
    waiting = max(1.0, at_once_s / alone_s)
    return [{partner: taken / waiting for partner, taken in times.items()} for times in pairs]


def uplinks_of(pairs: Sequence[Mapping[int, float]]) -> list[float]:
    """Return each host's seconds a byte. It is the usual time of the host's pairs, or that of the median host if the two are
    nearly equal. pairs: see without_waiting()."""
    usual = _usual(pairs)
    middle = median_low(usual)
    return [middle if middle / _EQUAL < each < _EQUAL * middle else each for each in usual]


def slow_pairs(pairs: Sequence[Mapping[int, float]]) -> dict[tuple[int, int], float]:
    """Return the pairs of hosts that are slower than the uplinks of both, with their seconds a byte."""
    uplinks = uplinks_of(pairs)
    return {
        (one, other): taken
        for one, times in enumerate(pairs)
        for other, taken in times.items()
        if one < other and taken > SLOW * max(uplinks[one], uplinks[other])
    }


def _usual(pairs: Sequence[Mapping[int, float]]) -> list[float]:
    """Return for each host the median time of its pairs, without those that take more than SLOW times as long as the fastest,
    whose partners may have slower uplinks. The fastest pair alone would be a matter of luck."""
    return [median_low([taken for taken in times.values() if taken <= SLOW * min(times.values())]) for times in pairs]


def costs_of(
    alone: Costs, inside: Pair | None, between: Pair | None, uplinks: Uplinks | None, all_ranks: Together | None
) -> Costs:
    """Return the costs that explain the measurements. alone: the costs that each rank has measured by itself."""
    costs = alone
    if inside is not None:
        costs = _of_pair(costs, "inside", inside)
    if between is not None:
        costs = _of_pair(costs, "between", between)
    if uplinks is not None:
        link, least_s = costs.between, min(uplinks.byte_s)
        if uplinks.of_one_rank or link.byte_s < _EQUAL * least_s:
            link = replace(link, byte_s=min(link.byte_s, least_s))
        costs = replace(costs, uplinks=uplinks.byte_s, slow_links=uplinks.slow_links, between=link)
    return costs if all_ranks is None else _of_all(costs, all_ranks)


def _of_pair(costs: Costs, name: str, pair: Pair) -> Costs:
    per_message_s = max(0.0, pair.stream.seconds - costs.call_s) / (pair.messages + 3)
    costs = _with(costs, name, "message_cpu_s", per_message_s)
    for _ in range(4):  # each fit changes the other
        costs = fitted(costs, name, "latency_s", pair.swaps)
        costs = fitted(costs, name, "message_cpu_s", pair.stream)
    if pair.saved_s > _BURST * pair.bulk.seconds:
        costs = replace(costs, burst_bytes=round(pair.saved_s / pair.bulk.seconds * pair.bulk_bytes))
    all_of_cores = fitted(costs, name, "byte_cpu_s", pair.bulk)
    if pair.moving_byte_s is None:
        return all_of_cores
    least, most = (getattr(each, name).byte_cpu_s for each in (costs, all_of_cores))
    return fitted(
        _with(costs, name, "byte_cpu_s", min(max(least, pair.moving_byte_s), most)), name, "byte_s", pair.bulk
    )


def _of_all(costs: Costs, measured: Together) -> Costs:
    """Fit the costs that rise when all ranks work at once: the costs of messages to small allreduces, and the costs of bytes to
    a large one."""
    few, many, large, large_s = measured.few.legs, measured.many.legs, measured.large.legs, measured.large.seconds

    def messages(factor: float) -> Costs:
        return _scaled(costs, factor, "latency_s", "message_cpu_s")

    # The time that both allreduces share, such as waking up, is a cost of the call.
    more_s = max(0.0, measured.many.seconds - measured.few.seconds)
    costs = messages(root(lambda x: price(messages(x), many) - price(messages(x), few), more_s, 1.0))
    costs = replace(costs, call_s=max(0.0, costs.call_s + measured.few.seconds - price(costs, few)))
    if measured.inside is not None:
        costs = _of_additions(costs, measured.inside)

    def of_cores(factor: float) -> Costs:
        return _scaled(costs, factor, "byte_cpu_s")

    def of_wires(factor: float) -> Costs:
        uplinks = tuple(factor * each for each in costs.uplinks)
        slow_links = tuple(SlowLink(link.pair, factor * link.byte_s) for link in costs.slow_links)
        return replace(_scaled(costs, factor, "byte_s"), uplinks=uplinks, slow_links=slow_links)

    # Small allreduces wake up waiting ranks; messages that follow each other closely do so less often.
    if len(costs.hosts) > 1 and price(messages(0.0), large) < large_s < price(costs, large):
        return messages(_fit(messages, measured.large, 1.0))
    # If the modelled time exceeds the measured time even with free wires, the wires cannot be the error in the model.
    is_of_cores = len(costs.hosts) == 1 or price(of_wires(0.0), large) >= large_s
    shares_cores = any(cores.number < len(cores.ranks) for cores in costs.cores)
    is_slower = shares_cores and large_s > 1.3 * price(of_cores(0.0), large)
    if is_of_cores or is_slower:
        return of_cores(_fit(of_cores, measured.large, 1.0))
    # Links are no faster when all hosts use them than when two do, as measured before.
    return of_wires(max(1.0, _fit(of_wires, measured.large, 1.0)))


def _of_additions(costs: Costs, measured: Timed) -> Costs:
    """Fit the costs of messages inside hosts, or of their bytes."""

    def messages(factor: float) -> Costs:
        return replace(costs, inside=_times(costs.inside, factor, "latency_s", "message_cpu_s"))

    return fitted(messages(_fit(messages, measured, 1.0)), "inside", "byte_cpu_s", measured)


def fitted(costs: Costs, link: str, name: str, measured: Timed) -> Costs:
    """Return costs with one number of a link fitted, so that the predicted time of the programs is the measured one."""
    guess = getattr(getattr(costs, link), name)
    return _with(costs, link, name, _fit(lambda x: _with(costs, link, name, x), measured, guess))


def _with(costs: Costs, link: str, name: str, number: float) -> Costs:
    return replace(costs, **{link: replace(getattr(costs, link), **{name: number})})


def _scaled(costs: Costs, factor: float, *names: str) -> Costs:
    """Return costs in which the named numbers of the links are multiplied by a factor."""
    return replace(costs, inside=_times(costs.inside, factor, *names), between=_times(costs.between, factor, *names))


def _times(link: LinkCost, factor: float, *names: str) -> LinkCost:
    return replace(link, **{name: factor * getattr(link, name) for name in names})


def _fit(made: Callable[[float], Costs], measured: Timed, guess: float) -> float:
    """Return the number x for which made(x) predicts the measured time of the programs."""
    legs = measured.legs
    return root(lambda x: price(made(x), legs), measured.seconds, guess or 1e-6)


def root(seconds_at: Callable[[float], float], seconds: float, guess: float) -> float:
    """Return x >= 0 at which an increasing function of x has the value `seconds`: 0 if the function is larger at 0 already,
    `guess` if it never reaches `seconds`."""
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
