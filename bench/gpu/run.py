"""`torchrun --nproc-per-node 2 -m gradwire.bench gpu`: what gradwire costs and hides on a GPU, in about five minutes.

Parts (--parts):

* step: a training step of a GPT of 100 M parameters in bfloat16, our optimizer beside DDP, in turns of a few steps. The host
  waits for the GPU at the ends of turns only. Without as many GPUs as ranks, ranks share them, over gloo.
* hosts: the same between two network namespaces, joined at RATE. It needs root, iproute2 and util-linux.
* call: the time from the call of an asynchronous allreduce to its return.
* overlap: the share of the time of codecs and copies in which backward runs too, by torch.profiler.
* nccl: every verb on CUDA tensors, and `call`, over NCCL, in a process that is one rank alone. On CPUs, the verbs run here.

The figures are printed beside goals. Replicas, losses and the results of verbs are checked. `--device cpu` runs a small form
in seconds without goals, since its figures say nothing about a GPU. With `--backend nccl`, each rank needs a GPU of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gradwire as hvd
from gradwire.bench import hosts
from gradwire.bench.gpu.calls import measure_calls
from gradwire.bench.gpu.outcome import Goal, Outcome, summary
from gradwire.bench.gpu.overlap import measure_overlap
from gradwire.bench.gpu.scale import SCALES, Scale
from gradwire.bench.gpu.steps import measure_steps
from gradwire.bench.gpu.verbs import measure_verbs
from gradwire.bench.options import add_results, names_of, number_from
from gradwire.bench.results import software_and_machine, write_json
from gradwire.bench.timing import TURNS
from gradwire.bench.workloads.loop import choose_device, join_ranks, share_cores

RATE = "10gbit"
SECONDS = 300.0
TURNS_SHARE = 0.2
"""The share of the time that the turns of `step` may take, and those of `hosts` as well."""
LAST_PARTS_S = 70.0
"""What the parts after `hosts` may take."""
TIMEOUT_S = 60.0
BACKENDS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}
"""The backends of torch.distributed, by what moves CUDA tensors."""
LAUNCHED = ("TORCHELASTIC_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_")
"""How the variables begin with which a launcher describes this process, not those that it starts."""


@dataclass
class Run:
    """A run of the benchmark on this rank. ends_s: when it is to end, by time.monotonic()."""

    chosen: argparse.Namespace
    scale: Scale
    device: torch.device
    ends_s: float

    def left_s(self) -> float:
        return max(30.0, self.ends_s - time.monotonic())


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gradwire.bench gpu",
        description=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--device", choices=tuple(SCALES), default="cuda", help="where to train (default cuda)")
    add("--backend", choices=tuple(BACKENDS), default="gloo", help="what moves CUDA tensors for torch (default gloo)")
    add(
        "--parts",
        type=partial(names_of, tuple(PARTS)),
        default=list(PARTS),
        help=f"comma-separated: {', '.join(PARTS)}",
    )
    add("--seconds", type=partial(number_from, 1.0), default=SECONDS, help=f"when to end, about (default {SECONDS:g})")
    add_results(parser)
    chosen = parser.parse_args(arguments)
    if (chosen.device, chosen.backend) == ("cpu", "nccl"):
        parser.error("--backend nccl needs --device cuda: NCCL moves CUDA tensors only")
    if chosen.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA GPU; --device cpu runs a small form of the benchmark")
    return chosen


def step(run: Run) -> Outcome:
    return measure_steps(run.scale, run.device, TURNS_SHARE * run.chosen.seconds)


def between_hosts(run: Run) -> Outcome:
    """Run `step` on two simulated hosts. If they cannot be made, a line says why."""
    seconds = max(LAST_PARTS_S, run.left_s() - LAST_PARTS_S)
    cluster = ["hosts", "--hosts", "2", "--ranks", "2", "--rate", RATE, "--deadline-s", f"{seconds:.0f}", "--"]
    arguments = ["gpu", "--parts", "step", "--device", run.chosen.device, "--seconds", f"{run.chosen.seconds:.0f}"]

    def begin() -> Outcome:
        try:
            hosts.check_machine()
            with hosts.Cluster(2, RATE):
                pass
        except hosts.HostsError as error:
            return Outcome([f"# between hosts: not measured: {error}"])
        return started([*cluster, *arguments], "between hosts", seconds)

    return on_rank_0(begin)


def nccl(run: Run) -> Outcome:
    """Run the verbs and calls over NCCL. A process of its own keeps an error of NCCL from the other parts."""
    if run.device.type == "cpu":
        outcome = measure_verbs(run.device)
        outcome.lines.append("# NCCL: needs a GPU")
        return outcome
    if not dist.is_nccl_available():
        return Outcome(["# NCCL: not measured: this build of torch has none"])
    if run.chosen.backend == "nccl":  # this process is alone, or each rank has a GPU of its own
        return measure_verbs(run.device)
    alone = ["gpu", "--backend", "nccl", "--parts", "call,nccl"]
    return on_rank_0(partial(started, alone, "NCCL", run.left_s()))


def on_rank_0(begin: Callable[[], Outcome]) -> Outcome:
    """Return on all ranks what a function returns on rank 0, for whose processes the others wait."""
    outcome = begin() if hvd.rank() == 0 else None
    dist.barrier()  # torch's deadline is longer than TIMEOUT_S
    received: Outcome = hvd.broadcast_object(outcome)
    return received


def started(arguments: Sequence[str], what: str, seconds: float) -> Outcome:
    """Run a benchmark in processes of its own, and return its results. They print what they have measured."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHED)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "out.json")
        command = [sys.executable, "-m", "gradwire.bench", *arguments, "--json", str(path)]
        try:
            limit_s = seconds + hosts.GRACE_S
            done = subprocess.run(command, env=outer, stderr=subprocess.PIPE, text=True, timeout=limit_s)
            code, said = done.returncode, done.stderr.strip()
        except subprocess.TimeoutExpired as late:
            code, said = hosts.DEADLINE_EXIT, f"it had not ended after {late.timeout:.0f} s"
        result: dict[str, Any] = {"meta": {"goals": [], "wrong": []}, "rows": []}
        if path.exists():
            result = json.loads(path.read_text())
    goals = [Goal(**{name: goal[name] for name in Goal.__dataclass_fields__}) for goal in result["meta"]["goals"]]
    wrong = result["meta"]["wrong"]
    if code != 0 and not wrong:
        wrong = [f"{what}: exit code {code}: {said[-2000:]}"]
    return Outcome(rows=result["rows"], goals=goals, wrong=wrong)


