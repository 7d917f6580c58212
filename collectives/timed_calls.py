"""Measured times of allreduces, called as training calls them, which correct the predictions.

A walk over the messages of a Program ignores wake-ups, caches, and the verb's own work.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from gradwire.collectives.plan.algorithms import PLANNERS
from gradwire.collectives.plan.cost import CallCost, Costs
from gradwire.collectives.plan.walk import predict
from gradwire.collectives.shared_tensors import SharedTensors

_INSIDE, _BETWEEN = (1 << 10, 32 << 10, 512 << 10, 4 << 20, 16 << 20), (1 << 10, 4 << 10, 16 << 10)
"""The sizes in bytes, in a host and between hosts."""
_LONGEST_INSIDE_S, _LONGEST_BETWEEN_S = 0.006, 0.0002
"""What a call may be predicted to take, but of the least size. Longer ones follow the links between hosts, which the probe has
measured, and which may save up for bursts meanwhile."""

#: In each turn, every algorithm and size is called for about this long, and at most this many times. The first turns leave out
#: long calls.
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
    taken = _in_turns(verbs, calls, sizes[-1])
    measured = {
        name: tuple((nbytes, taken[name, nbytes]) for nbytes in sizes if (name, nbytes) in taken) for name in names
    }
    return tuple(CallCost("allreduce", name, points) for name, points in measured.items() if points)


def _in_turns(
    verbs: SharedTensors, calls: Mapping[tuple[str, int], int], most_bytes: int
) -> dict[tuple[str, int], float]:
    """Return the seconds of a call of each algorithm and size: those of the slowest rank, in the lower quartile of the turns,
    since other work on a host only makes calls longer. calls: how many a turn makes."""
    buffer = verbs.empty(most_bytes // 4).zero_()
    taken: dict[tuple[str, int], list[float]] = {case: [] for case in calls}
    for turn in range(_TURNS):
        for (name, nbytes), number in calls.items():
            if number == 1 and nbytes > _INSIDE[0] and turn < _TURNS - _OF_LONG:
                continue
            part = buffer[: nbytes // 4]
            verbs.allreduce(part, algorithm=name)  # ranks begin together, with no burst saved up
            began = time.perf_counter()
            for _ in range(number):
                verbs.allreduce(part, algorithm=name)
            taken[name, nbytes].append((time.perf_counter() - began) / number)
    slowest = torch.tensor([sorted(times)[len(times) // 4] for times in taken.values()], dtype=torch.float64)
    verbs.allreduce(slowest, "max")
    return dict(zip(taken, slowest.tolist(), strict=True))
