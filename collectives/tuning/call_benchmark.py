"""Time allreduces as training calls them, with and without codecs, to correct predictions by their times."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import torch

from gradwire.collectives.compression.codec import Codec
from gradwire.collectives.parsing import format_size
from gradwire.collectives.reduction import Op
from gradwire.collectives.schedules.algorithms import PLANNERS
from gradwire.collectives.tuning.calibration import calibrated
from gradwire.collectives.tuning.cost_model import Costs
from gradwire.collectives.tuning.prediction import legs_of, predict

if TYPE_CHECKING:
    from gradwire.collectives.communicator import Communicator

#: The sizes in bytes, in a host and between hosts, and with a codec, of float32.
_LEAST = 1 << 10
_INSIDE, _BETWEEN = (_LEAST, 32 << 10, 512 << 10, 4 << 20, 16 << 20), (_LEAST, 8 << 10, 64 << 10, 512 << 10, 4 << 20)
_CODED_INSIDE, _CODED_BETWEEN = (_LEAST, 64 << 10, 4 << 20), (_LEAST, 8 << 10, 128 << 10, 1 << 20, 4 << 20)

#: All algorithms are timed at the least size. At other sizes, those are whose predicted time is at most this multiple of the
#: fastest one's, and at most so many seconds: the times of longer calls follow the links.
_NEAR, _LONGEST_S = 1.5, 0.01

#: A turn makes calls of every algorithm, of each for about so long, but not more than the most calls, nor fewer than the least if
#: they are small: the first calls of a row wake up ranks, so short rows seem slower than a training's calls.
_TURNS, _TURN_S, _LEAST_CALLS, _MOST_CALLS, _SMALL = 3, 0.01, 4, 32, 16 << 10

_log = logging.getLogger("gradwire")


def time_algorithms(communicator: Communicator, costs: Costs, names: Sequence[str]) -> Costs:
    """Return the costs with the times of allreduces by these algorithms, the same on all ranks. A collective call; raises what
    allreduce raises."""

    def run(part: torch.Tensor, name: str) -> None:
        communicator.allreduce(part, algorithm=name)

    for nbytes in _INSIDE if len(costs.hosts) == 1 else _BETWEEN:
        # An algorithm of the link's own has no Program to predict by before it was timed.
        planned = [name for name in names if name in PLANNERS["allreduce"] or costs.measured("allreduce", name)]
        call = nbytes, communicator.segment_bytes
        predicted = _shared(communicator, {name: partial(predict, costs, "allreduce", name, *call) for name in planned})
        fastest_s = min(predicted.values())
        most_s = min(_LONGEST_S, _NEAR * fastest_s) if nbytes > _LEAST else math.inf
        expected = {name: predicted.get(name, fastest_s) for name in names if predicted.get(name, 0.0) <= most_s}
        # Other work on a host makes calls longer and never shorter.
        taken = _timed(communicator, costs, nbytes, expected, run, min)
        if nbytes == _LEAST:
            costs = _calibrated(communicator, costs, taken)
        costs = costs.with_times(nbytes, taken)
    return costs


def _calibrated(communicator: Communicator, costs: Costs, taken: Mapping[str, float]) -> Costs:
    """Return costs that explain the times of small allreduces. Rank 0 computes them: ranks that share cores would wait for each
    other."""
    mine = (0.0, 0.0)
    if communicator.rank == 0:
        few, many = "recursive_doubling", "ring"
        legs = [legs_of(costs, "allreduce", name, 4, communicator.segment_bytes, _LEAST) for name in (few, many)]
        mine = calibrated(costs, legs[0], taken[few], legs[1], taken[many])
    numbers = _agreed(communicator, dict(zip(("factor", "call_s"), mine, strict=True)), "sum")
    return replace(costs.with_messages(numbers["factor"]), call_s=numbers["call_s"])


def time_codecs(
    communicator: Communicator, costs: Costs, codecs: Sequence[Codec], predict: Callable[[Costs, int, Codec], float]
) -> Costs:
    """Return the costs with the times of compressed allreduces of float32, by the identity of the codec, the same on all ranks.
    A collective call; raises what allreduce raises. predict: returns the seconds for so many numbers."""
    named = {codec.identity: codec for codec in codecs}
    inside = len(costs.hosts) == 1

    def run(part: torch.Tensor, name: str) -> None:
        communicator.allreduce(part, compression=named[name], step=0)

    for nbytes in _CODED_INSIDE if inside else _CODED_BETWEEN:
        predicted = _shared(communicator, {name: partial(predict, costs, nbytes // 4, named[name]) for name in named})
        most_s = math.inf if inside or nbytes <= _SMALL else _LONGEST_S
        expected = {name: seconds for name, seconds in predicted.items() if seconds <= most_s}
        # Not the minimum: in a lucky turn, ranks that share cores do not encode at the same time.
        costs = costs.with_times(nbytes, _timed(communicator, costs, nbytes, expected, run, median))
    return costs


def spend_bursts(communicator: Communicator, costs: Costs) -> None:
    """Use up what the links between hosts have saved for bursts, as calls that follow each other do, which the predictions are
    of. A collective call."""
    if costs.burst_bytes:
        # A ring loads every link in both directions.
        numel = 2 * costs.burst_bytes // 4
        communicator.allreduce(torch.zeros(numel, dtype=torch.float32, device="cpu"), algorithm="ring")


def _shared(communicator: Communicator, predictions: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """Return the predicted seconds of each name, the same on all ranks. Each rank computes a part of them."""
    rank, size = communicator.rank, communicator.size
    mine = {name: each() if i % size == rank else 0.0 for i, (name, each) in enumerate(predictions.items())}
    return _agreed(communicator, mine, "sum")


def _timed(
    communicator: Communicator,
    costs: Costs,
    nbytes: int,
    expected: Mapping[str, float],
    run: Callable[[torch.Tensor, str], None],
    typical: Callable[[Sequence[float]], float],
) -> dict[str, float]:
    """Return how long a call of each name takes on the slowest rank. expected: the predicted seconds. run: makes a call.
    typical: returns a rank's time for its times in the turns."""
    buffer = communicator.empty(nbytes // 4).zero_()
    taken: dict[str, list[float]] = {name: [] for name in expected}
    for _ in range(_TURNS if expected else 0):
        spend_bursts(communicator, costs)
        for name, seconds in expected.items():
            number = min(_MOST_CALLS, int(_TURN_S / max(1e-9, seconds)))
            number = max(_LEAST_CALLS if nbytes <= _SMALL else 1, number)
            run(buffer, name)  # ranks begin together
            began = time.perf_counter()
            for _ in range(number):
                run(buffer, name)
            taken[name].append((time.perf_counter() - began) / number)
    slowest = _agreed(communicator, {name: typical(times) for name, times in taken.items()}, "max")
    if slowest and communicator.rank == 0:
        times = (f"{name} {1e3 * each:.3g} ms ({1e3 * expected[name]:.3g} predicted)" for name, each in slowest.items())
        _log.info("gradwire: allreduce of %s takes: %s", format_size(nbytes), ", ".join(times))
    return slowest


def _agreed(communicator: Communicator, mine: Mapping[str, float], op: Op) -> dict[str, float]:
    numbers = torch.tensor([*mine.values()], dtype=torch.float64, device="cpu")
    communicator.allreduce(numbers, op, algorithm="recursive_doubling")
    return dict(zip(mine, numbers.tolist(), strict=True))
