"""The time of allreduces that are called as training calls them, by which predictions are corrected.

A walk over the messages of a Program knows nothing of wake-ups, of caches, and of what the verb does itself.
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

#: A turn makes calls of every algorithm and size, of each for about so long, and at most so many. The first turns leave out those
#: that take long.
_TURNS, _OF_LONG, _TURN_S, _MOST_CALLS = 4, 2, 0.003, 32

#: How many times as fast as others a link's own algorithm may be.
_OWN_FASTER = 8


def time_calls(verbs: SharedTensors, costs: Costs, names: Sequence[str], segment_bytes: int) -> tuple[CallCost, ...]:
    """Return what allreduces took, by algorithm, the same on all ranks. A collective call; raises what allreduce raises.

    names: of the algorithms. One that is the link's own is taken to be some times as fast as the others, as the link prefers it.
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
    """Return how long a call of each algorithm and size takes: of the slowest rank, in the second quickest of the turns, since
    what else a host does makes calls longer and never shorter. calls: how many a turn makes."""
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
