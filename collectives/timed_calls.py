"""The time of allreduces that are called as training calls them, with and without codecs, by which predictions are corrected.

A walk over the messages of a Program ignores wake-ups, caches, and the verb's own work.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch

from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.parsing import format_size
from gradwire.collectives.schedules.algorithms import PLANNERS
from gradwire.collectives.schedules.cost import CallCost, Costs
from gradwire.collectives.schedules.walk import predict
from gradwire.collectives.shared_tensors import SharedTensors

_SMALL = 16 << 10
_INSIDE, _BETWEEN = (1 << 10, 32 << 10, 512 << 10, 4 << 20, 16 << 20), (1 << 10, 4 << 10, _SMALL, 1 << 20)
"""The sizes in bytes, in a host and between hosts."""
_LONGEST_INSIDE_S, _LONGEST_BETWEEN_S, _LONGEST_LARGE_S = 0.006, 0.0002, 0.005
"""The longest predicted times of calls that are timed: inside a host; between hosts, of _SMALL bytes at most; between hosts,
of more. The least size is always timed. Longer calls between hosts follow the links, which the probe has measured, and which may
save up for bursts meanwhile."""

_CODED_INSIDE, _CODED_BETWEEN = (1 << 10, 64 << 10, 4 << 20), (1 << 10, 8 << 10, 128 << 10, 1 << 20, 4 << 20)
"""The same with a codec, of float32. The walk lacks a time per call. Inside a host, the rest of its time is also off by a factor.
Between hosts, it also lacks a time between messages if Python runs the codec. That time is the same for all sizes once every
rank encodes a part: the first two sizes show it, at which the links have little to do. If the links are quick, the walk also
lacks a time per byte: codes are copied and numbers are read from memory. If many ranks share cores, it expects more wake-ups of
large calls than there are."""
_LONGEST_CODED_S = 0.01
"""What a large call between hosts may be predicted to take. If it takes longer, the links are slow and decide its time."""

_RIVALS_INSIDE, _RIVALS_BETWEEN = (4 << 10, 128 << 10, 2 << 20), (64 << 10, 256 << 10, 4 << 20)
"""More sizes, at which only rivals are timed: algorithms that predictions cannot separate."""
_NEAR, _LONGEST_RIVAL_S = 1.25, 0.01
"""The most predicted time of a rival, as a multiple of the fastest one's, and in seconds."""

#: A turn makes calls of every algorithm and size, of each for about so long, but not more than the most calls, nor fewer than the
#: least if they are small: the first calls of a row wake up ranks, so short rows seem slower than a training's calls.
_TURNS, _TURN_S, _LEAST_CALLS, _MOST_CALLS = 3, 0.01, 4, 32

#: A link's own algorithm is assumed to be this many times as fast as the fastest other one.
_OWN_FASTER = 8

_log = logging.getLogger("gradwire")


def time_calls(verbs: SharedTensors, costs: Costs, names: Sequence[str], segment_bytes: int) -> tuple[CallCost, ...]:
    """Return the measured times of allreduces, by algorithm, the same on all ranks. A collective call; raises what allreduce
    raises.

    names: of the algorithms. The number of calls follows from predictions; for a link's own algorithm, see _OWN_FASTER.
    """
    inside = len(costs.hosts) == 1
    sizes = _INSIDE if inside else _BETWEEN
    cases = [(name, nbytes) for nbytes in sizes for name in names]

    def seconds_of(name: str, nbytes: int) -> float:
        if name in PLANNERS["allreduce"]:
            return predict(costs, "allreduce", name, nbytes, segment_bytes)
        others = [seconds_of(other, nbytes) for other in names if other in PLANNERS["allreduce"]]
        return min(others, default=_LONGEST_INSIDE_S) / _OWN_FASTER

    def longest_s(nbytes: int) -> float:
        if nbytes == sizes[0]:
            return math.inf
        return _LONGEST_INSIDE_S if inside else _LONGEST_BETWEEN_S if nbytes <= _SMALL else _LONGEST_LARGE_S

    def at_least_s(name: str, nbytes: int) -> float:
        """Return the predicted seconds, or a bound of them if that is too long already: then nobody needs the prediction."""
        bound_s = nbytes * max(costs.uplinks)  # an uplink carries the buffer at least once
        if name in PLANNERS["allreduce"]:
            bound_s = max(bound_s, costs.call_s)
        return bound_s if bound_s > longest_s(nbytes) else seconds_of(name, nbytes)

    predicted = _shared(verbs, cases, at_least_s)
    calls = {case: _number(seconds, case[1]) for case, seconds in predicted.items() if seconds <= longest_s(case[1])}
    return _call_costs(_timed(verbs, costs, calls))


