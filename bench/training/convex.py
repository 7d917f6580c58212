"""`torchrun --nproc-per-node 4 -m gradwire.bench convex`: a problem with a known optimum, with and without error feedback.

The problem is ridge regression of the classes of scikit-learn's digits on their pixels. Samples are sorted by class, so each
rank has other digits, and at the optimum its gradient is not zero: only the mean of all ranks' gradients is. All runs take full
gradients from the same start, and differ only in the codec of Communicator.allreduce(), its Feedback, and the step size.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import gradwire as hvd
from gradwire.bench.options import add_results, count_from
from gradwire.bench.results import software_and_machine, write_json
from gradwire.bench.training.convex_report import CONSTANT, DECAYING, ConvexRow, draw, format_header, format_row
from gradwire.bench.workloads.digits_cnn import digits
from gradwire.bench.workloads.loop import join_ranks, share_cores
from gradwire.collectives import Communicator
from gradwire.collectives.compression import Codec, Int4, OneBit, TopK

RIDGE = 0.3
"""The factor of the squared norm of the weights. With it, the largest curvature is 39 times the smallest one."""
HALVED_AFTER = 100
"""The step at which a decaying step size is half of the first one: it is proportional to 1 / (HALVED_AFTER + step)."""
POINTS = 80
"""The most points of a curve, evenly spaced on a logarithmic axis of steps."""
CODECS: dict[str, Codec | None] = {
    "none": None,
    "topk 10 %": TopK(ratio=0.1),
    "onebit": OneBit(),
    "int4": Int4(),
}


class Problem(NamedTuple):
    """Ridge regression, in float64. inputs, targets: this rank's samples. hessian, optimum: of the mean over all samples."""

    inputs: Tensor
    targets: Tensor
    hessian: Tensor
    optimum: Tensor

    def gradient(self, weights: Tensor) -> Tensor:
        """Return the gradient of this rank's loss."""
        return self.inputs.T @ (self.inputs @ weights - self.targets) / len(self.inputs) + RIDGE * weights

    def gap(self, weights: Tensor) -> float:
        """Return by how much the loss over all samples is above its minimum."""
        off = weights - self.optimum
        return 0.5 * (off * (self.hessian @ off)).sum().item()


def make_problem(rank: int, size: int) -> Problem:
    """Return the problem of one rank. Raises ModuleNotFoundError without scikit-learn."""
    images, labels = digits()
    labels, order = labels.sort(stable=True)
    count = len(labels) // size * size
    pixels = images.flatten(1).double()[order[:count]]
    inputs = torch.cat([pixels, torch.ones(count, 1, dtype=torch.float64)], 1)
    targets = F.one_hot(labels[:count]).double()
    hessian = inputs.T @ inputs / count + RIDGE * torch.eye(inputs.shape[1], dtype=torch.float64)
    optimum = torch.linalg.solve(hessian, inputs.T @ targets / count)
    return Problem(inputs.chunk(size)[rank], targets.chunk(size)[rank], hessian, optimum)


def recorded_steps(steps: int) -> list[int]:
    """Return the steps after which the gap is recorded."""
    return sorted({round(steps ** (point / (POINTS - 1))) for point in range(POINTS)})


def descend(
    problem: Problem, communicator: Communicator, name: str, feedback: bool, schedule: str, steps: int
) -> ConvexRow:
    """Minimize the loss over all samples. A collective call."""
    codec = CODECS[name]
    weights = torch.zeros_like(problem.optimum)
    residuals = communicator.new_feedback(codec, weights.numel()) if codec is not None and feedback else None
    largest = torch.linalg.eigvalsh(problem.hessian)[-1].item()
    recorded = set(recorded_steps(steps))
    first, gaps = problem.gap(weights), []
    for step in range(steps):
        mean = problem.gradient(weights).float()  # codecs encode float32, so the runs without one exchange float32 too
        communicator.allreduce(mean, "average", compression=codec, feedback=residuals)
        weights -= mean.double() / largest / (1 + step / HALVED_AFTER if schedule == DECAYING else 1)
        if step + 1 in recorded:
            gaps.append(problem.gap(weights) / first)
    identical = len(set(hvd.allgather_object(weights.numpy().tobytes()))) == 1
    return ConvexRow(name, repr(codec), feedback, schedule, gaps[-1], identical, gaps)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gradwire.bench convex",
        description="Minimize a convex function with and without error feedback. Run under torchrun.",
    )
    parser.add_argument("--steps", type=partial(count_from, 1), default=2000, help="steps of each run (default 2000)")
    add_results(parser, drawn="the distance from the minimum over steps")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark. Return, on every rank, 1 if replicas differ, and 2 if there is only one rank."""
    chosen = parse_arguments(arguments)
    join_ranks("cpu")
    if hvd.size() == 1:
        print(
            "bench convex: one rank exchanges nothing: run it under torchrun --nproc-per-node 2 or more",
            file=sys.stderr,
        )
        return 2
    share_cores()
    problem = make_problem(hvd.rank(), hvd.size())
    meta = {
        **software_and_machine(torch.device("cpu")),
        "backend": dist.get_backend(),
        "world_size": hvd.size(),
        "parameters": problem.optimum.numel(),
        "ridge": RIDGE,
        "recorded_steps": recorded_steps(chosen.steps),
    }
    is_first = hvd.rank() == 0
    if is_first:
        print("\n".join(format_header(meta)), flush=True)
    rows = []
    with Communicator() as communicator:
        for schedule in (CONSTANT, DECAYING):
            for name, codec in CODECS.items():
                for feedback in (False, True) if codec else (False,):
                    rows.append(descend(problem, communicator, name, feedback, schedule, chosen.steps))
                    if is_first:
                        print(format_row(rows[-1]), flush=True)
    if is_first:
        write_json(chosen.json, meta, rows)
        if chosen.plot:
            draw(rows, meta, chosen.plot)
    hvd.shutdown()
    return 0 if all(row.replicas_identical for row in rows) else 1
