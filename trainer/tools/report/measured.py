"""The files that the ranks of one training command have written to a folder, combined."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gradwire.collectives.diagnostics.journal import OPERATIONS, STEPS
from gradwire.trainer.reports.stragglers import Stragglers, lateness, stragglers_of

Floats = npt.NDArray[np.float64]
Lines = list[Any]

#: The factor of (p - 1) / p in busbw / algbw, as in nccl-tests. For other verbs, busbw is algbw.
_ON_BUS = {"allreduce": 2.0} | dict.fromkeys(
    ("reduce_scatter", "reduce_shares", "allgather", "gather_shares", "alltoall"), 1.0
)


@dataclass(frozen=True)
class OptimizerSteps:
    """Holds the steps of one optimizer in one generation.

    generation: its number, which is 0 unless ranks were lost, joined or were restarted. number: that of the
    optimizer in this generation, from 1 on. ranks: those that have written steps, of `size`. seconds, seconds_waited:
    (ranks, steps), of all steps but the first, in which kernels are compiled, unless it is the only one. bytes_sent,
    bytes_uncompressed: (ranks, steps), of all steps. NaN: the rank has not written the step. late_s: by how many
    seconds each rank came after the first half of the ranks, (ranks, exchanges), in the exchanges that all of them have
    written, but the first. stragglers: a summary of late_s; None without data.
    """

    generation: int
    number: int
    ranks: list[int]
    size: int
    seconds: Floats
    seconds_waited: Floats
    bytes_sent: Floats
    bytes_uncompressed: Floats
    late_s: Floats
    stragglers: Stragglers | None

    @property
    def steps(self) -> int:
        return int(self.bytes_sent.shape[1])


@dataclass(frozen=True)
class Operation:
    """Holds the measurements of the operations of one verb, codec, algorithm and range of message sizes. link: the
    links between their ranks. calls, nbytes: the calls and the bytes of their messages, of the rank with the most.
    seconds, most_seconds: the total time on the rank with the shortest, and with the longest. rate: bytes per second on the
    rank with the most. best: the most bytes per second of one call. on_bus: busbw / algbw."""

    verb: str
    codec: str
    algorithm: str
    link: str
    calls: int
    nbytes: int
    seconds: float
    most_seconds: float
    rate: float
    best: float
    on_bus: float


@dataclass(frozen=True)
class Measurements:
    """Holds all measurements. processes: by rank, the header of its operations. size: the number of ranks."""

    processes: dict[int, dict[str, Any]]
    size: int
    trainings: list[OptimizerSteps]
    operations: list[Operation]


def read(folder: Path) -> Measurements:
    """Return the measurements in a folder."""
    journals = list(_journals(folder, OPERATIONS))
    processes: dict[int, dict[str, Any]] = {}
    for header, _ in sorted(journals, key=lambda journal: journal[0]["size"]):
        processes[header["rank"]] = header  # the last is of the largest Communicator, with all routes
    made: Counter[tuple[int, int]] = Counter()
    generations: dict[int, dict[tuple[int, tuple[int, ...]], dict[int, Lines]]] = defaultdict(lambda: defaultdict(dict))
    for header, lines in sorted(_journals(folder, STEPS), key=lambda journal: journal[0]["made"]):
        generation, rank = header["world"], header["rank"]
        if lines:
            generations[generation][made[generation, rank], tuple(header["ranks"])][rank] = lines
        made[generation, rank] += 1
    trainings = [
        _training(generation, number, found, len(ranks))
        for generation, optimizers in sorted(generations.items())
        for number, ((_, ranks), found) in enumerate(sorted(optimizers.items()), 1)
    ]
    size = max((header["size"] for header in processes.values()), default=0)
    return Measurements(dict(sorted(processes.items())), size, trainings, _operations(journals))


def _journals(folder: Path, kind: str) -> Iterator[tuple[dict[str, Any], Lines]]:
    """Yield the header of each journal of a kind, and its other lines, without the incomplete last line of a killed
    rank."""
    for path in sorted(folder.glob(f"{kind}-*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if lines:
            yield lines[0], lines[1:]


def _training(generation: int, number: int, found: dict[int, Lines], size: int) -> OptimizerSteps:
    """Return the steps of an optimizer, given the lines of each rank that has written any."""
    ranks = sorted(found)
    table = np.full((len(ranks), max(map(len, found.values())), 6), np.nan)
    for row, rank in zip(table, ranks, strict=True):
        row[: len(found[rank])] = found[rank]
    seconds, waited = np.moveaxis(table[:, min(1, table.shape[1] - 1) :, :2], 2, 0)
    by_number = [{number: wait for number, wait in row[:, 4:].tolist() if number >= 0} for row in table]
    common = sorted(set.intersection(*map(set, by_number)))[1:]  # in the first, kernels are compiled
    late, stragglers = np.empty((len(ranks), 0)), None
    if common and len(ranks) > 1:
        waits = np.array([[of_rank[number] for number in common] for of_rank in by_number])
        late = lateness(waits)
        stragglers = stragglers_of(int(common[-1]), waits, seconds[np.isfinite(seconds)])
    sent, uncompressed = np.moveaxis(table[..., 2:4], 2, 0)
    return OptimizerSteps(generation, number, ranks, size, seconds, waited, sent, uncompressed, late, stragglers)


def _operations(journals: Iterable[tuple[dict[str, Any], Lines]]) -> list[Operation]:
    """Return the operations of all Communicators, those with the longest time first."""
    sums: dict[tuple[str, str, str, str, int, int], dict[int, Floats]] = defaultdict(dict)
    links: dict[tuple[str, str, str, str, int, int], set[str]] = defaultdict(set)
    best: dict[tuple[str, str, str, str, int, int], float] = defaultdict(float)
    for header, lines in journals:
        for verb, codec, algorithm, device, power, *numbers, quickest in lines[-1] if lines else ():
            key = verb, codec, algorithm, device, power, header["size"]
            of_rank = sums[key].setdefault(header["rank"], np.zeros(3))
            of_rank += numbers
            best[key] = max(best[key], quickest)
            routes = [route for route in header["routes"] if route.startswith("CUDA") == (device == "cuda")]
            links[key] |= {route.partition(": ")[2].partition(",")[0] for route in routes}
    found = []
    for key, by_rank in sums.items():
        verb, codec, algorithm, _, _, size = key
        table = np.array(list(by_rank.values()))
        calls, nbytes, most_seconds = table.max(axis=0)
        on_bus = _ON_BUS[verb] * (size - 1) / size if verb in _ON_BUS else 1.0
        link = ", ".join(sorted(links[key]))
        least, rate = table[:, 2].min(), (table[:, 1] / table[:, 2]).max()
        found.append(
            Operation(
                verb, codec, algorithm, link, int(calls), int(nbytes), least, most_seconds, rate, best[key], on_bus
            )
        )
    return sorted(found, key=lambda operation: -operation.most_seconds)