PARTS: dict[str, Callable[[Run], Outcome]] = {
    "step": step,
    "hosts": between_hosts,
    "call": lambda run: measure_calls(run.scale, run.device),
    "overlap": lambda run: measure_overlap(run.scale, run.device),
    "nccl": nccl,
}


def main(arguments: Sequence[str]) -> int:
    """Run the parts. Return 1, on every rank, if a check of results has failed, or a process that a part has started."""
    chosen = parse_arguments(arguments)
    ends_s = time.monotonic() + chosen.seconds
    join_ranks(chosen.device, BACKENDS[chosen.backend], timeout_s=TIMEOUT_S)
    share_cores()
    run = Run(chosen, SCALES[chosen.device], choose_device(chosen.device), ends_s)
    meta = {**software_and_machine(run.device), "world_size": hvd.size(), "time": TURNS}
    found = Outcome()
    if hvd.rank() == 0 and chosen.device == "cpu":
        print("# The small form on CPUs: its figures say nothing about a GPU.", flush=True)
    for name in chosen.parts:
        outcome = PARTS[name](run)
        if run.device.type == "cpu":
            outcome.goals.clear()
        found.add(outcome)
        gc.collect()  # models and their optimizers hold each other
        if run.device.type == "cuda":
            torch.cuda.empty_cache()  # for the processes that later parts start
        if hvd.rank() == 0:
            if outcome.lines:  # otherwise other processes have printed them
                print("\n".join([*outcome.lines, *map(str, outcome.goals)]), flush=True)
            write(chosen.json, meta, found)  # so that a later part cannot take these results along
    if hvd.rank() == 0:
        for line in [*(f"# WRONG: {each}" for each in found.wrong), *summary(found.goals)]:
            print(line, flush=True)
    hvd.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()
    return 1 if found.wrong else 0


def write(path: Path | None, meta: dict[str, Any], found: Outcome) -> None:
    goals = [{**asdict(goal), "is_reached": goal.is_reached} for goal in found.goals]
    write_json(path, {**meta, "goals": goals, "wrong": found.wrong}, found.rows)
