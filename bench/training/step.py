"""`torchrun --nproc-per-node 2 -m gradwire.bench step`: a training step of bytes_gpt with our optimizer and with DDP.

All competitors train the same model from the same weights on the same data, in turns of a few steps (see
`gradwire.bench.timing`). `gradwire+ddp` is torch's DDP over our backend of torch.distributed. `compute` exchanges
nothing: its time is the least that a step takes, and its replicas diverge. Flags add variants of our optimizer (*ours*)
and of DDP:

* --compression: ours with each codec, and DDP with torch's fp16 hook. `auto` chooses among the others, or int8.
* --reports: ours with on_step, with a check of replicas after every step, and with a recorded timeline.
* --commits: ours with a commit to the memory of its host after every step.
* --shard-states: ours with sharded states, also with codecs, and DDP with torch's ZeroRedundancyOptimizer.
* --overlap: ours with rules.NextForward, also with codecs. Then no competitor clips gradients,
  since clipping waits for all of them.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import gradwire as hvd
from gradwire.bench.options import count_from
from gradwire.bench.results import software_and_machine, write_json
from gradwire.bench.timing import (
    Protocol,
    distributed_waits,
    format_interval,
    median_and_p99,
    slowest_rank,
    speedup_interval,
    take_turns,
)
from gradwire.bench.training.committing import committing_trainee
from gradwire.collectives import Communicator
from gradwire.collectives.diagnostics.timeline import Timeline
from gradwire.trainer.examples import bytes_gpt
from gradwire.trainer.examples.loop import (
    Task,
    Trainee,
    adamw,
    choose_device,
    ddp_trainee,
    digest,
    our_trainee,
    share_cores,
)
from gradwire.trainer.examples.report import Record
from gradwire.trainer.reducer.choice import WINDOW
from gradwire.trainer.reducer.compression import AUTO, NAMES

PRESETS: dict[str, dict[str, Any]] = {"small": {}, **bytes_gpt.PRESETS}
LR = 1e-3
OURS, OURS_DDP, DDP, DDP_FP16, DDP_ZERO, COMPUTE = "gradwire", "gradwire+ddp", "ddp", "ddp+fp16", "ddp+zero", "compute"
ONE_WAY = {"dgc", "powersgd", "qsgd", "terngrad"}
"""Codecs that encode gradients only, not the parameters that rules.Sharded gathers."""
CODECS = (*(name for name in NAMES if name != "none"), AUTO)


@dataclass(frozen=True)
class StepRow:
    """One competitor's result. step_ms, p99_ms: median and 99th percentile of the turns, per step, on the slowest rank.

    as_ddp, as_compute: the speed as a multiple of theirs. beyond_compute_as_ddp: DDP's median time beyond `compute` in
    the same round, over the competitor's; None if it takes no longer than `compute`. loss: of the last step, averaged
    over the ranks. replicas_identical: whether the ranks' final weights are bitwise equal.
    """

    competitor: str
    world_size: int
    step_ms: float
    p99_ms: float
    tokens_per_s: float
    as_ddp: float
    as_compute: float
    beyond_compute_as_ddp: float | None
    loss: float
    replicas_identical: bool


@dataclass(frozen=True)
class StepSpeedup:
    """The speed of a competitor as a multiple of a peer's in this run. interval: of 95 %; None with too few turns."""

    competitor: str
    peer: str
    times: float
    interval: tuple[float, float] | None


def fp16_trainee(module: nn.Module) -> Trainee:
    """Return a model under DDP with torch's fp16 hook."""
    trainee = ddp_trainee(module)
    assert isinstance(trainee.forward, DistributedDataParallel)
    trainee.forward.register_comm_hook(None, fp16_compress_hook)
    return trainee


def backend_trainee(module: nn.Module) -> Trainee:
    """Return a model under DDP over our backend of torch.distributed."""
    group = dist.new_group(backend="gradwire")
    return Trainee(module, DistributedDataParallel(module, process_group=group), adamw(module), lambda: 0.0, Record())


def overlapping_trainee(module: nn.Module, **options: Any) -> Trainee:
    """Return our trainee, with each update delayed to the next forward."""
    return our_trainee(module, rule=hvd.rules.NextForward(module), **options)


def zero_trainee(module: nn.Module) -> Trainee:
    """Return a model under DDP, with an AdamW whose state is divided among the ranks."""
    whole = adamw(module)
    settings = {name: value for name, value in whole.defaults.items() if name in ("lr", "betas")}
    optimizer = ZeroRedundancyOptimizer(whole.param_groups, torch.optim.AdamW, **settings)
    return replace(ddp_trainee(module), optimizer=optimizer)


def recorded_trainee(module: nn.Module) -> Trainee:
    """Return our trainee, with its operations recorded for a timeline that is not written."""
    communicator = Communicator()
    trainee = our_trainee(module, process_set=communicator)
    communicator.record(Timeline(), OURS)
    return trainee


def compute_trainee(module: nn.Module) -> Trainee:
    """Return a model whose gradients are not exchanged."""
    return Trainee(module, module, adamw(module), lambda: 0.0, Record())


