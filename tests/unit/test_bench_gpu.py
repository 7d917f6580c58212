"""The benchmark of GPUs: what it reads in a profiler's trace, how long it runs, and what it calls wrong or reached."""

import shutil
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradwire as hvd
from gradwire.bench.gpu import run
from gradwire.bench.gpu.outcome import Goal, Outcome, summary
from gradwire.bench.gpu.overlap import BACKWARD, STEP, overlap
from gradwire.bench.gpu.scale import SCALES
from gradwire.bench.gpu.steps import BUILDERS, goals_of, rounds_within, wrong_of
from gradwire.bench.training.step import DDP, OURS
from gradwire.bench.training.step_report import COMPUTE, StepRow
from gradwire.bench.workloads.loop import join_ranks

ROOT = Path(__file__).parents[2]
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
    right = StepRow(DDP, 2, 100.0, 100.0, 1.0, 1.0, 2.0, 1.0, None, None, 4.0, True)
    rows = [replace(right, competitor=name, as_ddp=1.25, beyond_compute_as_ddp=4.0) for name in BUILDERS if name != DDP]
    rows = [replace(row, replicas_identical=row.competitor != COMPUTE) for row in rows] + [right]
    assert wrong_of(rows) == []
    assert [(goal.value, goal.is_reached) for goal in goals_of(rows, "")] == [
        (0.8, True),  # without a codec, at most 0.9
        (0.8, False),  # int8, at most 0.6
        (4.0, True),  # beyond computing, at least 2
        (4.0, True),
    ]
    for change in ({"replicas_identical": False}, {"loss": float("nan")}, {"loss": 5.0}):
        assert len(wrong_of([replace(rows[0], **change), *rows[1:]])) == 1
    assert not Goal("a share", 0.7, 0.8, at_least=True).is_reached


@pytest.mark.parametrize(("ours", "ddp", "without"), [(99.0, 110.0, OURS), (110.0, 99.0, DDP), (110.0, 100.0, DDP)])
def test_a_step_without_time_beyond_computing_is_not_measured(
    ours: float, ddp: float, without: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beyond = None if ours <= 100 else (ddp - 100) / (ours - 100)
    row = StepRow(OURS, 2, ours, ours, 1.0, ddp / ours, 100 / ours, beyond, None, None, 4.0, True)
    others = [
        replace(row, competitor=name, step_ms=ms) for name, ms in ((f"{OURS}+int8", ours), (DDP, ddp), (COMPUTE, 100.0))
    ]
    goals = goals_of([row, *others], "")
    assert [(goal.value, goal.is_reached) for goal in goals[2:]] == [(None, False)] * 2
    for told in (goals[2].missing, str(goals[2])):
        assert all(each in told for each in (without, f"{ours:.2f} ms", f"{ddp:.2f} ms", "100.00 ms"))
    assert "not measured" in str(goals[2])
    assert "2 not measured" in summary(goals)[0]
    run.write(tmp_path / "out.json", {}, Outcome(goals=goals))
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    views = import_module("figure_views")
    monkeypatch.setattr(views, "FOLDER", tmp_path)
    assert views.gpu_goals("out").count("not measured") == 2


def test_the_cpu_has_no_goals_and_no_nccl(capsys: pytest.CaptureFixture[str]) -> None:
    assert summary([]) == []
    with pytest.raises(SystemExit):
        run.parse_arguments(["--device", "cpu", "--backend", "nccl"])
    assert "--device cuda" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpus", "device", "backend", "made"),
    [
        (0, "auto", None, []),
        (1, "auto", None, ["gloo"]),  # shared by two ranks
        (1, "cpu", None, ["gloo"]),
        (2, "cuda", None, []),
        (2, "cuda", "cpu:gloo,cuda:nccl", ["cpu:gloo,cuda:nccl"]),
    ],
)
def test_ranks_that_share_a_gpu_meet_over_gloo(
    gpus: int, device: str, backend: str | None, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.distributed, "init_process_group", found.append)
    monkeypatch.setattr(hvd, "init", lambda **settings: found.append("init"))
    for name, value in (("RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    join_ranks(device, backend)
    assert found == [*made, "init"]


def test_a_part_that_dies_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    outcome = run.started(["gpu"], "NCCL", 60)
    assert (outcome.rows, len(outcome.wrong)) == ([], 1)
