"""`torchrun --nproc-per-node 4 -m gradwire.bench convergence`: the effect of codecs on the loss, with equal seeds.

Models train from the same weights on the same data in the same order, once with each codec, by
DistributedOptimizer(compression=name). The runs differ only in the errors of the codecs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch.distributed as dist

import gradwire as hvd
from gradwire.bench.options import add_results, count_from, names_of
from gradwire.bench.results import software_and_machine, write_json
from gradwire.bench.training.convergence_report import (
    NONE,
    NOTES,
    ConvergenceRow,
    draw,
    format_header,
    format_heading,
    format_row,
)
from gradwire.bench.workloads import bytes_gpt, digits_cnn, strategies
from gradwire.bench.workloads.loop import Training, Workload, choose_device, join_ranks, share_cores
from gradwire.trainer.reducer.compression import NAMES

#: The final training loss is the mean of this number of steps, since the losses of batches differ.
LAST_STEPS = 20
#: The workloads, by name: world size, seed -> workload.
MODELS: dict[str, Callable[[int, int], Workload]] = {
    "bytes_gpt": lambda size, seed: bytes_gpt.workload(bytes_gpt.GPTSize(), 4 * size, seed),
    "bytes_gpt_13m": lambda size, seed: bytes_gpt.workload(replace(bytes_gpt.PRESETS["13m"], context=64), size, seed),
    "digits_cnn": lambda size, seed: digits_cnn.workload(16 * size, seed),
}


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gradwire.bench convergence",
        description="Train models with each codec, and without. Run under torchrun.",
        epilog=NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--models",
        type=partial(names_of, tuple(MODELS)),
        default="bytes_gpt,digits_cnn",
        help=f"comma-separated, of {', '.join(MODELS)} (12.8 M parameters, 1 x 64 tokens a rank); default bytes_gpt,digits_cnn",
    )
    codecs = partial(names_of, NAMES)
    add("--codecs", type=codecs, default="all", help="comma-separated names; default all. none is always trained first")
    add("--steps", type=partial(count_from, 1), default=400, help="steps of each run (default 400)")
    add("--seed", type=partial(count_from, 0), default=0, help="seed of the weights and the data (default 0)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to train (default auto)")
    add_results(parser, drawn="the loss over steps")
    return parser.parse_args(arguments)


def train(name: str, codec: str, chosen: argparse.Namespace, before: Sequence[ConvergenceRow]) -> ConvergenceRow:
    """Train a model with a codec. A collective call. before: the rows so far."""
    workload = MODELS[name](hvd.size(), chosen.seed)
    trainee = strategies.ours(workload.build().to(choose_device(chosen.device)), compression=codec)
    sent_by: dict[int, float] = {}
    training = Training(workload, [trainee], chosen.steps)
    for _ in training.blocks():
        sent_by[training.steps] = trainee.sent_bytes(training.steps)
    loss, accuracy = trainee.validate(workload)
    first, last = (
        min(sent_by),
        max(sent_by),
    )  # the first block is one step, in which codecs with error feedback send more
    sent = (sent_by[last] - sent_by[first]) / (last - first) if last > first else sent_by[first]
    none = next((row for row in before if (row.model, row.codec) == (name, NONE)), None)
    trainee.close()
    return ConvergenceRow(
        model=name,
        codec=codec,
        settings=repr(getattr(hvd.Compression, codec)),
        world_size=hvd.size(),
        parameters=sum(parameter.numel() for parameter in trainee.module.parameters()),
        steps=chosen.steps,
        seed=chosen.seed,
        training_loss=statistics.fmean(trainee.losses[-LAST_STEPS:]),
        validation_loss=loss,
        validation_over_none=loss / (none.validation_loss if none else loss),
        accuracy=accuracy if workload.has_accuracy else None,
        wire_bytes=sent,
        ratio=(none.wire_bytes if none else sent) / sent,
        replicas_identical=trainee.is_identical(),
        losses=trainee.losses,
    )


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark. Return, on every rank, 1 if replicas differ, and 2 if there is only one rank."""
    chosen = parse_arguments(arguments)
    join_ranks(chosen.device)
    if hvd.size() == 1:
        print(
            "bench convergence: one rank exchanges nothing: run it under torchrun --nproc-per-node 2 or more",
            file=sys.stderr,
        )
        return 2
    share_cores()
    meta = {
        **software_and_machine(choose_device(chosen.device)),
        "backend": dist.get_backend(),
        "world_size": hvd.size(),
        "steps": chosen.steps,
        "seed": chosen.seed,
    }
    is_first = hvd.rank() == 0
    if is_first:
        print("\n".join(format_header(meta)), flush=True)
    rows: list[ConvergenceRow] = []
    for model in chosen.models:
        for codec in dict.fromkeys([NONE, *chosen.codecs]):
            rows.append(train(model, codec, chosen, rows))
            heading = format_heading(rows[-1]) if codec == NONE else []
            if is_first:
                print("\n".join([*heading, format_row(rows[-1])]), flush=True)
                write_json(chosen.json, meta, rows)  # after every run, since runs are long
    if is_first and chosen.plot:
        draw(rows, meta, chosen.plot)
    hvd.shutdown()
    return 0 if all(row.replicas_identical for row in rows) else 1
