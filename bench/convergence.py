"""`torchrun --nproc-per-node 4 -m gradwire.bench convergence`: what codecs do to training, at equal steps and seeds.

The examples' models train from the same weights on the same data in the same order, once with each codec, by
DistributedOptimizer(compression=name). What differs is what the exchange loses.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gradwire as hvd
from gradwire.bench.meta import software_and_machine
from gradwire.bench.options import count_from, picture
from gradwire.collectives.compression.matrices import MatrixCodec
from gradwire.trainer.examples import bytes_gpt, digits_cnn
from gradwire.trainer.examples.loop import Run, Task, choose_device
from gradwire.trainer.examples.report import OURS
from gradwire.trainer.gradients.compression import NAMES, Cast, Encoding, Policy

NONE = "none"
#: The training loss at the end is the mean of so many steps, as a batch's depends on what is in it.
LAST_STEPS = 20
INTERRUPTED = 130

NOTES = """\
training: mean loss of the last steps; validation: loss on data not trained on, and that over no compression's.
wire: bytes that a rank sends in a step, all in one buffer, 2(p-1)/p of it; ratio: of float32's to them."""


@dataclass(frozen=True)
class Model:
    """config: with world size -> settings, but for steps, seed and codec."""

    config: Callable[[int], Any]
    task: Callable[[Any], Task]


def large_gpt(size: int) -> bytes_gpt.Config:
    """12.9 M parameters, and so little to compute for a rank, 1 x 64 tokens, that the exchange is what a step takes."""
    settings: dict[str, Any] = {**bytes_gpt.PRESETS["13m"], "batch": size, "context": 64}
    return bytes_gpt.Config(**settings)


MODELS = {
    "bytes_gpt": Model(lambda size: bytes_gpt.Config(batch=4 * size), bytes_gpt.task),
    "bytes_gpt_13m": Model(large_gpt, bytes_gpt.task),
    "digits_cnn": Model(lambda size: digits_cnn.Config(batch=16 * size, lr=3e-3), digits_cnn.task),
}


@dataclass(frozen=True)
class ConvergenceRow:
    """One model trained with one codec. Field names are the keys of the JSON.

    wire_bytes: what a rank sends in a step; ratio: of float32's to them. losses: of every step, averaged over the ranks.
    replicas_identical: the ranks' weights at the end, to the bit.
    """

    model: str
    codec: str
    settings: str
    world_size: int
    parameters: int
    steps: int
    seed: int
    training_loss: float
    validation_loss: float
    validation_over_none: float
    accuracy: float | None
    wire_bytes: float
    ratio: float
    replicas_identical: bool
    losses: list[float]


def names_of(known: Sequence[str], text: str) -> list[str]:
    names = list(known) if text == "all" else text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(known)}, all")
    return names


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
        help=f"comma-separated, of {', '.join(MODELS)} (12.9 M parameters, 1 x 64 tokens a rank); default bytes_gpt,digits_cnn",
    )
    add("--codecs", type=codecs, default="all", help="comma-separated names; default all. none is always trained first")
    add("--steps", type=partial(count_from, 1), default=400, help="of every run (default 400)")
    add("--seed", type=partial(count_from, 0), default=0, help="of weights and data (default 0)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to train (default auto)")
    add("-J", "--json", type=Path, metavar="FILE", help="write meta and rows")
    add("--plot", type=picture, metavar="FILE.png", help="draw the loss over steps")
    return parser.parse_args(arguments)


def wire_bytes(module: nn.Module, codec: str, size: int) -> float:
    """What a rank sends in a step, were all that is compressed alike one buffer.

    Two-shot sends each code once to its owner and once from there, as an uncompressed allreduce does with numbers.
    """
    policy, total = Policy(codec), 0
    encoded: dict[Encoding, list[torch.Size]] = {}
    for name, parameter in module.named_parameters():
        encoding = policy.encoding(name, parameter)
        if isinstance(encoding, Cast):
            total += parameter.numel() * encoding.dtype_on_wire(parameter.dtype).itemsize
        else:
            encoded.setdefault(encoding, []).append(parameter.shape)
    for encoding, shapes in encoded.items():
        if isinstance(encoding.codec, MatrixCodec):
            total += encoding.codec.wire_bytes(shapes)
        else:
            total += encoding.codec.wire_bytes(sum(shape.numel() for shape in shapes))
    return 2 * (size - 1) / size * total


def train(name: str, codec: str, chosen: argparse.Namespace, before: Sequence[ConvergenceRow]) -> ConvergenceRow:
    """A collective call. before: the rows so far."""
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


def format_header(meta: Mapping[str, Any]) -> list[str]:
    return [
        f"# convergence: world size {meta['world_size']} backend {meta['backend']}, {meta['steps']} steps, seed {meta['seed']}",
        f"# {meta['device']}, torch {meta['torch']}",
        *(f"# {line}" for line in NOTES.splitlines()),
    ]


def format_heading(row: ConvergenceRow) -> list[str]:
    return [
        "#",
        f"# {row.model}: {row.parameters / 1e6:.2f} M parameters",
        "# codec      training validation  over none  accuracy   wire (B/step)    ratio  replicas",
    ]


def format_row(row: ConvergenceRow) -> str:
    accuracy = "" if row.accuracy is None else f"{row.accuracy:.1%}"
    return (
        f"  {row.codec:10} {row.training_loss:8.4f} {row.validation_loss:10.4f} {row.validation_over_none:10.4f}"
        f" {accuracy:>9} {row.wire_bytes:15.0f} {row.ratio:8.2f}  {'identical' if row.replicas_identical else 'differ'}"
    )


def main(arguments: Sequence[str]) -> int:
    """Exit code 1 if the ranks' replicas differ anywhere, on every rank."""
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
    speaks = hvd.rank() == 0
    if speaks:
        print("\n".join(format_header(meta)), flush=True)
    rows: list[ConvergenceRow] = []
    for model in chosen.models:
        for codec in dict.fromkeys([NONE, *chosen.codecs]):
            rows.append(train(model, codec, chosen, rows))
            heading = format_heading(rows[-1]) if codec == NONE else []
            if speaks:
                print("\n".join([*heading, format_row(rows[-1])]), flush=True)
            if speaks and chosen.json:  # each time, for runs are long
                chosen.json.parent.mkdir(parents=True, exist_ok=True)
                chosen.json.write_text(
                    json.dumps({"meta": meta, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"
                )
    if speaks and chosen.plot:
        from gradwire.bench.convergence_plot import draw

        chosen.plot.parent.mkdir(parents=True, exist_ok=True)
        draw(rows, meta, chosen.plot)
    hvd.shutdown()
    return 0 if all(row.replicas_identical for row in rows) else 1