class StepCompetitor:
    """A model in training. A call trains for one turn."""

    def __init__(self, trainee: Trainee, task: Task, config: bytes_gpt.GPTConfig, steps: int) -> None:
        self.trainee = trainee
        self.loss = 0.0
        self._task = task
        self._share = config.batch // hvd.size()
        self._steps = steps
        self._done = 0

    def __call__(self) -> None:
        mine = slice(hvd.rank() * self._share, (hvd.rank() + 1) * self._share)
        device = next(self.trainee.module.parameters()).device
        for step in range(self._done, self._done + self._steps):
            inputs, targets = self._task.batch(step)
            self.loss = self.trainee.step(inputs[mine].to(device), targets[mine].to(device), LR)
        self._done += self._steps
        if isinstance(self.trainee.optimizer, hvd.DistributedOptimizer):
            self.trainee.optimizer.settle()  # the update belongs to this turn


def codecs(text: str) -> tuple[str, ...]:
    names = CODECS[:-1] if text == "all" else tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in CODECS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(CODECS)}, all; none always takes part")
    return names


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gradwire.bench step",
        description="Time a training step of bytes_gpt: our optimizer, torch's DDP, and no exchange. Run under torchrun.",
    )
    add = parser.add_argument
    add("--preset", choices=tuple(PRESETS), default="small", help="the model (default small)")
    add("--batch", type=partial(count_from, 1), default=4, help="sequences a rank and step (default 4)")
    add("--context", type=partial(count_from, 1), help="bytes of a sequence (default as the model has it)")
    add("--compression", type=codecs, default=(), metavar="NAMES", help="comma-separated codecs to compare, or all")
    add("--reports", action="store_true", help="also measure steps with on_step, checks of replicas and a timeline")
    add("--commits", action="store_true", help="compare a commit of hvd.elastic after every step, too")
    add("--shard-states", action="store_true", help="compare optimizers whose state is spread over the ranks, too")
    add("--overlap", action="store_true", help="compare waiting in the next forward, too, and clip no gradients")
    add("--steps", type=partial(count_from, 1), default=5, help="steps in one turn (default 5)")
    add("--rounds", type=partial(count_from, 1), default=20, help="timed turns of each competitor (default 20)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to train (default auto)")
    add("-J", "--json", type=Path, metavar="FILE", help="write meta and rows")
    return parser.parse_args(arguments)


def configured(chosen: argparse.Namespace) -> bytes_gpt.GPTConfig:
    settings = {**PRESETS[chosen.preset], "batch": chosen.batch * hvd.size()}
    return bytes_gpt.GPTConfig(**settings, **({"context": chosen.context} if chosen.context else {}))


def builders(
    compression: Sequence[str],
    reports: bool = False,
    shard_states: bool = False,
    overlap: bool = False,
    commits: bool = False,
) -> dict[str, Callable[[nn.Module], Trainee]]:
    """Return the functions that make the competitors from models, by name."""
    reporting: dict[str, Callable[[nn.Module], Trainee]] = {
        f"{OURS}+on_step": partial(our_trainee, on_step=lambda metrics: None),
        f"{OURS}+check": partial(our_trainee, check_replicas_every=1),
        f"{OURS}+timeline": recorded_trainee,
    }
    named = [name for name in compression if name != AUTO]
    allow = [name for name in named if name != "powersgd"] or None
    compressed: dict[str, Callable[[nn.Module], Trainee]] = {
        f"{OURS}+{name}": partial(our_trainee, compression=name, allow=allow if name == AUTO else None)
        for name in compression
    }
    sharded = {f"{OURS}+shards": partial(our_trainee, rule=hvd.rules.Sharded())} | {
        f"{OURS}+shards+{name}": partial(our_trainee, compression=name, rule=hvd.rules.Sharded(name))
        for name in named
        if name not in ONE_WAY
    }
    overlapping: dict[str, Callable[[nn.Module], Trainee]] = {
        f"{OURS}+next_forward": overlapping_trainee,
        **{f"{OURS}+next_forward+{name}": partial(overlapping_trainee, compression=name) for name in named},
    }
    return {
        OURS: our_trainee,
        **compressed,
        **(overlapping if overlap else {}),
        **(reporting if reports else {}),
        **({f"{OURS}+commits": committing_trainee} if commits else {}),
        **(sharded if shard_states else {}),
        OURS_DDP: backend_trainee,
        DDP: ddp_trainee,
        **({DDP_FP16: fp16_trainee} if compression else {}),
        **({DDP_ZERO: zero_trainee} if shard_states else {}),
        COMPUTE: compute_trainee,
    }


