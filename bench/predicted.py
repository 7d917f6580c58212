"""`python -m gradwire.bench hosts --hosts 4 --ranks 4 -- predicted -J FILE`: predicted beside measured times of calls.

It measures the links and codecs first, as `gradwire tune` and compression="auto" do. At each size, every algorithm of allreduce
and every codec of CODECS then runs in turns. A row has the measured and the predicted time. The summary compares the selections
with the best ones.
`predicted --plot OUT.png FILE...` draws the results that such runs have written.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gradwire as hvd
from gradwire.bench.options import count_from, picture, size
from gradwire.bench.results import software_and_machine, write_json
from gradwire.bench.timing import Protocol, Timer, slowest_rank, take_turns
from gradwire.collectives import Communicator
from gradwire.collectives.parsing import format_size
from gradwire.collectives.tuning.call_benchmark import spend_bursts
from gradwire.collectives.tuning.chooser import Chooser
from gradwire.collectives.tuning.cost_model import Costs

#: The length of a turn in predicted seconds, and its greatest number of calls. Calls predicted to take less than _SHORT_S
#: get three times as many turns, since wake-ups make their times vary most.
_TURN_S, _MOST_CALLS, _SHORT_S = 0.01, 32, 0.001

CPU = torch.device("cpu")
Case = tuple[str, str]
"""An algorithm and a codec."""

#: The codecs that compression='auto' may choose from here, besides no codec.
CODECS = ("int8", "int4")


@dataclass(frozen=True)
class PredictedRow:
    """The times of one algorithm, or of one codec, at one size.

    seconds: the time of a call on the slowest rank, the median over turns. predicted_s: the time by the model. chosen: without a
    codec, whether 'auto' runs this algorithm; with a codec, whether it is the one that is predicted to be fastest. The
    algorithm of a row with a codec is the one that 'auto' runs without one. first_s: as `seconds`, by the first measurement of a
    case that was measured twice."""

    nbytes: int
    algorithm: str
    codec: str
    seconds: float
    predicted_s: float
    chosen: bool
    first_s: float | None = None


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gradwire.bench predicted",
        description="Predicted beside measured times of allreduce, and 'auto' beside the best choice.",
    )
    add = parser.add_argument
    add("files", nargs="*", type=Path, help="with --plot: what runs have written by -J")
    add("-b", "--begin", type=size, default=1 << 10, help="smallest size (default 1K)")
    add("-e", "--end", type=size, default=64 << 20, help="largest size (default 64M)")
    add("-f", "--factor", type=partial(count_from, 2), default=4, help="factor from one size to the next (default 4)")
    add("-t", "--turns", type=partial(count_from, 1), default=7, help="timed turns of each at each size (default 7)")
    add("-J", "--json", type=Path, metavar="FILE", help="write meta and rows")
    add("--plot", type=picture, metavar="FILE.png", help="draw predicted over measured of the files")
    chosen = parser.parse_args(arguments)
    if bool(chosen.files) != bool(chosen.plot):
        parser.error("--plot takes what earlier runs have written, and nothing else does")
    if chosen.begin < 4 or chosen.begin % 4:
        parser.error(f"--begin {chosen.begin} is not a multiple of 4, the bytes of a float32 number")
    return chosen


def measure(comm: Communicator, measured: Chooser, nbytes: int, turns: int) -> list[PredictedRow]:
    """Time every algorithm, and every codec, at one size, in turns. A collective call."""
    tensor = comm.empty(nbytes // 4).zero_()
    costs = measured.costs
    predicted = {(name, "none"): seconds for seconds, name in measured.ranked("allreduce", nbytes)}
    auto = comm.chosen("allreduce", nbytes)
    auto_s = predicted[auto, "none"]
    by_codec = {"none": auto_s} | {each: comm.predict(nbytes // 4, compression=each) for each in CODECS}
    timer = _row_of(comm, costs, max(1, min(_MOST_CALLS, int(_TURN_S / auto_s))))
    codec = min(by_codec, key=by_codec.__getitem__)
    predicted |= {("auto", each): by_codec[each] for each in CODECS}
    calls = {case: _call(comm, tensor, case) for case in predicted}
    turns = turns if auto_s >= _SHORT_S else 3 * turns
    taken = _in_turns(calls, timer, turns)
    # The fastest of many is partly the luckiest. So the selected and the best other ones are measured again.
    plain, coded = ([case for case in predicted if (case[1] == "none") is is_plain] for is_plain in (True, False))
    selected = [(auto, "none"), ("auto", codec)] if codec != "none" else [(auto, "none")]
    others = [[case for case in cases if case not in selected] for cases in (plain, coded)]
    best = [min(cases, key=taken.__getitem__) for cases in others if cases]
    again = _in_turns({case: calls[case] for case in (*selected, *best)}, timer, turns)
    return [
        PredictedRow(
            nbytes,
            *case,
            seconds=again.get(case, seconds),
            predicted_s=predicted[case],
            chosen=case in selected,
            first_s=seconds if case in again else None,
        )
        for case, seconds in taken.items()
    ]


def _row_of(comm: Communicator, costs: Costs, calls: int) -> Timer:
    """Return a Timer that returns the seconds of a call on this rank, the mean of a row of so many calls. Collective."""

    def seconds(call: Callable[[], object]) -> float:
        spend_bursts(comm, costs)
        call()  # aligns the start of the ranks
        began = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - began) / calls

    return seconds


def _call(comm: Communicator, tensor: torch.Tensor, case: Case) -> Callable[[], object]:
    """Return an allreduce by an algorithm and a codec."""
    algorithm, codec = case
    return partial(comm.allreduce, tensor, algorithm=algorithm, compression=None if codec == "none" else codec)


def _in_turns(calls: Mapping[Case, Callable[[], object]], timer: Timer, turns: int) -> dict[Case, float]:
    """Return the seconds of each call: of the slowest rank, the median over turns. Collective."""
    seconds, _ = take_turns(list(calls.values()), timer, Protocol(turns, warmup_iters=1, check_iters=0))
    return dict(zip(calls, slowest_rank(np.median(seconds, axis=1), CPU).tolist(), strict=True))


def summary(rows: Sequence[PredictedRow]) -> str:
    """Return a line with the errors of the model, the time of 'auto' over the time of the best choice, and how much equal calls
    differ."""
    errors = [abs(row.predicted_s / row.seconds - 1) for row in rows]
    over, codecs_over = ([each for _, each in found] for found in (over_best(rows), codec_over_best(rows)))
    twice = measured_twice(rows)
    return (
        f"predicted is off by {statistics.median(errors):.1%} (median), {max(errors):.0%} (most); 'auto' takes"
        f" {statistics.median(over):.3f} (median), {max(over):.2f} (most) times as long as the best algorithm, the choice of"
        f" a codec {statistics.median(codecs_over):.3f}, {max(codecs_over):.2f}; the same calls, measured twice, differ by"
        f" a factor of {statistics.median(twice):.3f}, {max(twice):.2f}"
    )


def measured_twice(rows: Sequence[PredictedRow]) -> list[float]:
    """Return the longer over the shorter time of each case that was measured twice."""
    pairs = [(row.seconds, row.first_s) for row in rows if row.first_s is not None]
    return [max(pair) / min(pair) for pair in pairs]


def over_best(rows: Sequence[PredictedRow]) -> list[tuple[int, float]]:
    """Return, for each size, the time of 'auto' over the time of the quickest algorithm, without a codec."""
    best: dict[int, float] = {}
    plain = [row for row in _of_same_turns(rows) if row.codec == "none"]
    for row in plain:
        best[row.nbytes] = min(row.seconds, best.get(row.nbytes, row.seconds))
    return [(row.nbytes, row.seconds / best[row.nbytes]) for row in plain if row.chosen]


def codec_over_best(rows: Sequence[PredictedRow]) -> list[tuple[int, float]]:
    """Return, for each size, the time of the selected codec, or of none, over the least time of CODECS and no codec."""
    result = []
    for nbytes, candidates in _by_codec(_of_same_turns(rows)).items():
        chosen = next((row for codec, row in candidates.items() if codec != "none" and row.chosen), candidates["none"])
        result.append((nbytes, chosen.seconds / min(row.seconds for row in candidates.values())))
    return result


def _of_same_turns(rows: Sequence[PredictedRow]) -> Sequence[PredictedRow]:
    """Return the rows to compare with each other: the selected and the best cases, which were measured again in turns. In an
    older file, which does not say which these are, all rows."""
    return [row for row in rows if row.first_s is not None] or rows


def codec_pays_from(rows: Sequence[PredictedRow], codec: str) -> int | None:
    """Return the smallest size from which on a codec was quicker than none at every size; None if there is no such size."""
    pays = [(nbytes, each[codec].seconds < each["none"].seconds) for nbytes, each in sorted(_by_codec(rows).items())]
    slower = [nbytes for nbytes, is_quicker in pays if not is_quicker]
    return min((nbytes for nbytes, _ in pays if nbytes > max(slower, default=0)), default=None)


def _by_codec(rows: Sequence[PredictedRow]) -> dict[int, dict[str, PredictedRow]]:
    """Return, by size and codec, the rows of the algorithm that 'auto' runs."""
    result: dict[int, dict[str, PredictedRow]] = {}
    for row in rows:
        if row.chosen or row.codec != "none":
            result.setdefault(row.nbytes, {})[row.codec] = row
    return result


def draw(files: Sequence[Path], out: Path) -> None:
    """Draw predicted over measured of all runs in the files."""
    from gradwire.bench.plots import OTHERS, dress, page, save, write_numbers

    figure = page("", 7.5, 4.8)
    axes = figure.add_subplot()
    points: dict[str, list[tuple[float, float]]] = {}
    for path in files:
        read = json.loads(path.read_text())
        link = read["meta"]["title"].rpartition(", ")[2].rpartition(" in ")[2]  # the rate, or shared memory
        rows = [PredictedRow(**row) for row in read["rows"]]
        points.setdefault(link, []).extend((1e3 * row.seconds, row.predicted_s / row.seconds) for row in rows)
    for color, (link, pairs) in zip(cycle(OTHERS), points.items(), strict=False):
        error = statistics.median(abs(ratio - 1) for _, ratio in pairs)
        axes.plot(*zip(*pairs, strict=True), "o", color=color, markersize=3, alpha=0.7, label=f"{link}: {error:.0%}")
    axes.axhspan(0.9, 1.1, color="0.9")
    axes.axhline(1.0, color="0.5", linewidth=0.8)
    dress(axes, "measured time of a call, ms", "predicted / measured; grey: within 10 %", x_log=10, y_log=10)
    axes.set_yticks([0.25, 0.5, 0.7, 1, 1.4, 2, 4, 8], minor=False)
    write_numbers(axes.yaxis)
    axes.legend(title="link: median error", fontsize="small", loc="lower left")
    save(figure, out)


def title(comm: Communicator, meta: Mapping[str, Any]) -> str:
    """Return the ranks, hosts and link rate of a run, in words."""
    hosts = comm.topology.hosts
    if len(hosts) == 1:
        return f"{comm.size} ranks in shared memory"
    each = f"{len(hosts)} hosts x {len(hosts[0])} ranks"
    rate = str(meta["network"] or "").partition(", ")[2].partition(" ")[0]
    return f"{each}, {rate}" if rate else each


def main(arguments: Sequence[str]) -> int:
    chosen = parse_arguments(arguments)
    if chosen.plot:
        draw(chosen.files, chosen.plot)
        return 0
    hvd.init()
    if hvd.size() == 1:
        print("bench predicted: one rank exchanges nothing: run it under torchrun or on hosts", file=sys.stderr)
        return 2
    with Communicator() as comm:
        began = time.perf_counter()
        costs = comm.tune()
        tuned_s = time.perf_counter() - began
        costs = comm.measure_codecs(CODECS)
        meta: dict[str, Any] = {**software_and_machine(CPU), "tuned_s": tuned_s}
        meta |= {"title": title(comm, meta), "costs": json.loads(costs.to_json())}
        is_first = comm.rank == 0
        measured = comm.measured
        assert measured is not None
        if is_first:
            print(f"# {meta['title']}: links measured in {tuned_s:.2f} s", *costs.slow(), sep="\n# ", flush=True)
        rows: list[PredictedRow] = []
        nbytes = chosen.begin
        while nbytes <= chosen.end:
            new = measure(comm, measured, nbytes, chosen.turns)
            rows += new
            for row in new if is_first else ():
                mark = "auto" if row.chosen else ""
                ratio = row.predicted_s / row.seconds
                print(
                    f"{format_size(nbytes):>6} {row.codec:5} {row.algorithm:34} {1e3 * row.seconds:10.3f} ms"
                    f" {1e3 * row.predicted_s:10.3f} ms {ratio:6.2f} {mark}",
                    flush=True,
                )
            if is_first:
                write_json(chosen.json, meta, rows)
            nbytes *= chosen.factor
        if is_first:
            print(f"# {summary(rows)}")
    hvd.shutdown()
    return 0
