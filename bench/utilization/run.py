"""`python -m gradwire.bench utilization`: the share of the time that ranks compute, by bandwidth and steps between exchanges.

For each rate, simulated hosts of one rank each train bytes_gpt, which needs root (gradwire.bench.utilization.turns). At the
fastest rate, they also train to the end with each codec and number of steps, for the same number of tokens: the losses do not
depend on the rate.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from gradwire.bench import hosts
from gradwire.bench.options import add_results, count_from, names_of
from gradwire.bench.results import software_and_machine, write_json
from gradwire.bench.timing import TURNS
from gradwire.bench.utilization.published import predict_published
from gradwire.bench.utilization.report import LossRow, UtilizationRow, draw, format_table
from gradwire.bench.utilization.turns import CODECS
from gradwire.bench.workloads import bytes_gpt

DEADLINE_S = 1800.0
"""The time that the ranks have at a rate."""


def link_rates(text: str) -> list[str]:
    """Return the rates in a comma-separated text, the slowest first."""
    return sorted(map(hosts.link_rate, text.split(",")), key=hosts.rate_bits_per_s)


def step_counts(text: str) -> list[int]:
    """Return the numbers of steps in a comma-separated text."""
    return [count_from(1, each) for each in text.split(",")]


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gradwire.bench utilization",
        description="Measure the share of the time that ranks compute, and the loss after equal tokens. Run as root.",
    )
    add, positive, not_negative = parser.add_argument, partial(count_from, 1), partial(count_from, 0)
    bytes_gpt.add_flags(parser, batch=1)
    add("--hosts", type=partial(count_from, 2), default=4, help="simulated hosts, of one rank each (default 4)")
    add(
        "--rates",
        type=link_rates,
        default="50mbit,200mbit,1gbit",
        help="rates of the hosts' links (default 50mbit,200mbit,1gbit)",
    )
    add(
        "--every",
        type=step_counts,
        default="1,8,32,128",
        help="numbers of steps between exchanges (default 1,8,32,128)",
    )
    add("--codecs", type=partial(names_of, tuple(CODECS)), default=list(CODECS), help="default none,int8,chunktopk")
    add("--rounds", type=positive, default=4, help="timed turns of each competitor (default 4)")
    add(
        "--loss-steps",
        type=not_negative,
        default=662,
        help="steps of a run for its loss; 0: no such runs (default 662)",
    )
    add(
        "--warmup-steps",
        type=not_negative,
        default=150,
        help="synchronous steps of it before local updates (default 150)",
    )
    add_results(parser, drawn="the utilization over the computing time between exchanges, divided by the transfer time")
    chosen = parser.parse_args(arguments)
    alone = chosen.loss_steps - chosen.warmup_steps
    if chosen.loss_steps and (alone < 0 or any(alone % every for every in chosen.every)):
        parser.error(
            f"--loss-steps {chosen.loss_steps} minus --warmup-steps {chosen.warmup_steps} is not a multiple of all numbers of "
            f"--every: {', '.join(map(str, chosen.every))}"
        )
    return chosen


def at_rate(chosen: argparse.Namespace, rate: str, path: Path) -> dict[str, Any]:
    """Return what ranks have measured on hosts whose links have this rate. path: of a file for it. Raises HostsError if hosts
    cannot be simulated, or a rank fails."""
    is_fastest = rate == chosen.rates[-1]
    settings = {
        **{
            name: getattr(chosen, name)
            for name in ("preset", "batch", "context", "codecs", "every", "rounds", "warmup_steps")
        },
        "rate": rate,
        "loss_steps": chosen.loss_steps if is_fastest else 0,
    }
    path.write_text(json.dumps(settings))
    command = [sys.executable, "-m", "gradwire.bench.utilization.turns", str(path)]
    with hosts.Cluster(chosen.hosts, rate) as cluster:
        ranks = hosts.plan_ranks(chosen.hosts, chosen.hosts, hosts.network_description(chosen.hosts, rate))
        if status := hosts.run_ranks(cluster, ranks, command, DEADLINE_S):
            raise hosts.HostsError(f"a rank ended with exit code {status} at {rate}")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark. Return 1 if replicas differ that should be identical, 2 if hosts cannot be simulated or a rank fails."""
    chosen = parse_arguments(arguments)
    try:
        hosts.check_machine()
        with TemporaryDirectory(prefix="utilization.") as folder:
            found = [at_rate(chosen, rate, Path(folder, f"{rate}.json")) for rate in chosen.rates]
    except hosts.HostsError as error:
        print(f"bench utilization: {error}", file=sys.stderr)
        return 2
    rows = [UtilizationRow(**row) for each in found for row in each["rows"]]
    losses = [LossRow(**row) for row in found[-1]["losses"]]
    meta = {
        **software_and_machine(torch.device("cpu")),
        "network": hosts.network_description(chosen.hosts, ", ".join(chosen.rates)),
        "parameters": found[0]["parameters"],
        "context": bytes_gpt.size_of(chosen).context,
        "time": TURNS,
        **{name: getattr(chosen, name) for name in ("preset", "batch", "rounds", "loss_steps", "warmup_steps")},
        "losses": [asdict(row) for row in losses],
        "published": [asdict(row) for row in predict_published()],
    }
    print("\n".join(format_table(rows, losses, meta)), flush=True)
    write_json(chosen.json, meta, rows)
    if chosen.plot:
        draw(rows, meta, chosen.plot)
    return 0 if all([row.replicas_identical for row in rows] + [row.replicas_identical for row in losses]) else 1
