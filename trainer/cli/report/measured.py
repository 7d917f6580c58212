"""What the ranks of one training command have left in a folder, brought together."""

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

#: What busbw is of algbw, given the number of ranks (2 (p - 1) / p for allreduce, as nccl-tests define it); others have 1.
_ON_BUS = {"allreduce": 2.0} | dict.fromkeys(
    ("reduce_scatter", "reduce_shares", "allgather", "gather_shares", "alltoall"), 1.0
)


@dataclass(frozen=True)
class Training:
    """Holds the steps of one optimizer: seconds and seconds_waited, (ranks, steps), of all steps but the first, in which kernels
    are compiled, unless there is no other; bytes_sent, bytes_uncompressed, (ranks, steps), of all. NaN where a rank has left no
    such step. ranks: those that have left any, of `size`. late_s: by how many seconds each rank came after the
    first half of the ranks, (ranks, exchanges), in those exchanges that all of them have left, but the first; stragglers: the
    same in short, None where nothing is known of it."""

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
    """Holds what the operations of one verb, codec, algorithm and size of messages have taken, over the links that are named.
    calls, nbytes (of their messages):
    of the rank that has most. seconds, most_seconds: in all, of the rank for which they took least and most. best: the greatest
    bytes per second of one call. on_bus: what busbw is of the bytes per second."""

    verb: str
    codec: str
    algorithm: str
    link: str
    calls: int
    nbytes: int
    seconds: float
    most_seconds: float
    best: float
    on_bus: float


@dataclass(frozen=True)
class Measured:
    """Holds all that was left. processes: by rank, what its process says of itself. size: how many ranks there were."""

    processes: dict[int, dict[str, Any]]
    size: int
    trainings: list[Training]
    operations: list[Operation]


def read(folder: Path) -> Measured:
    """Return what was left in a folder."""
    journals = list(_journals(folder, OPERATIONS))
    processes: dict[int, dict[str, Any]] = {}
    for header, _ in sorted(journals, key=lambda journal: journal[0]["size"]):
        processes[header["rank"]] = header  # that of the largest Communicator, whose routes are all there are
    made: Counter[int] = Counter()
    optimizers: dict[tuple[int, tuple[int, ...]], dict[int, Lines]] = defaultdict(dict)
    for header, lines in sorted(_journals(folder, STEPS), key=lambda journal: journal[0]["made"]):
        rank = header["rank"]
        if lines:
            optimizers[made[rank], tuple(header["ranks"])][rank] = lines
        made[rank] += 1
    trainings = [_training(found, len(ranks)) for (_, ranks), found in sorted(optimizers.items())]
    size = max((header["size"] for header in processes.values()), default=0)
    return Measured(dict(sorted(processes.items())), size, trainings, _operations(journals))


def _journals(folder: Path, kind: str) -> Iterator[tuple[dict[str, Any], Lines]]:
    """Yield the header of each journal of a kind, and its other lines. The last line of a rank that was killed may be half of
    one, and is left out."""
    for path in sorted(folder.glob(f"{kind}-*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if lines:
            yield lines[0], lines[1:]


def _training(found: dict[int, Lines], size: int) -> Training:
    """Return the steps of an optimizer, given the lines of each rank that has left any."""
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
    return Training(ranks, size, seconds, waited, table[..., 2], table[..., 3], late, stragglers)


def _operations(journals: Iterable[tuple[dict[str, Any], Lines]]) -> list[Operation]:
    """Return the operations of all Communicators together, those first that took longest."""
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
        least = table[:, 2].min()
        found.append(
            Operation(verb, codec, algorithm, link, int(calls), int(nbytes), least, most_seconds, best[key], on_bus)
        )
    return sorted(found, key=lambda operation: -operation.most_seconds)
