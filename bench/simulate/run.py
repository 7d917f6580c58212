"""Predict the speed of training on hardware that you describe, from the programs that its ranks would run.

    gradwire simulate --model resnet50 --ranks 9600 --link 100gbit --plot scaling.png
    gradwire simulate --model bert-large --ranks 64 --ranks-per-host 8 --link 10gbit --codec int8
    gradwire simulate --model resnet50 --ranks 9600 --link 100gbit --servers 6 --groups 8 --quorum 1 --jitter 0.1
    gradwire simulate --preset all -J published.json

By default, sums, calls, and the processor's time for messages take no time. --tuned takes their times from a file of
`gradwire tune`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from gradwire.bench.hosts import link_rate, rate_bits_per_s
from gradwire.bench.options import add_results, count_from, names_of, number_from
from gradwire.bench.results import write_json
from gradwire.bench.simulate.exchange import SHIFTED, Network
from gradwire.bench.simulate.models import MODELS
from gradwire.bench.simulate.presets import DEVICES, HOP_S, NEAR_HOP_S, PRESETS, Compared, compare
from gradwire.bench.simulate.scenario import TCP_SHARE, Device, Prediction, Scenario, predict
from gradwire.bench.simulate.training import EXCHANGES
from gradwire.collectives.compression.codec import Codec, Raw
from gradwire.collectives.compression.registry import CODECS
from gradwire.collectives.tuning.codec_benchmark import speed_of
from gradwire.collectives.tuning.cost_model import Costs, LinkCost


def _rate(text: str) -> float:
    """Return the bytes per second of a rate such as 100gbit."""
    return rate_bits_per_s(link_rate(text)) / 8


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradwire simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, positive, not_negative = parser.add_argument, partial(count_from, 1), partial(number_from, 0.0)
    add(
        "--preset",
        type=partial(names_of, tuple(PRESETS)),
        help=f"published runs to predict: {', '.join(PRESETS)}, or all",
    )
    add("--model", choices=tuple(MODELS), default="resnet50", help="the model (resnet50)")
    add("--ranks", type=positive, default=64, help="the largest number of ranks (64)")
    add("--ranks-per-host", type=positive, default=1, help="ranks of each host (1)")
    add("--link", type=_rate, default="10gbit", help="rate of a host with TCP, each way: 100mbit, 25gbit (10gbit)")
    add("--latency-us", type=not_negative, default=HOP_S * 1e6, help=f"between hosts ({HOP_S * 1e6:g})")
    add("--inside", type=_rate, default="80gbit", help="rate between two ranks of one host (80gbit)")
    add("--tuned", type=Path, metavar="FILE", help="times of calls, messages and sums: from gradwire tune")
    add("--batch", type=positive, help="samples per rank and step")
    add("--samples-per-s", type=partial(number_from, 1e-9), help="speed of one rank alone, forward and backward")
    add("--exchange", choices=EXCHANGES, default="buckets", help="how gradients are grouped (buckets)")
    add("--algorithm", default="auto", help=f"auto, {', '.join(SHIFTED)}; with --codec also two_shot, one_shot")
    add("--codec", choices=tuple(CODECS), default="none", help="codec of gradients, timed on this CPU (default none)")
    add("--every", type=positive, default=1, help="local updates: steps between two averages (1)")
    add("--servers", type=positive, default=0, help="number of parameter servers, each on its own host")
    add("--quorum", type=positive, help="number of workers whose gradients make an update (all)")
    add("--groups", type=positive, help="number of groups of ranks, each of which pushes as one worker")
    add("--jitter", type=not_negative, default=0.0, metavar="SIGMA", help="of computing times, lognormal (0)")
    add("--mtbf-hours", type=partial(number_from, 1e-9), help="mean time between failures of a rank")
    add("--checkpoint-minutes", type=partial(number_from, 1e-9), default=30.0, help="time between checkpoints (30)")
    add("--restart-minutes", type=not_negative, default=5.0, help="duration of a restart (5)")
    add("--steps", type=positive, default=100, help="simulated steps (100)")
    add("--seed", type=partial(count_from, 0), default=0, help="seed of jitter and failures (0)")
    add_results(parser, drawn="the prediction")
    return parser


def _scenario(flags: argparse.Namespace) -> Scenario:
    """Return the scenario of the flags. Raises ValueError if flags are missing or not allowed."""
    known = DEVICES.get(flags.model)
    if known is None and None in (flags.batch, flags.samples_per_s):
        raise ValueError(
            f"the speed of a rank with {flags.model} is not known (it is for {', '.join(DEVICES)}): give --batch and "
            "--samples-per-s"
        )
    if not flags.servers and (flags.quorum or flags.groups):
        raise ValueError("--quorum and --groups are options of a parameter server: give --servers too")
    device = known or Device(flags.batch, flags.samples_per_s, "given")
    if flags.batch or flags.samples_per_s:
        device = Device(flags.batch or device.batch, flags.samples_per_s or device.samples_per_s, "given")
    codec = None if flags.codec == "none" else CODECS[flags.codec]()
    made: dict[str, Any] = {"device": device, "network": _network(flags, codec), "codec": codec}
    given = {field.name: getattr(flags, field.name) for field in fields(Scenario) if field.name not in made}
    return Scenario(**given, **made)


def _network(flags: argparse.Namespace, codec: Codec | None) -> Network:
    byte_s = 1 / (flags.link * TCP_SHARE)
    between, inside = LinkCost(flags.latency_us * 1e-6, byte_s, 0, 0), LinkCost(NEAR_HOP_S, 1 / flags.inside, 0, 0)
    known = None
    if flags.tuned:
        try:
            known = Costs.from_json(flags.tuned.read_text(), str(flags.tuned))
        except OSError as error:
            raise ValueError(f"cannot read {flags.tuned}: {error}") from error
        between = replace(between, message_cpu_s=known.between.message_cpu_s, byte_cpu_s=known.between.byte_cpu_s)
        inside = known.inside if len(known.hosts[0]) > 1 else inside
    network = Network(between, inside, byte_s, flags.ranks_per_host, known)
    wanted = (codec, Raw()) if codec else ()
    speeds = {each.identity: each for each in (known.codecs if known else ())}
    cpu = torch.device("cpu")
    speeds |= {each.identity: speed_of(each, cpu) for each in wanted if each.identity not in speeds}
    return replace(network, known=replace(known or network.costs(1), codecs=tuple(speeds.values())))


def _numbers(ranks: int, per_host: int, groups: int) -> list[int]:
    """Return the numbers of ranks of a curve: powers of two within a host, powers of two of whole hosts, and all ranks; but no
    number that cannot be divided into so many equal groups."""
    doubled = [1 << power for power in range(ranks.bit_length())]
    whole = [each for each in doubled if each < per_host] + [
        per_host * each for each in doubled if per_host * each < ranks
    ]
    return [*(each for each in whole if each < ranks and (each < groups or each % groups == 0)), ranks]


def _points(points: Sequence[Prediction]) -> Table:
    table = Table("ranks", "step", "samples/s", "efficiency", "exchange", "sent by a rank", "largest by", box=None)
    for each in points:
        table.add_row(
            str(each.ranks),
            f"{each.step_s * 1e3:.1f} ms",
            f"{each.samples_per_s:.1f}",
            f"{each.efficiency:.1%}",
            f"{each.exchange_s * 1e3:.1f} ms",
            f"{each.wire_bytes / 1e6:.1f} MB",
            each.algorithm,
        )
    return table


def _compared(rows: Sequence[Compared]) -> Table:
    table = Table("preset", "model", "ranks", "method", "published", "predicted", "error", box=None)
    for each in rows:
        error = "fitted" if each.fitted else f"{each.error:+.1%}"
        table.add_row(
            each.preset, each.model, str(each.ranks), each.method, f"{each.published:g}", f"{each.predicted:.4g}", error
        )
    return table


def main(arguments: Sequence[str]) -> int:
    """Print the predictions for the arguments, and return the exit status."""
    parser = _parser()
    flags = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    rows: list[Compared] | list[Prediction]
    if flags.preset:
        rows = compared = [row for name in flags.preset for row in compare(name)]
        meta = {name: {"source": PRESETS[name].source, "inputs": PRESETS[name].inputs} for name in flags.preset}
        for name, about in meta.items():
            console.print(f"# {name}: {about['source']}\n#   inputs: {about['inputs']}")
        console.print(_compared(compared))
        errors = [abs(row.error) for row in compared if not row.fitted]
        console.print(f"# median error {statistics.median(errors):.1%} of {len(errors)} rows that are not fitted")
    else:
        try:
            scenario = _scenario(flags)
            # Predict the largest number first, so that a number that is too large raises at once.
            numbers = _numbers(flags.ranks, flags.ranks_per_host, flags.groups or 1)
            rows = points = [predict(scenario, each) for each in reversed(numbers)][::-1]
        except ValueError as error:
            parser.error(str(error))
        given = {name: str(value) for name, value in vars(flags).items() if value is not None}
        meta = {"given": given, "device": vars(scenario.device)}
        console.print(
            f"# {flags.model}: {scenario.device.batch} samples a rank at {scenario.device.samples_per_s:g}/s by itself"
        )
        console.print(f"#   from: {scenario.device.source}")
        if scenario.codec is not None:
            unless = f", unless {flags.tuned} has it" if flags.tuned else ""
            console.print(f"#   speed of {scenario.codec.name}: measured on this machine's CPU{unless}")
        console.print(_points(points))
    write_json(flags.json, meta, rows)
    if flags.plot:
        from gradwire.bench.simulate.plot import draw_compared, draw_curve

        if flags.preset:
            draw_compared(compared, flags.plot)
        else:
            draw_curve(points, f"{flags.model}, links of {flags.link * 8 / 1e9:g} Gbit/s", flags.plot)
    return 0