def time_rivals(verbs: SharedTensors, costs: Costs, names: Sequence[str], segment_bytes: int) -> tuple[CallCost, ...]:
    """Time the algorithms that predictions cannot separate, at a few more sizes, and return the measured times of all
    algorithms, these included, the same on all ranks. A collective call; raises what allreduce raises.

    names: of algorithms that time_calls() has timed. costs: with their measured times.
    """
    known = {(call.algorithm, nbytes): seconds for call in costs.calls for nbytes, seconds in call.measured}
    sizes = _RIVALS_INSIDE if len(costs.hosts) == 1 else _RIVALS_BETWEEN
    cases = [(name, nbytes) for nbytes in sizes for name in names]
    predicted = _shared(verbs, cases, lambda name, nbytes: predict(costs, "allreduce", name, nbytes, segment_bytes))
    calls: dict[tuple[str, int], int] = {}
    for nbytes in sizes:
        most_s = min(_LONGEST_RIVAL_S, _NEAR * min(predicted[name, nbytes] for name in names))
        rivals = {case: predicted[case] for name in names if predicted[case := (name, nbytes)] <= most_s}
        if len(rivals) > 1:
            calls.update({case: _number(seconds, nbytes) for case, seconds in rivals.items()})
    taken = _timed(verbs, costs, calls)
    if verbs.rank == 0:
        for (name, nbytes), seconds in taken.items():
            times = f"{1e3 * seconds:.3g} ms ({1e3 * predicted[name, nbytes]:.3g} predicted)"
            _log.info("gradwire: allreduce of %s: %s takes %s", format_size(nbytes), name, times)
    return _call_costs(known | taken)


def time_codecs(
    verbs: SharedTensors, costs: Costs, codecs: Sequence[Codec], predict: Callable[[int, Codec], float]
) -> tuple[CallCost, ...]:
    """Return what compressed allreduces of float32 took, by the identity of the codec, the same on all ranks. A collective call;
    raises what allreduce raises.

    predict: returns how long one of so many numbers is thought to take.
    """
    named = {codec.identity: codec for codec in codecs}
    inside = len(costs.hosts) == 1

    cases = [(name, nbytes) for nbytes in (_CODED_INSIDE if inside else _CODED_BETWEEN) for name in named]
    predicted = _shared(verbs, cases, lambda name, nbytes: predict(nbytes // 4, named[name]))
    calls = {
        (name, nbytes): _number(seconds, nbytes)
        for (name, nbytes), seconds in predicted.items()
        if inside or nbytes <= _SMALL or seconds <= _LONGEST_CODED_S
    }
    # Not the minimum: in a lucky turn, ranks that share cores do not encode at the same time.
    return _call_costs(
        _in_turns(
            verbs, costs, calls, lambda part, name: verbs.allreduce(part, compression=named[name], step=0), median
        )
    )


def spend_bursts(verbs: SharedTensors, costs: Costs) -> None:
    """Use up what the links between hosts have saved for bursts, as calls that follow each other do, which the predictions are
    of. A collective call."""
    if costs.burst_bytes:
        # A ring loads every link in both directions.
        verbs.allreduce(torch.zeros(2 * costs.burst_bytes // 4, dtype=torch.float32, device="cpu"), algorithm="ring")


def _shared(
    verbs: SharedTensors, cases: Sequence[tuple[str, int]], predict: Callable[[str, int], float]
) -> dict[tuple[str, int], float]:
    """Return the predicted seconds of each name and size, the same on all ranks. Each rank computes a part of them."""
    mine = [predict(*case) if index % verbs.size == verbs.rank else 0.0 for index, case in enumerate(cases)]
    seconds = torch.tensor(mine, dtype=torch.float64, device="cpu")
    verbs.allreduce(seconds, algorithm="recursive_doubling")
    return dict(zip(cases, seconds.tolist(), strict=True))


def _number(seconds: float, nbytes: int) -> int:
    """Return how many calls of so many seconds and bytes a turn makes."""
    return max(_LEAST_CALLS if nbytes <= _SMALL else 1, min(_MOST_CALLS, int(_TURN_S / seconds)))


def _call_costs(taken: Mapping[tuple[str, int], float]) -> tuple[CallCost, ...]:
    by_name: dict[str, list[tuple[int, float]]] = {}
    for (name, nbytes), seconds in sorted(taken.items()):
        by_name.setdefault(name, []).append((nbytes, seconds))
    return tuple(CallCost("allreduce", name, tuple(points)) for name, points in by_name.items())


def _timed(verbs: SharedTensors, costs: Costs, calls: Mapping[tuple[str, int], int]) -> dict[tuple[str, int], float]:
    """Return how long an allreduce by each algorithm and of each size takes. calls: how many a turn makes."""
    # Other work on a host makes calls longer and never shorter.
    return _in_turns(verbs, costs, calls, lambda part, name: verbs.allreduce(part, algorithm=name), min)


def _in_turns(
    verbs: SharedTensors,
    costs: Costs,
    calls: Mapping[tuple[str, int], int],
    run: Callable[[torch.Tensor, str], object],
    typical: Callable[[Sequence[float]], float],
) -> dict[tuple[str, int], float]:
    """Return how long a call of each name and size takes on the slowest rank. calls: how many a turn makes. run: makes one.
    typical: returns a rank's time for its times in the turns."""
    buffer = verbs.empty(max((nbytes for _, nbytes in calls), default=0) // 4).zero_()
    taken: dict[tuple[str, int], list[float]] = {case: [] for case in calls}
    for _ in range(_TURNS):
        spend_bursts(verbs, costs)
        for (name, nbytes), number in calls.items():
            part = buffer[: nbytes // 4]
            run(part, name)  # ranks begin together
            began = time.perf_counter()
            for _ in range(number):
                run(part, name)
            taken[name, nbytes].append((time.perf_counter() - began) / number)
    slowest = torch.tensor([typical(times) for times in taken.values()], dtype=torch.float64, device="cpu")
    verbs.allreduce(slowest, "max", algorithm="recursive_doubling")
    return dict(zip(taken, slowest.tolist(), strict=True))