def measure(chosen: argparse.Namespace, device: torch.device) -> tuple[list[StepRow], list[StepSpeedup], int]:
    """Return the rows, the speedups of ours over DDP, and the model's number of parameters; the same on all ranks."""
    config = configured(chosen)
    task = bytes_gpt.task(config)
    competitors: dict[str, StepCompetitor] = {}
    flags = chosen.reports, chosen.shard_states, chosen.overlap, chosen.commits
    for name, build in builders(chosen.compression, *flags).items():
        torch.manual_seed(config.seed)
        trainee = build(task.build().to(device))
        if chosen.overlap:
            trainee.clip_norm = None
        competitors[name] = StepCompetitor(trainee, task, config, chosen.steps)
    settled = 3 + WINDOW * (1 + len(chosen.compression)) if AUTO in chosen.compression else 0
    for _ in range(-(-settled // chosen.steps)):
        competitors[f"{OURS}+{AUTO}"]()  # 'auto' chooses before anything is timed
    protocol = Protocol(chosen.rounds, warmup_iters=2, check_iters=0)
    turns, _ = take_turns(list(competitors.values()), lambda: None, lambda: 0, distributed_waits(device), protocol)
    seconds = dict(zip(competitors, slowest_rank(turns / chosen.steps, device), strict=True))
    median = {name: median_and_p99(times)[0] for name, times in seconds.items()}
    beyond = {name: float(np.median(times - seconds[COMPUTE])) for name, times in seconds.items()}  # in the same round
    rows: list[StepRow] = []
    for name, competitor in competitors.items():
        loss = hvd.allreduce(torch.tensor(competitor.loss, dtype=torch.float64, device=device), op=hvd.Average)
        digests = hvd.allgather_object(digest(competitor.trainee.module))
        rows.append(
            StepRow(
                competitor=name,
                world_size=hvd.size(),
                step_ms=median[name] * 1e3,
                p99_ms=median_and_p99(seconds[name])[1] * 1e3,
                tokens_per_s=task.items_per_step / median[name],
                as_ddp=median[DDP] / median[name],
                as_compute=median[COMPUTE] / median[name],
                beyond_compute_as_ddp=beyond[DDP] / beyond[name] if beyond[name] > 0 else None,
                loss=float(loss),
                replicas_identical=len(set(digests)) == 1,
            )
        )
    parameters = sum(parameter.numel() for parameter in competitors[OURS].trainee.module.parameters())
    speedups = [
        StepSpeedup(ours, peer, median[peer] / median[ours], speedup_interval(seconds[ours], seconds[peer]))
        for ours in seconds
        if ours.startswith(OURS)
        for peer in (DDP, DDP_FP16, DDP_ZERO)
        if peer in seconds
    ]
    return rows, speedups, parameters


def format_table(rows: Sequence[StepRow], speedups: Sequence[StepSpeedup], meta: dict[str, Any]) -> list[str]:
    width = max(8, *(len(row.competitor) for row in rows))
    shape = f"{meta['batch']} sequences of {meta['context']} bytes a rank"
    return [
        f"# step of bytes_gpt {meta['preset']}: {meta['parameters'] / 1e6:.2f} M parameters, {shape},"
        f" world size {rows[0].world_size} backend {meta['backend']}, {meta['rounds']} turns of {meta['steps']} steps",
        *([f"# Network: {meta['network']}"] if meta["network"] else []),
        "#",
        f"# {'':{width}}     step      p99            times as fast as  beyond compute,",
        f"# {'':{width}}     (ms)     (ms)  tokens/s      ddp   compute  as fast as ddp      loss  replicas",
        *(
            f"  {row.competitor:{width}} {row.step_ms:8.2f} {row.p99_ms:8.2f} {row.tokens_per_s:9.0f}"
            f" {row.as_ddp:8.2f} {row.as_compute:9.2f} {_times(row.beyond_compute_as_ddp):>15} {row.loss:9.4f}"
            f"  {'identical' if row.replicas_identical else 'differ'}"
            for row in rows
        ),
        *(
            f"# {speedup.competitor} is {speedup.times:.2f} times as fast as {speedup.peer}"
            f"  {format_interval(speedup.interval)}".rstrip()
            for speedup in speedups
        ),
    ]


def _times(speedup: float | None) -> str:
    return "-" if speedup is None else f"{speedup:.2f}"


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark. Return 1, on every rank, if replicas that exchange gradients are not identical."""
    chosen = parse_arguments(arguments)
    if AUTO in chosen.compression:
        logging.basicConfig(format="# %(message)s")
        logging.getLogger("gradwire").setLevel(logging.INFO)
    hvd.init()
    share_cores()
    device = choose_device(chosen.device)
    rows, speedups, parameters = measure(chosen, device)
    if hvd.rank() == 0:
        meta = {
            **software_and_machine(device),
            "backend": dist.get_backend(),
            "preset": chosen.preset,
            "parameters": parameters,
            "batch": chosen.batch,
            "context": configured(chosen).context,
            "steps": chosen.steps,
            "rounds": chosen.rounds,
            "speedups": [asdict(speedup) for speedup in speedups],
            "time": "median over interleaved turns, per step, each as long as on its slowest rank",
        }
        print("\n".join(format_table(rows, speedups, meta)), flush=True)
        write_json(chosen.json, meta, rows)
    hvd.shutdown()
    return 0 if all(row.replicas_identical for row in rows if row.competitor != COMPUTE) else 1
