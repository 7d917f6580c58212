"""`torchrun --nproc-per-node 4 -m gradwire.bench convergence`: the effect of codecs on the loss, with equal seeds.

The examples' models train from the same weights on the same data in the same order, once with each codec, by
DistributedOptimizer(compression=name). The runs differ only in the errors of the codecs.
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gradwire as hvd
from gradwire.bench.options import count_from, names_of, picture
from gradwire.bench.results import software_and_machine, write_json
from gradwire.bench.training.convergence_table import NOTES, ConvergenceRow, format_header, format_heading, format_row
from gradwire.collectives.compression.matrices import MatrixCodec
from gradwire.collectives.plan.selection import default_segment_bytes, default_table
from gradwire.collectives.plan.topology import Topology
from gradwire.collectives.run.plans import Plans, legal_algorithms
from gradwire.trainer.examples import bytes_gpt, digits_cnn
from gradwire.trainer.examples.loop import Run, Task, choose_device
from gradwire.trainer.examples.report import OURS
from gradwire.trainer.reducer.compression import NAMES, Cast, Encoding, Policy

NONE = "none"
#: The final training loss is the mean of this number of steps, since the losses of batches differ.
LAST_STEPS = 20
INTERRUPTED = 130


@dataclass(frozen=True)
class ExampleModel:
    """A model to train. config: world size -> settings, except steps, seed and codec."""

    config: Callable[[int], Any]
    task: Callable[[Any], Task]


def large_gpt(size: int) -> bytes_gpt.GPTConfig:
    """Return settings with 12.8 M parameters and 1 x 64 tokens per rank: the exchange takes most of a step."""
    settings: dict[str, Any] = {**bytes_gpt.PRESETS["13m"], "batch": size, "context": 64}
    return bytes_gpt.GPTConfig(**settings)


MODELS = {
    "bytes_gpt": ExampleModel(lambda size: bytes_gpt.GPTConfig(batch=4 * size), bytes_gpt.task),
    "bytes_gpt_13m": ExampleModel(large_gpt, bytes_gpt.task),
    "digits_cnn": ExampleModel(lambda size: digits_cnn.CNNConfig(batch=16 * size, lr=3e-3), digits_cnn.task),
}


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gradwire.bench convergence",
        description="Train the examples' models with each codec, and without. Run under torchrun.",
        epilog=NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    models, codecs = partial(names_of, tuple(MODELS)), partial(names_of, NAMES)
    add(
        "--models",
        type=models,
        default="bytes_gpt,digits_cnn",
        help=f"comma-separated, of {', '.join(MODELS)} (12.8 M parameters, 1 x 64 tokens a rank); default bytes_gpt,digits_cnn",
    )
    add("--codecs", type=codecs, default="all", help="comma-separated names; default all. none is always trained first")
    add("--steps", type=partial(count_from, 1), default=400, help="steps of each run (default 400)")
    add("--seed", type=partial(count_from, 0), default=0, help="seed of the weights and the data (default 0)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to train (default auto)")
    add("-J", "--json", type=Path, metavar="FILE", help="write meta and rows")
    add("--plot", type=picture, metavar="FILE.png", help="draw the loss over steps")
    return parser.parse_args(arguments)


def wire_bytes(module: nn.Module, codec: str, size: int) -> int:
    """Return the bytes that a rank sends in a step by the plans, with one rank per host and one buffer per encoding."""
    topology, names = Topology(0, tuple((rank,) for rank in range(size))), legal_algorithms({})
    tables = {verb: default_table(verb, topology, quick=True) for verb in names}
    plans = Plans(topology, names, tables, default_segment_bytes(topology, quick=True))
    policy, plain, total = Policy(codec), 0, 0
    encoded: dict[Encoding, list[torch.Size]] = {}
    for name, parameter in module.named_parameters():
        encoding = policy.encoding(name, parameter)
        if isinstance(encoding, Cast):
            plain += parameter.numel() * encoding.dtype_on_wire(parameter.dtype).itemsize
        else:
            encoded.setdefault(encoding, []).append(parameter.shape)
    for encoding, shapes in encoded.items():
        if isinstance(encoding.codec, MatrixCodec):
            plain += encoding.codec.wire_bytes(shapes)
        else:
            numel = sum(shape.numel() for shape in shapes)
            total += plans.wire_bytes("allreduce", 4 * numel, "auto", encoding.codec) or 0
    return total + (plans.wire_bytes("allreduce", plain, "rsag", None) or 0)


def train(name: str, codec: str, chosen: argparse.Namespace, before: Sequence[ConvergenceRow]) -> ConvergenceRow:
    """Train a model with a codec. A collective call. before: the rows so far."""
    model = MODELS[name]
    with TemporaryDirectory() as out:
        config = replace(
            model.config(hvd.size()),
            steps=chosen.steps,
            seed=chosen.seed,
            device=chosen.device,
            compression=codec,
            validate_every=chosen.steps,
            checkpoint_every=chosen.steps,
            out=Path(out),
        )
        task = model.task(config)
        run = Run(task, config)
        with redirect_stdout(io.StringIO()):
            status = run()
    if status == INTERRUPTED:
        raise SystemExit(status)
    trainee = run.trainees[OURS]
    module, record = trainee.module, trainee.record
    _, loss, accuracy = record.validation[-1]
    none = next((row.validation_loss for row in before if (row.model, row.codec) == (name, NONE)), loss)
    sent, uncompressed = wire_bytes(module, codec, hvd.size()), wire_bytes(module, NONE, hvd.size())
    return ConvergenceRow(
        model=name,
        codec=codec,
        settings=repr(getattr(hvd.Compression, codec)),
        world_size=hvd.size(),
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        steps=chosen.steps,
        seed=chosen.seed,
        training_loss=statistics.fmean(record.losses[-LAST_STEPS:]),
        validation_loss=loss,
        validation_over_none=loss / none,
        accuracy=accuracy if task.report_accuracy else None,
        wire_bytes=sent,
        ratio=uncompressed / sent,
        replicas_identical=record.replicas_identical,
        losses=record.losses,
    )


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark. Return, on every rank, 1 if replicas differ, and 2 if there is only one rank."""
    chosen = parse_arguments(arguments)
    hvd.init()
    if hvd.size() == 1:
        print(
            "bench convergence: one rank exchanges nothing: run it under torchrun --nproc-per-node 2 or more",
            file=sys.stderr,
        )
        return 2
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
        from gradwire.bench.training.convergence_plot import draw

        draw(rows, meta, chosen.plot)
    hvd.shutdown()
    return 0 if all(row.replicas_identical for row in rows) else 1
