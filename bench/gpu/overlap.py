"""The share of the time of codecs and copies in which backward runs too, from a trace of torch.profiler.

In a trace, the kernels of backward are those that autograd's functions launched. Most of them are on one stream, the stream
of backward. Kernels and copies on other streams are those of codecs and of copies to and from the host, but for NCCL's.
"""

from __future__ import annotations

import json
import math
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import gradwire as hvd
from gradwire.bench.gpu.outcome import Goal, Outcome
from gradwire.bench.gpu.scale import Scale
from gradwire.bench.gpu.steps import competitor_of, device_batches
from gradwire.bench.training.step import OURS
from gradwire.bench.workloads import bytes_gpt

COMPETITORS = (OURS, f"{OURS}+int8")
STEPS, WARMUP_STEPS = 4, 4
GOAL = 0.8
STEP = "gradwire.bench step"
BACKWARD = "autograd::engine::evaluate_function"
_ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
_LAUNCHES = {"cuda_runtime", "cuda_driver"}

Event = dict[str, Any]
Interval = tuple[float, float]


@dataclass(frozen=True)
class Overlap:
    """The times of some steps. share: of the time of codecs and copies, that in which backward ran too; None without such."""

    backward_ms: float
    codec_and_copy_ms: float
    share: float | None


@dataclass(frozen=True)
class OverlapRow:
    """An Overlap of one competitor on one rank: the times are those of a step."""

    competitor: str
    backward_ms: float
    codec_and_copy_ms: float
    share: float | None
    part: str = "overlap"


def trace(train: Callable[[], object], steps: int, device: torch.device) -> list[Event]:
    """Return the events of a trace of some steps."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as recorded:
        for _ in range(steps):
            with record_function(STEP):
                train()
        if on_gpu:
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        recorded.export_chrome_trace(str(path))
        found: list[Event] = json.loads(path.read_text())["traceEvents"]
    return [event for event in found if event.get("ph") == "X"]


def _interval(event: Event) -> Interval:
    begin = float(event["ts"])
    return begin, begin + float(event["dur"])


def _within(event: Event, intervals: Sequence[Interval]) -> int | None:
    """Return the number of the interval, of a sorted sequence, in which an event begins; None if it begins in none."""
    begin = float(event["ts"])
    number = bisect_right(intervals, (begin, math.inf)) - 1
    return number if number >= 0 and begin < intervals[number][1] else None


def overlap(events: Sequence[Event]) -> Overlap:
    """Return the Overlap of the steps in a trace. Times of a trace are in microseconds.

    Without kernels of a GPU, backward is what autograd's functions take on the CPU.
    """
    steps = sorted(
        _interval(event) for event in events if event["name"] == STEP and event.get("cat") == "user_annotation"
    )
    functions: dict[Any, list[Interval]] = defaultdict(list)
    for event in events:
        if event["name"].startswith(BACKWARD) and event.get("cat") == "cpu_op":
            functions[event["tid"]].append(_interval(event))
    for intervals in functions.values():
        intervals.sort()
    step_of = {
        event["args"]["correlation"]: _within(event, steps)
        for event in events
        if event.get("cat") in _LAUNCHES and _within(event, functions.get(event["tid"], ())) is not None
    }
    on_gpu = [event for event in events if event.get("cat") in _ON_GPU]
    launched: dict[Any, list[tuple[int | None, Interval]]] = defaultdict(list)
    for event in on_gpu:  # hooks of gradients launch copies, too, which may take longer than backward
        if event["cat"] == "kernel" and event["args"]["correlation"] in step_of:
            launched[event["args"]["stream"]].append((step_of[event["args"]["correlation"]], _interval(event)))
    if not launched:
        return Overlap(sum(high - low for spans in functions.values() for low, high in spans) / 1e3, 0.0, None)
    stream = max(launched, key=lambda each: sum(high - low for _, (low, high) in launched[each]))
    spans: dict[int | None, list[Interval]] = defaultdict(list)
    for step, span in launched[stream]:
        spans[step].append(span)
    backward = [(min(low for low, _ in each), max(high for _, high in each)) for each in spans.values()]
    others = [
        _interval(event)
        for event in on_gpu
        if event["args"]["stream"] != stream and "nccl" not in event["name"].lower()
    ]
    total = sum(high - low for low, high in others)
    beside = sum(max(0.0, min(high, end) - max(low, begin)) for low, high in others for begin, end in backward)
    return Overlap(sum(high - low for low, high in backward) / 1e3, total / 1e3, beside / total if total > 0 else None)


def measure_overlap(scale: Scale, device: torch.device) -> Outcome:
    """Trace some steps of COMPETITORS on every rank. The figures are those of rank 0. Collective."""
    outcome = Outcome()
    workload = bytes_gpt.workload(scale.size, scale.batch * hvd.size())
    batches = device_batches(workload, device)
    for name in COMPETITORS:
        competitor = competitor_of(name, workload, batches, steps=1)
        for _ in range(WARMUP_STEPS):
            competitor()
        found = overlap(trace(competitor, STEPS, device))
        competitor.trainee.close()
        row = OverlapRow(name, found.backward_ms / STEPS, found.codec_and_copy_ms / STEPS, found.share)
        outcome.rows.append(row)
        if row.backward_ms <= 0:
            outcome.wrong.append(f"{name}: the profiler has recorded no backward")
        text = f"# {name}: {row.backward_ms:.2f} ms of backward a step in the profiler's trace"
        if row.share is None:
            missing = (
                "no codec or copy on a stream of its own" if device.type == "cuda" else "codecs and copies need a GPU"
            )
            outcome.lines.append(f"{text}; {missing}")
        else:
            outcome.lines.append(f"{text}, {row.codec_and_copy_ms:.2f} ms of codecs and copies")
            outcome.goals.append(
                Goal(f"{name}: share of codecs and copies beside backward", row.share, GOAL, at_least=True)
            )
    return outcome
