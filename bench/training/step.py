"""`torchrun --nproc-per-node 2 -m gradwire.bench step`: a training step with our optimizer and with DDP.

All competitors train the same model (--model) from the same weights on the same data, in turns of a few steps (see
`gradwire.bench.timing`). `gradwire+ddp` is torch's DDP over our backend of torch.distributed. `compute` exchanges
nothing: its time is the least that a step takes, and its replicas diverge. Flags add variants of our optimizer (*ours*)
and of DDP:

* --compression: ours with each codec, and DDP with torch's fp16 hook. `auto` chooses among the others, or int8.
* --plans: ours with each of several fixed plans of the exchange, beside `gradwire`, which chooses its plan by measured
  steps before it is timed.
* --reports: ours with on_step, with a check of replicas after every step, and with a recorded timeline.
* --commits: ours with a commit to the memory of its host after every step.
* --hook: DDP with hvd.ddp_comm_hook("none").
* --shard-states: ours with sharded states, also with codecs, and DDP with torch's ZeroRedundancyOptimizer.
* --overlap: ours with rules.NextForward, also with codecs. Then no competitor clips gradients,
  since clipping waits for all of them.

--bucket-view makes DDP, in all its variants, keep gradients in its buckets, as ours does.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire as hvd
from gradwire.bench.options import add_results, add_turns
from gradwire.bench.results import software_and_machine, write_json
from gradwire.bench.timing import TURNS, median_and_p99, speedup_interval, step_seconds
from gradwire.bench.training.step_plans import fixed_plans
from gradwire.bench.training.step_report import COMPUTE, StepRow, StepSpeedup, format_table
from gradwire.bench.workloads import bytes_gpt, digits_cnn, mlp, strategies
from gradwire.bench.workloads.loop import Trainee, Workload, choose_device, join_ranks, share_cores
from gradwire.trainer.reducer.compression import AUTO, NAMES

LR = 1e-3
OURS, OURS_DDP, OURS_HOOK = "gradwire", "gradwire+ddp", "gradwire+hook"
DDP, DDP_FP16, DDP_ZERO = "ddp", "ddp+fp16", "ddp+zero"
GPT = "bytes_gpt"
SMALL: dict[str, Callable[[int], Workload]] = {"digits_cnn": digits_cnn.workload, "mlp": mlp.workload}
"""The workloads of one size, by name, each a function of the samples of a global batch."""
ONE_WAY = {"dgc", "powersgd", "qsgd", "terngrad"}
"""Codecs that encode gradients only, not the parameters that rules.Sharded gathers."""
AUTO_STEPS = 10
"""The steps for which compression="auto" tries each codec."""
CODECS = (*(name for name in NAMES if name != "none"), AUTO)
CHOOSES_PLAN = {
    OURS,
    OURS_HOOK,
    *(f"{OURS}+{name}" for name in ("fp16", "bf16", "on_step", "check", "timeline", "commits")),
}
"""The competitors that choose the plan of their exchange by measured steps, on the CPU."""
PLAN_STEPS = 150
"""The steps within which they must have chosen it."""


class StepCompetitor:
    """A model in training. A call trains for one turn. train: takes one step, by its number, and returns the loss. losses: of
    the steps so far."""

    def __init__(self, trainee: Trainee, train: Callable[[int], float | Tensor], steps: int) -> None:
        self.trainee = trainee
        self.losses: list[float | Tensor] = []
        self._train = train
        self._steps = steps

    def __call__(self) -> None:
        for _ in range(self._steps):
            self.losses.append(self._train(len(self.losses)))
        if isinstance(self.trainee.optimizer, hvd.DistributedOptimizer):
            self.trainee.optimizer.settle()  # the update belongs to this turn

    @property
    def plan(self) -> object:
        """Return the plan of the exchange; None while it is tried, and for competitors without one."""
        return self.trainee.plan()


def codecs(text: str) -> tuple[str, ...]:
    names = CODECS[:-1] if text == "all" else tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in CODECS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(CODECS)}, all; none always takes part")
    return names


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gradwire.bench step",
        description="Time a training step: our optimizer, torch's DDP, and no exchange. Run under torchrun.",
    )
    add = parser.add_argument
    add("--model", choices=(GPT, *SMALL), default=GPT, help=f"what to train (default {GPT})")
    bytes_gpt.add_flags(parser)
    add("--compression", type=codecs, default=(), metavar="NAMES", help="comma-separated codecs to compare, or all")
    add(
        "--plans",
        action="store_true",
        help="compare fixed plans of the exchange with the one that training chooses, too",
    )
    add("--reports", action="store_true", help="also measure steps with on_step, checks of replicas and a timeline")
    add("--commits", action="store_true", help="compare a commit of hvd.elastic after every step, too")
    add("--hook", action="store_true", help="compare DDP with our hook without a codec, too")
    add("--bucket-view", action="store_true", help="give DDP gradient_as_bucket_view=True, in all its variants")
    add("--shard-states", action="store_true", help="compare optimizers whose state is spread over the ranks, too")
    add("--overlap", action="store_true", help="compare waiting in the next forward, too, and clip no gradients")
    add_turns(parser, steps=5)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to train (default auto)")
    add_results(parser)
    chosen = parser.parse_args(arguments)
    if chosen.model != GPT and (chosen.preset != parser.get_default("preset") or chosen.context is not None):
        parser.error(f"--preset and --context are sizes of {GPT}, and --model is {chosen.model}")
    return chosen


def workload_of(chosen: argparse.Namespace) -> Workload:
    samples = chosen.batch * hvd.size()
    if chosen.model in SMALL:
        return SMALL[chosen.model](samples)
    return bytes_gpt.workload(bytes_gpt.size_of(chosen), samples)


def has_backend_for(device: torch.device) -> bool:
    """Return whether our backend of torch.distributed can be used: it sends CUDA tensors by NCCL, which needs a GPU a rank."""
    return device.type == "cpu" or "nccl" in dist.get_backend_config()


def builders(
    chosen: argparse.Namespace, device: torch.device, plans: Mapping[str, hvd.ExchangePlan]
) -> dict[str, Callable[[nn.Module], Trainee]]:
    """Return the functions that make the competitors from models, by name. plans: the fixed plans to compare, by name."""
    named = [name for name in chosen.compression if name != AUTO]
    ddp = partial(strategies.ddp, bucket_view=chosen.bucket_view)
    found: dict[str, Callable[[nn.Module], Trainee]] = {OURS: strategies.ours}
    for name, plan in plans.items():
        found[f"{OURS} {name}"] = partial(strategies.ours, exchange_plan=plan)
    for name in chosen.compression:
        allow = [each for each in named if each != "powersgd"] or None
        found[f"{OURS}+{name}"] = partial(strategies.ours, compression=name, allow=allow if name == AUTO else None)
    if chosen.overlap:
        found[f"{OURS}+next_forward"] = strategies.overlapping
        found |= {f"{OURS}+next_forward+{name}": partial(strategies.overlapping, compression=name) for name in named}
    if chosen.reports:
        found[f"{OURS}+on_step"] = partial(strategies.ours, on_step=lambda metrics: None)
        found[f"{OURS}+check"] = partial(strategies.ours, check_replicas_every=1)
        found[f"{OURS}+timeline"] = strategies.recorded
    if chosen.commits:
        found[f"{OURS}+commits"] = strategies.committing
    if chosen.shard_states:
        found[f"{OURS}+shards"] = partial(strategies.ours, rule=hvd.rules.Sharded())
        for name in (each for each in named if each not in ONE_WAY):
            found[f"{OURS}+shards+{name}"] = partial(strategies.ours, compression=name, rule=hvd.rules.Sharded(name))
    if has_backend_for(device):
        found[OURS_DDP] = partial(ddp, backend="gradwire")
    if chosen.hook:
        found[OURS_HOOK] = partial(strategies.hooked, bucket_view=chosen.bucket_view)
    found[DDP] = ddp
    if chosen.compression:
        found[DDP_FP16] = partial(ddp, fp16=True)
    if chosen.shard_states:
        found[DDP_ZERO] = partial(strategies.zero, bucket_view=chosen.bucket_view)
    return {**found, COMPUTE: strategies.alone}


def competitors_of(chosen: argparse.Namespace, workload: Workload, device: torch.device) -> dict[str, StepCompetitor]:
    competitors = {}
    plans = fixed_plans(workload.build()) if chosen.plans else {}
    for name, build in builders(chosen, device, plans).items():
        trainee = build(workload.build().to(device))
        if chosen.overlap:
            trainee.clip_norm = None
        competitors[name] = StepCompetitor(trainee, partial(trainee.train, workload, lr=LR), chosen.steps)
    return competitors


def settle(competitors: Mapping[str, StepCompetitor], device: torch.device) -> None:
    """Train every competitor that chooses its plan, untimed, until the plan stays. Collective. Raises RuntimeError on all ranks
    if it does not within PLAN_STEPS."""
    for name, competitor in competitors.items():
        while name in CHOOSES_PLAN and device.type == "cpu" and competitor.plan is None:
            if len(competitor.losses) >= PLAN_STEPS:
                raise RuntimeError(f"{name} has not chosen the plan of its exchange in {len(competitor.losses)} steps")
            competitor()


def measure(
    competitors: dict[str, StepCompetitor], workload: Workload, device: torch.device, rounds: int, steps: int
) -> tuple[list[StepRow], list[StepSpeedup]]:
    """Return the rows, and the speedups of ours over DDP; the same on all ranks."""
    seconds = step_seconds(competitors, device, rounds, steps)
    median = {name: median_and_p99(times)[0] for name, times in seconds.items()}
    beyond = {name: float(np.median(times - seconds[COMPUTE])) for name, times in seconds.items()}  # in the same round
    last = min(len(competitor.losses) for competitor in competitors.values()) - 1
    best_plan_s = min((taken for name, taken in median.items() if name.startswith(f"{OURS} ")), default=None)
    rows: list[StepRow] = []
    for name, competitor in competitors.items():
        loss = hvd.allreduce(
            torch.tensor(float(competitor.losses[last]), dtype=torch.float64, device=device), op=hvd.Average
        )
        rows.append(
            StepRow(
                competitor=name,
                world_size=hvd.size(),
                step_ms=median[name] * 1e3,
                p99_ms=median_and_p99(seconds[name])[1] * 1e3,
                items_per_s=workload.items_per_step / median[name],
                as_ddp=median[DDP] / median[name],
                as_compute=median[COMPUTE] / median[name],
                beyond_compute_as_ddp=beyond[DDP] / beyond[name] if beyond[name] > 0 else None,
                of_best_plan=median[name] / best_plan_s if best_plan_s else None,
                plan=str(competitor.plan) if competitor.plan else None,
                loss=float(loss),
                replicas_identical=competitor.trainee.is_identical(),
            )
        )
    speedups = [
        StepSpeedup(ours, peer, median[peer] / median[ours], speedup_interval(seconds[ours], seconds[peer]))
        for ours in seconds
        if ours.startswith(OURS)
        for peer in (DDP, DDP_FP16, DDP_ZERO)
        if peer in seconds
    ]
    return rows, speedups


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark. Return 1, on every rank, if replicas that exchange gradients are not identical."""
    chosen = parse_arguments(arguments)
    if AUTO in chosen.compression or chosen.plans:
        logging.basicConfig(format="# %(message)s")
        logging.getLogger("gradwire").setLevel(logging.INFO)
    join_ranks(chosen.device)
    share_cores()
    device, workload = choose_device(chosen.device), workload_of(chosen)
    competitors = competitors_of(chosen, workload, device)
    if AUTO in chosen.compression:
        for _ in range(-(-AUTO_STEPS * (1 + len(chosen.compression)) // chosen.steps)):
            competitors[f"{OURS}+{AUTO}"]()  # 'auto' chooses before anything is timed

    def timed() -> tuple[list[StepRow], list[StepSpeedup]]:
        settle(competitors, device)
        return measure(competitors, workload, device, chosen.rounds, chosen.steps)

    def measured(state: hvd.elastic.TorchState) -> tuple[list[StepRow], list[StepSpeedup]]:
        return timed()

    committed = [each.trainee.state for each in competitors.values() if each.trainee.state is not None]
    rows, speedups = hvd.elastic.run(measured)(committed[0]) if committed else timed()
    if hvd.rank() == 0:
        context = bytes_gpt.size_of(chosen).context if chosen.model == GPT else None
        meta = {
            **software_and_machine(device),
            "backend": dist.get_backend(),
            "model": chosen.model,
            "preset": chosen.preset if context else None,
            "parameters": sum(parameter.numel() for parameter in competitors[OURS].trainee.module.parameters()),
            "batch": chosen.batch,
            "context": context,
            "item": workload.item,
            "steps": chosen.steps,
            "rounds": chosen.rounds,
            "speedups": [asdict(speedup) for speedup in speedups],
            "time": TURNS,
        }
        print("\n".join(format_table(rows, speedups, meta)), flush=True)
        if not has_backend_for(device):
            print(f"# {OURS_DDP}: not measured: over NCCL, each rank needs a GPU of its own", flush=True)
        write_json(chosen.json, meta, rows)
    hvd.shutdown()
    return 0 if all(row.replicas_identical for row in rows if row.competitor != COMPUTE) else 1
