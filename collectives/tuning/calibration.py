"""Compute the costs that explain measurements: of two ranks, of all pairs of hosts, and of small allreduces by all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median_low
from typing import NamedTuple

from gradwire.collectives.tuning.cost_model import SLOW, Costs, LinkCost
from gradwire.collectives.tuning.simulator import Leg, price

#: The relative error at which a fit ends.
_CLOSE = 0.002

#: The least factor by which calls change the costs of messages: two calls that seem equally long do not make messages free.
_LEAST_FACTOR = 0.25

#: Links whose times differ by less than this factor are taken as equal: measurements of equal ones differ as much.
EQUAL = 1.2


class Pair(NamedTuple):
    """The seconds that two ranks took, inside a host or between hosts, while all others were idle.

    swaps_s: for `messages` exchanges of a small message, one after the other. stream_s: for `messages` small messages one way,
    then one back. bulk_s: for an exchange of bulk_bytes each way. moving_byte_s: a processor's seconds to send or to receive a
    byte; None inside a host, where a byte takes no other time.
    """

    messages: int
    swaps_s: float
    stream_s: float
    bulk_s: float
    bulk_bytes: int
    moving_byte_s: float | None


def link_of(pair: Pair, call_s: float) -> LinkCost:
    """Return the cost of a message between two ranks, by the times that the simulator has for these exchanges. call_s: the time
    of a call beside its messages.

    In an exchange of a small message, each rank sends it, waits for the latency, and takes the other's. In a stream, a rank takes
    a message while the other sends the next one. In a bulk exchange, a processor's or the link's time for the bytes decides.
    """
    swap_s = max(0.0, pair.swaps_s - call_s) / pair.messages
    message_cpu_s = max(0.0, pair.stream_s - call_s - 2 * swap_s) / (pair.messages - 1)
    latency_s = max(0.0, swap_s - 2 * message_cpu_s)
    moving_s = max(0.0, pair.bulk_s - call_s - 2 * message_cpu_s)
    byte_cpu_s = moving_s / 2 / pair.bulk_bytes
    if pair.moving_byte_s is None:
        return LinkCost(latency_s, 0.0, message_cpu_s, byte_cpu_s)
    byte_s = max(0.0, moving_s - latency_s) / pair.bulk_bytes
    return LinkCost(latency_s, byte_s, message_cpu_s, min(pair.moving_byte_s, byte_cpu_s))


def calibrated(
    costs: Costs, few: Sequence[Sequence[Leg]], few_s: float, many: Sequence[Sequence[Leg]], many_s: float
) -> tuple[float, float]:
    """Return the factor of the costs of messages, and the cost of a call, that explain the times of two small allreduces by all
    ranks: these costs rise when all ranks work at once. few, many: by rank, the programs with few and with many messages."""

    def differ_by_s(factor: float) -> float:
        return price(costs.with_messages(factor), many) - price(costs.with_messages(factor), few)

    # The time that both allreduces share, such as waking up, is a cost of the call.
    factor = max(_LEAST_FACTOR, root(differ_by_s, max(0.0, many_s - few_s), 1.0))
    return factor, max(0.0, costs.call_s + few_s - price(costs.with_messages(factor), few))


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
    return [middle if middle / EQUAL < each < EQUAL * middle else each for each in usual]


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
