"""`torchrun --nproc-per-node 2 -m gradwire.bench shares`: a global batch divided among ranks of different speed.

A cgroup limits one rank to a part of a core (--slow), which needs root. All competitors train the same model from the same
weights, on global batches of the same size, in turns of a few steps (see `gradwire.bench.timing`):

* `BatchShares`: ours, with the shares that hvd.BatchShares has found within --warmup steps, and goes on to measure.
* `0.30` and others: ours, with this share for the slow rank, and equal shares for the others (--splits).
* `equal`, `ddp`: ours and torch's DDP, with equal shares.
* `alone`: exchanges nothing. Its samples per second are the sum of those of the ranks, with equal shares: no division among ranks
  that exchange gradients can be much faster.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import gradwire as hvd
from gradwire.bench.options import add_results, add_turns, count_from, number_from
from gradwire.bench.results import software_and_machine, write_json
from gradwire.bench.timing import TURNS, Protocol, every_rank, meeting, slowest_rank, speedup_interval, take_turns
from gradwire.bench.training.shares_report import ALONE, DDP, EQUAL, MEASURED, ShareRow, draw, format_table
from gradwire.bench.workloads import bytes_gpt, strategies
from gradwire.bench.workloads.loop import Trainee, join_ranks, share_cores

LR = 1e-3
GLOBAL_BATCHES = 32
"""The number of different global batches."""
SPLITS = [0.4, 0.3, 0.2, 0.1]
CGROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 10_000
"""The period of the limit, short beside a step: within each, the slow rank computes first, and then pauses."""


@contextmanager
def limited(cores: float, root: Path = CGROUPS) -> Iterator[None]:
    """Limit this process to so many cores of time, by a cgroup of version 2 or 1. root: where cgroups are mounted. Raises OSError
    without the permission."""
    parent = root if (root / "cgroup.controllers").exists() else root / "cpu"
    quota = f"{int(cores * PERIOD_US)}"
    settings = {"cpu.max": f"{quota} {PERIOD_US}"}
    if parent is root:
        (root / "cgroup.subtree_control").write_text("+cpu")
    else:
        settings = {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": quota}
    group = parent / f"gradwire-bench-{os.getpid()}"
    group.mkdir()
    try:
        for name, value in settings.items():
            (group / name).write_text(value)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (parent / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


class Competitor:
    """A model in training on this rank's parts of global batches. A call trains for one turn of `steps` steps."""

    def __init__(self, trainee: Trainee, sampler: hvd.BatchShares, data: Sequence[Tensor], steps: int) -> None:
        self.trainee, self.sampler = trainee, sampler
        self._data, self._steps = data, steps
        self._parts = self._endless()

    def __call__(self) -> None:
        self.train(self._steps)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            part = next(self._parts)
            if isinstance(self.trainee.optimizer, hvd.DistributedOptimizer):
                self.trainee.optimizer.weigh(len(part))
            self.trainee.step([each[part] for each in self._data], LR)

    def _endless(self) -> Iterator[list[int]]:
        for epoch in count():
            self.sampler.set_epoch(epoch)
            yield from self.sampler


def slowness(text: str) -> tuple[int, float]:
    """Return the number of a rank and its cores, from a text such as 1:0.25."""
    rank, _, cores = text.partition(":")
    return count_from(0, rank), number_from(0.1, cores)


def splits(text: str) -> list[float]:
    """Return the shares in a text such as 0.4,0.3."""
    found = [number_from(0.01, each) for each in text.split(",")]
    if max(found) > 0.99:
        raise argparse.ArgumentTypeError(f"{max(found):g} is not a share from 0.01 to 0.99")
    return found


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gradwire.bench shares",
        description="Time the divisions of a global batch among ranks of different speed. Run under torchrun, as root.",
    )
    add, positive = parser.add_argument, partial(count_from, 1)
    bytes_gpt.add_flags(parser, batch=16)
    add("--slow", type=slowness, default=(1, 0.25), metavar="RANK:CORES", help="a slow rank (default 1:0.25)")
    add("--splits", type=splits, default=SPLITS, metavar="SHARES", help="fixed shares of it (default 0.4,0.3,0.2,0.1)")
    add("--warmup", type=positive, default=50, help="steps of BatchShares before it is timed (default 50)")
    add_turns(parser, steps=5)
    add_results(parser, "the samples per second by the share of the slow rank")
    return parser.parse_args(arguments)


