"""`torchrun --nproc-per-node 4 -m gradwire.bench rules`: the loss that update rules reach, at equal steps or in equal time.

The rules train bytes_gpt from the same weights on the same text, one after the other. Every step of a rank has the same number
of sequences; the step number and the seed select them. The rules differ in what ranks exchange, when, and which ranks they
wait for.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import asdict, astuple
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gradwire as hvd
from gradwire.bench.options import count_from, picture
from gradwire.bench.results import software_and_machine, write_json
from gradwire.bench.rules.competitors import FRAGMENTS, RULES, UNLIKE, CompetitorSpec, RuleSettings, competitor_spec
from gradwire.bench.rules.table import NOTES, RuleRow, format_header, format_row
from gradwire.bench.rules.training import Length, Point, Slowness, Training
from gradwire.collectives.compression.sparse import ChunkTopK
from gradwire.trainer.examples import bytes_gpt
from gradwire.trainer.examples.loop import choose_device, digest, share_cores
from gradwire.trainer.reducer.compression import NAMES
from gradwire.trainer.servers.aggregator import LATE

DEFAULT = "synchronous,average,diloco,average+chunktopk"
MODELS: dict[str, dict[str, Any]] = {"small": {}, **bytes_gpt.PRESETS}
POINTS = 12
"""The number of points of the loss curve of a run after its start."""


def slowness(text: str) -> Slowness:
    rank, colon, seconds = text.partition(":")
    if not (colon and rank.isdecimal() and seconds.replace(".", "", 1).isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not RANK:SECONDS")
    return Slowness(int(rank), float(seconds))


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gradwire.bench rules",
        description="Train bytes_gpt by several update rules, and compare loss over tokens, time and bytes. Run under torchrun.",
        usage="%(prog)s [flags] RULE[+CODEC][@SHARE] ...",
        epilog=NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "competitors",
        nargs="*",
        type=competitor_spec,
        metavar="RULE[+CODEC][@SHARE]",
        help=f"SHARE: the part of the steps or seconds for which it trains (default 1); default {DEFAULT.replace(',', ' ')}",
    )
    add("--preset", choices=tuple(MODELS), default="small", help="the model (default small)")
    add("--batch", type=partial(count_from, 1), default=4, help="sequences a rank and step (default 4)")
    add("--context", type=partial(count_from, 1), help="bytes of a sequence (default as the model has it)")
    until = parser.add_mutually_exclusive_group()
    add_until = until.add_argument
    add_until("--steps", type=partial(count_from, 1), help="steps of each run (default 600)")
    add_until("--seconds", type=float, help="seconds of each run, instead of steps")
    add("--seeds", type=_seeds, default=[0], help="comma-separated seeds of the weights and the data (default 0)")
    add(
        "--every",
        type=partial(count_from, 1),
        default=30,
        help="steps between two exchanges of local updates (default 30)",
    )
    add("--outer-lr", type=float, default=0.7, help="outer learning rate of diloco and streaming (default 0.7)")
    add("--outer-momentum", type=float, default=0.9, help="Nesterov momentum of diloco and streaming (default 0.9)")
    add(
        "--warmup-steps",
        type=partial(count_from, 0),
        default=150,
        help="synchronous steps before local updates (default 150)",
    )
    add("--warmup-codec", choices=NAMES, default="none", help="codec of the gradients in these steps (default none)")
    add("--staleness", type=partial(count_from, 0), default=4, help="staleness of stale, in steps (default 4)")
    add("--late", choices=LATE, default="weight", help="what quorum and stale do with late gradients (default weight)")
    add("--delay", type=partial(count_from, 0), default=1, help="delay of streaming, in steps (default 1)")
    add("--k", type=_k, default=64, help="how many of 4096 numbers chunktopk sends (default 64)")
    add("--slow", type=slowness, metavar="RANK:SECONDS", help="a rank that sleeps for so many seconds in each step")
    add("-J", "--json", type=Path, metavar="FILE", help="write meta and rows")
    add("--plot", type=picture, metavar="FILE.png", help="draw the loss over tokens, time and bytes")
    chosen = parser.parse_args(arguments)
    chosen.competitors = chosen.competitors or [competitor_spec(text) for text in DEFAULT.split(",")]
    if chosen.seconds is None:
        chosen.steps = chosen.steps or 600
    elif chosen.seconds <= 0:
        parser.error(f"--seconds must be positive, not {chosen.seconds}")
    room = chosen.every // FRAGMENTS
    if chosen.delay >= room and any(each.rule == "streaming" for each in chosen.competitors):
        parser.error(
            f"streaming exchanges {FRAGMENTS} fragments in turn: --delay must be less than --every // {FRAGMENTS} = {room}, "
            f"not {chosen.delay}"
        )
    return chosen


def _k(text: str) -> int:
    try:
        return ChunkTopK(count_from(0, text)).k
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seeds(text: str) -> list[int]:
    if not all(part.isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers with commas between")
    return [int(part) for part in text.split(",")]


def reached(curve: Sequence[Point], target: Point) -> Point | None:
    """Return the first point with a loss as low as the target's, by linear interpolation; None if there is none."""
    for before, after in itertools.pairwise(curve):
        if after.loss <= target.loss:
            share = (before.loss - target.loss) / (before.loss - after.loss) if before.loss > target.loss else 0.0
            return Point(
                *(one + share * (other - one) for one, other in zip(astuple(before), astuple(after), strict=True))
            )
    return None


