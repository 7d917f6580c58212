"""The benchmark of GPUs: what it reads in a profiler's trace, how long it runs, and what it calls wrong or reached."""

import shutil
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gradwire.bench.gpu import run
from gradwire.bench.gpu.outcome import Goal
from gradwire.bench.gpu.overlap import BACKWARD, STEP, overlap
from gradwire.bench.gpu.scale import SCALES
from gradwire.bench.gpu.steps import BUILDERS, goals_of, rounds_within, wrong_of
from gradwire.bench.training.step import COMPUTE, DDP, StepRow

MAIN, AUTOGRAD, QUEUE = 1, 2, 3
COMPUTING, CODING, COPYING = 7, 20, 24


def on_cpu(name: str, kind: str, thread: int, begin: float, end: float, **details: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "tid": thread, "ts": begin, "dur": end - begin, "args": details}


def launched(
    number: int,
    thread: int,
    at: float,
    stream: int,
    begin: float,
    end: float,
    name: str = "kernel",
    kind: str = "kernel",
) -> list[dict[str, Any]]:
    """Return the events of a launch and of what it launches on a stream."""
    launch = on_cpu("cudaLaunchKernel", "cuda_runtime", thread, at, at + 1, correlation=number)
    return [launch, on_cpu(name, kind, stream, begin, end, stream=stream, correlation=number)]


def step_at(begin: float, first: int) -> list[dict[str, Any]]:
    """Return a step of 300 us: the GPU computes forward until 20, backward from 20 to 100, and the optimizer from 200 on."""
    function = f"{BACKWARD}: MulBackward0"
    events = [
        on_cpu(STEP, "user_annotation", MAIN, 0, 300),
        on_cpu(function, "cpu_op", AUTOGRAD, 10, 20),
        on_cpu(function, "cpu_op", AUTOGRAD, 30, 40),
        *launched(1, MAIN, 2, COMPUTING, 5, 20),
        *launched(2, AUTOGRAD, 12, COMPUTING, 20, 60),
        *launched(3, AUTOGRAD, 32, COMPUTING, 70, 100),
        *launched(4, AUTOGRAD, 35, CODING, 60, 90),  # in backward, also between two of its kernels
        *launched(5, AUTOGRAD, 36, COPYING, 90, 390, "Memcpy DtoH", "gpu_memcpy"),  # a thirtieth of it in backward
        *launched(6, QUEUE, 55, CODING, 95, 190, "ncclDevKernel_AllReduce"),
        *launched(7, MAIN, 150, COMPUTING, 200, 250),
    ]
    moved = [{**event, "ts": event["ts"] + begin, "args": dict(event["args"])} for event in events]
    for event in moved:
        if "correlation" in event["args"]:
            event["args"]["correlation"] += first
    return moved


def test_the_share_of_codecs_and_copies_beside_backward() -> None:
    found = overlap([*step_at(1000, 0), *step_at(0, 100)])
    assert found.backward_ms == pytest.approx(2 * 0.08)
    assert found.codec_and_copy_ms == pytest.approx(2 * 0.33)
    assert found.share == pytest.approx(40 / 330)


def test_a_trace_without_codecs_has_no_share() -> None:
    alone = [event for event in step_at(0, 0) if event["args"].get("stream", COMPUTING) == COMPUTING]
    assert overlap(alone).share is None
    on_the_cpu = [event for event in alone if event["cat"] in ("user_annotation", "cpu_op")]
    assert (overlap(on_the_cpu).backward_ms, overlap(on_the_cpu).share) == (pytest.approx(0.02), None)


def test_rounds_fit_the_time_and_are_at_least_one() -> None:
    scale = replace(SCALES["cuda"], steps=2, rounds=10)
    one = {name: np.array([0.5]) for name in ("a", "b")}  # a round takes 2 s
    assert [rounds_within(seconds, one, scale) for seconds in (1, 12, 1000)] == [1, 4, 10]


def test_what_is_wrong_and_what_is_reached() -> None:
    right = StepRow(DDP, 2, 100.0, 100.0, 1.0, 1.0, 2.0, 1.0, 4.0, True)
    rows = [replace(right, competitor=name, as_ddp=1.25, beyond_compute_as_ddp=4.0) for name in BUILDERS if name != DDP]
    rows = [replace(row, replicas_identical=row.competitor != COMPUTE) for row in rows] + [right]
    assert wrong_of(rows) == []
    assert [(goal.value, goal.is_reached) for goal in goals_of(rows, "")] == [
        (0.8, True),  # without a codec, at most 0.9
        (0.8, False),  # int8, at most 0.6
        (0.25, True),
        (0.25, True),
    ]
    for change in ({"replicas_identical": False}, {"loss": float("nan")}, {"loss": 5.0}):
        assert len(wrong_of([replace(rows[0], **change), *rows[1:]])) == 1
    assert not Goal("a share", 0.7, 0.8, at_least=True).is_reached


def test_a_part_that_dies_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    outcome = run.started(["gpu"], "NCCL", 60)
    assert (outcome.rows, len(outcome.wrong)) == ([], 1)
