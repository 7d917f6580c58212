"""The text of results."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from gradwire.bench.micro.cases import CASES, IN_PLACE, OUT_OF_PLACE, BenchJob
from gradwire.bench.micro.point_to_point import POINT_TO_POINT
from gradwire.bench.micro.table import (
    Row,
    compare,
    format_comparison,
    format_heading,
    format_row,
    format_trailer,
    format_us,
    measured_row,
)

ROW = Row("allreduce", "ring", "none", "float32", "sum", 4, 4096, 1234.5, 2000.0, 0.0033, 0.005, 6144, 0)
OUT = replace(ROW, time_us=3000.0, place=OUT_OF_PLACE)
IN = replace(ROW, place=IN_PLACE, min_us=1000.0, avg_us=1100.0, max_us=1234.5)
JOB = BenchJob(0, 4, 1024, torch.float32, "sum", -1, torch.device("cpu"), IN_PLACE)


def test_columns_begin_with_those_of_nccl_tests() -> None:
    heading = format_heading([OUT_OF_PLACE, IN_PLACE])
    names = "size count type redop root time algbw busbw #wrong time algbw busbw #wrong min avg max p99 wire"
    assert heading[2].lstrip("#").split() == names.split()
    assert heading[1].index(OUT_OF_PLACE) < heading[1].index(f" {IN_PLACE}")
    assert IN_PLACE not in format_heading([OUT_OF_PLACE])[1]


def test_cells_stand_under_their_names() -> None:
    names = format_heading([OUT_OF_PLACE, IN_PLACE])[2]
    row = format_row([OUT, IN], count=1024, root=-1)
    job = "4096 1024 float32 sum -1"
    assert row.split() == f"{job} 3000.0 0.003 0.005 0 1234.5 0.003 0.005 0 1000.0 1100.0 1234.5 2000.0 6144".split()
    assert len(row) == len(names)


def test_the_trailer_adds_up_and_says_what_was_not_checked() -> None:
    unknown = replace(IN, wrong=None, wire_bytes=None)
    assert format_row([unknown], 1024, -1).split().count("N/A") == 2
    assert format_trailer([unknown])[0] == "# Out of bounds values : N/A"
    ok, average, _ = format_trailer([ROW, replace(ROW, busbw_GBps=0.015)])
    assert (ok, average) == ("# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 0.0100")
    assert format_trailer([ROW, replace(ROW, wrong=3)])[0] == "# Out of bounds values : 3 FAILED"
    assert [format_us(time_us) for time_us in (1.234, 12345.67, 12345678.9)] == ["1.23", "12345.7", "12345679"]


def test_comparison_is_job_by_job() -> None:
    ours, peers = np.full(10, 1e-3), np.full(10, 2e-3)
    larger = replace(JOB, count=2048)
    measured = [
        (JOB, replace(ROW, algorithm="auto", time_us=1000.0), ours),
        (JOB, replace(ROW, algorithm="native", time_us=2000.0), peers),
        (larger, replace(ROW, algorithm="auto", bytes=8192, time_us=1000.0), ours),
    ]
    (speedup,) = compared = compare(measured, "auto", "native", lambda nbytes: f"chosen for {nbytes}")
    assert (speedup.bytes, speedup.times, speedup.interval) == (ROW.bytes, 2.0, (2.0, 2.0))
    lines = format_comparison(compared)
    assert [line for line in lines if " 2.00 " in line and "4K" in line and "chosen for 4096" in line]
    assert not [line for line in lines if "8K" in line]
    assert format_comparison(compare(measured, "auto", "torch", str)) == []


def test_times_are_those_of_the_slowest_rank_and_of_all_ranks() -> None:
    everyones = np.array([[1e-3] * 9, [2e-3] * 9, [6e-3] * 9])
    known = {"codec": "none", "wire_bytes": None, "wrong": 0}
    _, row, slowest = measured_row(CASES["allreduce"], JOB, "ring", everyones, **known)
    assert (row.time_us, row.min_us, row.avg_us, row.max_us) == pytest.approx((6000, 1000, 3000, 6000))
    assert list(slowest) == [6e-3] * 9
    _, row, _ = measured_row(POINT_TO_POINT["latency"], JOB, "auto", everyones, **known)
    assert row.time_us == pytest.approx(1000)  # half of a round trip between the first two ranks