def train(chosen: argparse.Namespace, which: CompetitorSpec, seed: int, first: RuleRow | None) -> RuleRow:
    """Train one competitor. A collective call. first: the row of the first competitor with this seed; None for that one."""
    settings = {**MODELS[chosen.preset], "batch": chosen.batch * hvd.size(), "seed": seed}
    config = bytes_gpt.GPTConfig(**settings, **({"context": chosen.context} if chosen.context else {}))
    task = bytes_gpt.task(config)
    torch.manual_seed(seed)
    module = task.build().to(choose_device("cpu"))
    options = ("every", "outer_lr", "outer_momentum", "warmup_steps", "warmup_codec", "staleness", "late", "delay", "k")
    competitor = RULES[which.rule](
        module, which.codec, RuleSettings(**{name: getattr(chosen, name) for name in options})
    )
    length = Length(
        None if chosen.steps is None else max(1, round(chosen.steps * which.share)),
        None if chosen.seconds is None else chosen.seconds * which.share,
    )
    training = Training(competitor, task, config, length, chosen.slow, POINTS)
    training.run()
    waited_s = competitor.wait_s()
    report = competitor.report()
    competitor.close()  # before any other collective call, since slow ranks may need it to finish
    is_same = len(set(hvd.allgather_object(digest(module)))) == 1
    curve = training.curve()
    target = Point(**first.curve[-1]) if first is not None else curve[-1]
    found = reached(curve, target)
    return RuleRow(
        competitor=which.text,
        seed=seed,
        world_size=hvd.size(),
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        steps=curve[-1].tokens / task.items_per_step,
        seconds=curve[-1].seconds,
        tokens_per_s=curve[-1].tokens / curve[-1].seconds,
        sent_bytes=curve[-1].sent_bytes,
        wait_share=None if waited_s is None else _average(waited_s / training.seconds),
        loss=curve[-1].loss,
        over_first=curve[-1].loss / target.loss,
        reach_time=None if found is None else found.seconds / target.seconds,
        reach_tokens=None if found is None else found.tokens / target.tokens,
        reach_bytes=None if found is None or not target.sent_bytes else found.sent_bytes / target.sent_bytes,
        replicas_identical=None if which.rule in UNLIKE else is_same,
        report=report,
        curve=[asdict(point) for point in curve],
    )


def _average(value: float) -> float:
    """Return the mean over ranks. Collective."""
    return float(hvd.allreduce(torch.tensor([value], dtype=torch.float64), op=hvd.Average).item())


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark. Return, on every rank, 1 if replicas differ that should be equal, and 2 if the rank of --slow does not
    exist."""
    chosen = parse_arguments(arguments)
    hvd.init()
    if chosen.slow is not None and chosen.slow.rank >= hvd.size():
        print(
            f"bench rules: --slow names rank {chosen.slow.rank}, and there are ranks 0 to {hvd.size() - 1}",
            file=sys.stderr,
        )
        return 2
    share_cores()
    config = bytes_gpt.GPTConfig(**MODELS[chosen.preset])
    meta = {
        **software_and_machine(choose_device("cpu")),
        "backend": dist.get_backend(),
        "context": chosen.context or config.context,
        **{
            name: value
            for name, value in vars(chosen).items()
            if name not in ("competitors", "json", "plot", "context")
        },
        "slow": None
        if chosen.slow is None
        else f"rank {chosen.slow.rank} sleeps {chosen.slow.seconds:g} s in each step",
    }
    rows: list[RuleRow] = []
    for seed in chosen.seeds:
        first: RuleRow | None = None
        for which in chosen.competitors:
            row = train(chosen, which, seed, first)
            first = first or row
            rows.append(row)
            if hvd.rank() == 0:
                heading = format_header(meta, row) if len(rows) == 1 else []
                notes = [f"#   {row.report}"] if row.report else []
                print("\n".join([*heading, format_row(row), *notes]), flush=True)
                write_json(chosen.json, meta, rows)  # after each run, since runs are long
    if hvd.rank() == 0 and chosen.plot:
        from gradwire.bench.rules.plot import draw

        draw(rows, meta, chosen.plot)
    hvd.shutdown()
    return 0 if all(row.replicas_identical is not False for row in rows) else 1
