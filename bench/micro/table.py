"""Rows of results and their text, with nccl-tests' columns, then p99 and wire bytes; comparisons of two competitors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from gradwire.bench.micro.cases import BenchJob, Case
from gradwire.bench.timing import Times, format_interval, median_and_p99, speedup_interval
from gradwire.collectives.parsing import format_size

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """The result of one algorithm at one size. Field names are the keys of the JSON.

    bytes: of the whole array. time_us, p99_us: median and 99th percentile of the turns' times on their slowest ranks.
    algbw_GBps, busbw_GBps: in 1e9 bytes per second. wire_bytes: those of the rank that sends most; None for peers, and
    if memory is shared. wrong: the wrong elements, over all ranks and checked turns; None if nothing was checked.

    All other fields are None without --codec, the times also for codec "none". ratio: the bytes that float32 needs,
    2(p-1)/p of the array, over wire_bytes. relative_error: in L2, against float64. encode_us, decode_us: the time of
    all encodings and decodings of a call. wire_us: the time of a call whose codec does no work, with codes of equal
    length. As these overlap in a call, their sum may exceed time_us.

    place: whether the result replaces the input, one of PLACES. min_us, avg_us, max_us: the least, mean and greatest of
    the ranks' own median times.
    """

    collective: str
    algorithm: str
    codec: str
    dtype: str
    op: str
    world_size: int
    bytes: int
    time_us: float
    p99_us: float
    algbw_GBps: float  # noqa: N815
    busbw_GBps: float  # noqa: N815
    wire_bytes: int | None
    wrong: int | None
    ratio: float | None = None
    relative_error: float | None = None
    encode_us: float | None = None
    wire_us: float | None = None
    decode_us: float | None = None
    place: str | None = None
    min_us: float | None = None
    avg_us: float | None = None
    max_us: float | None = None


#: The result of one competitor in one job: its row, and each turn's seconds on its slowest rank.
MeasuredRow = tuple[BenchJob, Row, Times]


def measured_row(case: Case, job: BenchJob, algorithm: str, everyones: Times, **known: Any) -> MeasuredRow:
    """Return the result of an algorithm. everyones: each turn's seconds, (ranks, turns). known: the fields of the row that
    do not follow from times."""
    everyones = everyones[: case.ranks] / case.messages
    slowest: Times = everyones.max(axis=0)
    of_ranks = np.median(everyones, axis=1) * 1e6
    nbytes, (median_s, p99_s) = case.nbytes(job), median_and_p99(slowest)
    algbw = nbytes / median_s / 1e9
    row = Row(
        collective=case.name,
        algorithm=algorithm,
        dtype=str(job.dtype).removeprefix("torch."),
        op=job.op,
        world_size=job.size,
        bytes=nbytes,
        time_us=median_s * 1e6,
        p99_us=p99_s * 1e6,
        algbw_GBps=algbw,
        busbw_GBps=algbw * case.busbw_factor(job.size),
        place=job.place,
        min_us=float(of_ranks.min()),
        avg_us=float(of_ranks.mean()),
        max_us=float(of_ranks.max()),
        **known,
    )
    return job, row, slowest


Column = tuple[str, str, int]
"""The name, the unit and the width."""
OF_JOB: Sequence[Column] = (
    ("size", "(B)", 12),
    ("count", "(elements)", 12),
    ("type", "", 8),
    ("redop", "", 8),
    ("root", "", 6),
)
OF_PLACE: Sequence[Column] = (("time", "(us)", 9), ("algbw", "(GB/s)", 8), ("busbw", "(GB/s)", 8), ("#wrong", "", 7))
OF_RANKS: Sequence[Column] = (
    ("min", "(us)", 9),
    ("avg", "(us)", 9),
    ("max", "(us)", 9),
    ("p99", "(us)", 9),
    ("wire", "(B)", 12),
)
OF_CODEC: Sequence[Column] = (
    ("ratio", "", 7),
    ("t_encode", "(us)", 9),
    ("t_wire", "(us)", 9),
    ("t_decode", "(us)", 9),
    ("error", "", 9),
)


def _columns(places: Sequence[str], *, codecs: bool) -> list[Column]:
    return [*OF_JOB, *(column for _ in places for column in OF_PLACE), *OF_RANKS, *(OF_CODEC if codecs else ())]


def _line(cells: Iterable[str], columns: Sequence[Column], mark: str) -> str:
    return mark + "".join(f" {cell:>{width}}" for cell, (_, _, width) in zip(cells, columns, strict=True))


def _width(columns: Sequence[Column]) -> int:
    return sum(width + 1 for _, _, width in columns)


def format_heading(places: Sequence[str], *, codecs: bool = False) -> list[str]:
    """Return the lines above a table. places: those of its calls; the columns from min on are of the last one."""
    columns = _columns(places, codecs=codecs)
    above = "".join(f"{place:^{_width(OF_PLACE)}}" for place in places)
    names, units = [name for name, _, _ in columns], [unit for _, unit, _ in columns]
    first = f"#{'':{_width(OF_JOB)}}{above}{f'{places[-1]}, over ranks':^{_width(OF_RANKS[:3])}}".rstrip()
    return ["#", first, _line(names, columns, "#"), _line(units, columns, "#").rstrip()]


def format_us(time_us: float) -> str:
    """Format microseconds in at most 9 characters, with three or more significant digits."""
    decimals = 2 if time_us < 1e3 else 1 if time_us < 1e5 else 0
    return f"{time_us:.{decimals}f}"


def format_row(rows: Sequence[Row], count: int, root: int) -> str:
    """Return a line of the table. rows: of one job, by its places. count: elements as nccl-tests counts them. root: -1 if
    there is none."""
    row = rows[-1]
    cells = [str(row.bytes), str(count), row.dtype, row.op, str(root)]
    for each in rows:
        cells += [format_us(each.time_us), f"{each.algbw_GBps:.3f}", f"{each.busbw_GBps:.3f}", _known(each.wrong, str)]
    cells += [_known(time_us, format_us) for time_us in (row.min_us, row.avg_us, row.max_us, row.p99_us)]
    cells.append(_known(row.wire_bytes, str))
    codecs = row.relative_error is not None
    if codecs:
        cells.append(_known(row.ratio, "{:.2f}".format))
        cells += [_known(part, format_us) for part in (row.encode_us, row.wire_us, row.decode_us)]
        cells.append(f"{row.relative_error:.2e}")
    return _line(cells, _columns([""] * len(rows), codecs=codecs), " ")


def _known(value: T | None, text: Callable[[T], str]) -> str:
    return "N/A" if value is None else text(value)


def format_trailer(rows: Sequence[Row]) -> list[str]:
    if not any(row.bytes for row in rows):  # a barrier has no data
        return ["#"]
    wrong = [row.wrong for row in rows if row.wrong is not None]
    verdict = f"{sum(wrong)} {'FAILED' if sum(wrong) else 'OK'}" if wrong else "N/A"
    average = sum(row.busbw_GBps for row in rows) / len(rows)
    return [f"# Out of bounds values : {verdict}", f"# Avg bus bandwidth    : {average:.4f}", "#"]


@dataclass(frozen=True)
class Speedup:
    """The speed of one competitor as a multiple of a peer's in one job. Field names are the keys of the JSON.

    times: this multiple. interval: its 95 % interval; None with too few turns. runs: the competitor's algorithm.
    """

    bytes: int
    dtype: str
    op: str
    place: str
    competitor: str
    peer: str
    time_us: float
    peer_time_us: float
    times: float
    interval: tuple[float, float] | None
    runs: str


def compare(measured: Sequence[MeasuredRow], algorithm: str, peer: str, runs: Callable[[int], str]) -> list[Speedup]:
    """Return the speed of `algorithm` as a multiple of `peer`'s, for all jobs that both of them ran. runs: bytes -> the
    algorithm that `algorithm` ran."""
    peers = {job: (row, seconds) for job, row, seconds in measured if row.algorithm == peer}
    compared = []
    for job, row, seconds in measured:
        if row.algorithm == algorithm and job in peers:
            peer_row, peer_seconds = peers[job]
            times, interval = peer_row.time_us / row.time_us, speedup_interval(seconds, peer_seconds)
            both = (row.time_us, peer_row.time_us, times, interval)
            compared.append(Speedup(row.bytes, row.dtype, row.op, job.place, algorithm, peer, *both, runs(row.bytes)))
    return compared


def format_comparison(speedups: Sequence[Speedup]) -> list[str]:
    """Return the lines of a comparison, one per job; no lines without speedups."""
    if not speedups:
        return []
    ours, peer = speedups[0].competitor, speedups[0].peer
    lines = [
        f"# How many times as fast {ours} is as {peer} in this run, with the 95 % interval",
        f"#{'size':>12} {'type':>8} {'redop':>8} {'':>12} {ours + ' us':>10} {peer + ' us':>10} {'times':>7}",
    ]
    for each in speedups:
        what = f"#{format_size(each.bytes):>12} {each.dtype:>8} {each.op:>8} {each.place:>12}"
        both = f"{format_us(each.time_us):>10} {format_us(each.peer_time_us):>10}"
        lines.append(f"{what} {both} {each.times:7.2f}  {format_interval(each.interval):16}  {each.runs}")
    for place in dict.fromkeys(each.place for each in speedups):
        times = [each.times for each in speedups if each.place == place]
        mean = math.exp(sum(map(math.log, times)) / len(times))
        lines.append(f"# Geometric mean       : {mean:.2f}  (best {max(times):.2f}, worst {min(times):.2f}), {place}")
    return [*lines, "#"]
