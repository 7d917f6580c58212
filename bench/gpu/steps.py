"""A training step of a GPT in bfloat16: our optimizer, without a codec and with some, beside torch's DDP."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from math import isfinite

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire as hvd
from gradwire.bench.gpu.outcome import Goal, Outcome
from gradwire.bench.gpu.scale import Scale
from gradwire.bench.timing import Times, step_seconds
from gradwire.bench.training.step import DDP, DDP_FP16, OURS, StepCompetitor, measure
from gradwire.bench.training.step_report import COMPUTE, StepRow, format_table
from gradwire.bench.workloads import bytes_gpt, strategies
from gradwire.bench.workloads.loop import Trainee, Workload, shares

LR = 3e-4
BATCHES = 16
"""The batches that are on the device before the clock starts, and that the steps repeat."""
CODECS = ("int8", "onebit", "powersgd")
BUILDERS: dict[str, Callable[[nn.Module], Trainee]] = {
    OURS: strategies.ours,
    **{f"{OURS}+{name}": partial(strategies.ours, compression=name) for name in CODECS},
    DDP: strategies.ddp,
    DDP_FP16: partial(strategies.ddp, fp16=True),
    COMPUTE: strategies.alone,
}
STEP_GOALS = {OURS: 0.9, f"{OURS}+int8": 0.6}
"""The time of a step is to be at most this share of that of DDP."""
BEYOND_GOAL = 2.0
"""The time of DDP's step beyond `compute` is to be at least so many times ours."""
NEAR = {OURS: 0.05, DDP_FP16: 0.05, f"{OURS}+int8": 0.1}
FAR = 0.5
"""The difference of the last step's loss from that of DDP that is allowed, relative to it: of these, and of the others."""


@dataclass(frozen=True)
class GpuStepRow(StepRow):
    """The result of one competitor, and where it ran: network is None on one host."""

    network: str | None
    part: str = "step"


def device_batches(workload: Workload, device: torch.device) -> list[list[Tensor]]:
    """Return this rank's share of BATCHES batches, on the device."""
    return [[share.to(device) for share in shares(workload.batch(step))] for step in range(BATCHES)]


def competitor_of(name: str, workload: Workload, batches: list[list[Tensor]], steps: int) -> StepCompetitor:
    """Return the model of a competitor, in bfloat16, on the device of the batches."""
    trainee = BUILDERS[name](workload.build().to(batches[0][0].device, torch.bfloat16))
    return StepCompetitor(trainee, lambda step: trainee.step(batches[step % BATCHES], LR), steps)


def rounds_within(seconds: float, one: dict[str, Times], scale: Scale) -> int:
    """Return how many rounds fit into so many seconds, from the times of a step of one round: from 1 to scale.rounds."""
    round_s = sum(float(times[0]) for times in one.values()) * scale.steps
    warmup = 2
    return max(1, min(scale.rounds, int(seconds / round_s) - warmup))


def measure_steps(scale: Scale, device: torch.device, seconds: float) -> Outcome:
    """Time the competitors in turns, for about so many seconds, and check their replicas and losses. Collective."""
    workload = bytes_gpt.workload(scale.size, scale.batch * hvd.size())
    batches = device_batches(workload, device)
    competitors = {name: competitor_of(name, workload, batches, scale.steps) for name in BUILDERS}
    rounds = rounds_within(seconds, step_seconds(competitors, device, 1, scale.steps), scale)
    rows, speedups = measure(competitors, workload, device, rounds, scale.steps)
    network = os.environ.get("BENCH_NETWORK")
    meta = {
        "model": "bytes_gpt",
        "preset": f"{scale.preset} in bfloat16",
        "parameters": sum(parameter.numel() for parameter in competitors[OURS].trainee.module.parameters()),
        "batch": scale.batch,
        "context": scale.context,
        "item": workload.item,
        "rounds": rounds,
        "steps": scale.steps,
        "backend": dist.get_backend(),
        "network": network,
    }
    for competitor in competitors.values():
        competitor.trainee.close()
    return Outcome(
        lines=format_table(rows, speedups, meta),
        rows=[GpuStepRow(**asdict(row), network=network) for row in rows],
        goals=goals_of(rows, "" if network is None else ", between hosts"),
        wrong=wrong_of(rows),
    )


def goals_of(rows: list[StepRow], where: str) -> list[Goal]:
    """Return what the rows reach of the goals. where: appended to the names of the goals."""
    by_name = {row.competitor: row for row in rows}
    goals = [
        Goal(f"{name}: step over DDP's{where}", 1 / by_name[name].as_ddp, limit) for name, limit in STEP_GOALS.items()
    ]
    return goals + [_beyond_goal(name, by_name, where) for name in STEP_GOALS]


def _beyond_goal(name: str, by_name: dict[str, StepRow], where: str) -> Goal:
    """Return the goal of the time beyond computing. It needs such a time of the competitor and of DDP."""
    times, missing = by_name[name].beyond_compute_as_ddp, ""
    if times is None or times <= 0:
        without = name if times is None else DDP
        measured = ", ".join(f"{each} {by_name[each].step_ms:.2f} ms" for each in dict.fromkeys((name, DDP, COMPUTE)))
        times, missing = None, f"{without} took no time beyond computing: {measured}"
    return Goal(
        f"{name}: DDP's time beyond computing over ours{where}", times, BEYOND_GOAL, at_least=True, missing=missing
    )


def wrong_of(rows: list[StepRow]) -> list[str]:
    """Return a line for each competitor whose replicas differ, or whose loss is not finite or far from that of DDP."""
    (reference,) = (row.loss for row in rows if row.competitor == DDP)
    wrong = [
        f"{row.competitor}: replicas differ" for row in rows if row.competitor != COMPUTE and not row.replicas_identical
    ]
    for row in rows:
        allowed = NEAR.get(row.competitor, FAR)
        if not isfinite(row.loss) or abs(row.loss - reference) > allowed * reference:
            wrong.append(f"{row.competitor}: loss {row.loss:.4f}, DDP's {reference:.4f}; {allowed:.0%} off is allowed")
    return wrong