def competitors_of(chosen: argparse.Namespace) -> dict[str, Competitor]:
    """Return the competitors, by name."""
    workload = bytes_gpt.workload(bytes_gpt.size_of(chosen), chosen.batch * hvd.size())
    data = [torch.cat(each) for each in zip(*map(workload.batch, range(GLOBAL_BATCHES)), strict=True)]
    sampler = partial(hvd.BatchShares, data[0], workload.samples)
    ours = partial(strategies.ours, exchange_plan=hvd.ExchangePlan())  # else it would try others while it is timed
    trainee = ours(workload.build())
    assert isinstance(trainee.optimizer, hvd.DistributedOptimizer)
    found = {MEASURED: (trainee, sampler(optimizer=trainee.optimizer))}
    for share in chosen.splits:
        shares = [(1 - share) / (hvd.size() - 1)] * hvd.size()
        shares[chosen.slow[0]] = share
        found[f"{share:.2f}"] = ours(workload.build()), sampler(shares=shares)
    for name, build in ((EQUAL, ours), (DDP, strategies.ddp), (ALONE, strategies.alone)):
        found[name] = build(workload.build()), sampler(shares=[1] * hvd.size())
    return {name: Competitor(*each, data, chosen.steps) for name, each in found.items()}


def measure(competitors: dict[str, Competitor], chosen: argparse.Namespace) -> list[ShareRow]:
    """Return the rows, the same on all ranks. Collective."""
    device = torch.device("cpu")
    for name, competitor in competitors.items():
        competitor.train(chosen.warmup if name == MEASURED else 1)
    found = competitors[MEASURED].sampler.shares
    turns, _ = take_turns(list(competitors.values()), meeting(device), Protocol(chosen.rounds, check_iters=0))
    turns /= chosen.steps
    own_s = every_rank(turns[list(competitors).index(ALONE)], device)
    seconds = dict(zip(competitors, slowest_rank(turns, device), strict=True))
    seconds[ALONE] = hvd.size() / (1 / own_s).sum(axis=0)  # in which the ranks together compute a global batch
    median = {name: float(np.median(taken)) for name, taken in seconds.items()}
    samples = competitors[MEASURED].sampler.global_batch
    return [
        ShareRow(
            competitor=name,
            parts=found if name == MEASURED else competitor.sampler.shares,
            parts_at_end=competitor.sampler.shares,
            slow_rank=chosen.slow[0],
            step_ms=1e3 * median[name],
            samples_per_s=samples / median[name],
            of_alone=median[ALONE] / median[name],
            interval=speedup_interval(seconds[name], seconds[ALONE]),
            replicas_identical=name == ALONE or competitor.trainee.is_identical(),
        )
        for name, competitor in competitors.items()
    ]


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark. Return, on every rank, 1 if replicas are not identical, and 2 if no rank can be made slow."""
    chosen = parse_arguments(arguments)
    join_ranks("cpu")
    share_cores()
    slow, cores = chosen.slow
    if not 0 <= slow < hvd.size() > 1:
        print(f"bench shares: --slow names rank {slow}, and there are ranks 0 to {hvd.size() - 1}", file=sys.stderr)
        return 2
    competitors = competitors_of(chosen)
    with ExitStack() as stack:
        fault = ""
        if hvd.rank() == slow:
            try:
                stack.enter_context(limited(cores))
            except OSError as error:
                fault = f"bench shares: the processor time of rank {slow} cannot be limited: {error}"
                print(fault, file=sys.stderr)
        if any(hvd.allgather_object(fault)):
            return 2
        rows = measure(competitors, chosen)
    if hvd.rank() == 0:
        meta = {
            **software_and_machine(torch.device("cpu")),
            "backend": dist.get_backend(),
            "slow": f"rank {slow} has {cores:g} of a core",
            "preset": chosen.preset,
            "parameters": sum(each.numel() for each in competitors[MEASURED].trainee.module.parameters()),
            "context": bytes_gpt.size_of(chosen).context,
            "world_size": hvd.size(),
            "batch": chosen.batch,
            "warmup": chosen.warmup,
            "steps": chosen.steps,
            "rounds": chosen.rounds,
            "time": TURNS,
        }
        print("\n".join(format_table(rows, meta)), flush=True)
        write_json(chosen.json, meta, rows)
        if chosen.plot:
            draw(rows, meta, chosen.plot)
    hvd.shutdown()
    return 0 if all(row.replicas_identical for row in rows) else 1
