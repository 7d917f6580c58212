"""The time of allreduces that are called as training calls them, with and without codecs, by which predictions are corrected.

A walk over the messages of a Program ignores wake-ups, caches, and the verb's own work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.plan.algorithms import PLANNERS
from gradwire.collectives.plan.cost import CallCost, Costs
from gradwire.collectives.plan.walk import predict
from gradwire.collectives.shared_tensors import SharedTensors

_INSIDE, _BETWEEN = (1 << 10, 32 << 10, 512 << 10, 4 << 20, 16 << 20), (1 << 10, 4 << 10, 16 << 10)
"""The sizes in bytes, in a host and between hosts."""
_LONGEST_INSIDE_S, _LONGEST_BETWEEN_S = 0.006, 0.0002
"""What a call may be predicted to take, but of the least size. Longer ones follow the links between hosts, which the probe has
measured, and which may save up for bursts meanwhile."""

#: The same with a codec, of float32. Inside a host the walk misses a share of each call's time, and between hosts the time that
#: Python takes between messages, which does not depend on the size.
_CODED_INSIDE, _CODED_BETWEEN = (1 << 10, 64 << 10, 4 << 20), (1 << 10, 64 << 10)

#: A turn makes calls of every algorithm and size, of each for about so long, and at most so many. The first turns leave out those
#: that take long.
_TURNS, _OF_LONG, _TURN_S, _MOST_CALLS = 4, 2, 0.003, 32

#: A link's own algorithm is assumed to be this many times as fast as the fastest other one.
_OWN_FASTER = 8


def time_calls(verbs: SharedTensors, costs: Costs, names: Sequence[str], segment_bytes: int) -> tuple[CallCost, ...]:
    """Return the measured times of allreduces, by algorithm, the same on all ranks. A collective call; raises what allreduce
    raises.

    names: of the algorithms. The number of calls follows from predictions; for a link's own algorithm, see _OWN_FASTER.
    """
    inside = len(costs.hosts) == 1
    sizes, longest_s = (_INSIDE, _LONGEST_INSIDE_S) if inside else (_BETWEEN, _LONGEST_BETWEEN_S)
    calls: dict[tuple[str, int], int] = {}
    for nbytes in sizes:
        predicted = {
            name: predict(costs, "allreduce", name, nbytes, segment_bytes)
            for name in names
            if name in PLANNERS["allreduce"]
        }
        own = min(predicted.values()) / _OWN_FASTER
        for name in names:
            if (seconds := predicted.get(name, own)) <= longest_s or nbytes == sizes[0]:
                calls[name, nbytes] = max(1, min(_MOST_CALLS, int(_TURN_S / seconds)))
    return _call_costs(_in_turns(verbs, calls, lambda part, name: verbs.allreduce(part, algorithm=name)))


def time_codecs(
    verbs: SharedTensors, costs: Costs, codecs: Sequence[Codec], predict: Callable[[int, Codec], float]
) -> tuple[CallCost, ...]:
    """Return what compressed allreduces of float32 took, by the identity of the codec, the same on all ranks. A collective call;
    raises what allreduce raises.

    predict: returns how long one of so many numbers is thought to take.
    """
    named = {codec.identity: codec for codec in codecs}
    calls = {
        (name, nbytes): max(1, min(_MOST_CALLS, int(_TURN_S / predict(nbytes // 4, codec))))
        for name, codec in named.items()
        for nbytes in (_CODED_INSIDE if len(costs.hosts) == 1 else _CODED_BETWEEN)
    }
    return _call_costs(_in_turns(verbs, calls, lambda part, name: verbs.allreduce(part, codec=named[name], step=0)))


def _call_costs(taken: Mapping[tuple[str, int], float]) -> tuple[CallCost, ...]:
    by_name: dict[str, list[tuple[int, float]]] = {}
    for (name, nbytes), seconds in sorted(taken.items()):
        by_name.setdefault(name, []).append((nbytes, seconds))
    return tuple(CallCost("allreduce", name, tuple(points)) for name, points in by_name.items())


def _in_turns(
    verbs: SharedTensors, calls: Mapping[tuple[str, int], int], run: Callable[[torch.Tensor, str], object]
) -> dict[tuple[str, int], float]:
    """Return how long a call of each name and size takes: of the slowest rank, in the quickest turn but one where there are
    four, since other work on a host makes calls longer and never shorter. calls: how many a turn makes. run: makes one."""
    buffer = verbs.empty(max((nbytes for _, nbytes in calls), default=0) // 4).zero_()
    taken: dict[tuple[str, int], list[float]] = {case: [] for case in calls}
    for turn in range(_TURNS):
        for (name, nbytes), number in calls.items():
            if number == 1 and nbytes > _INSIDE[0] and turn < _TURNS - _OF_LONG:
                continue
            part = buffer[: nbytes // 4]
            run(part, name)  # ranks begin together, with no burst saved up
            began = time.perf_counter()
            for _ in range(number):
                run(part, name)
            taken[name, nbytes].append((time.perf_counter() - began) / number)
    slowest = torch.tensor([sorted(times)[len(times) // 4] for times in taken.values()], dtype=torch.float64)
    verbs.allreduce(slowest, "max")
    return dict(zip(taken, slowest.tolist(), strict=True))
