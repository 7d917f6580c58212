"""`python -m gradwire.bench private` times allreduces and training steps with a key, with checksums, and without both.

Two ranks run on two simulated hosts, which needs root. A process has one key from its start to its end, so each turn is a new
process group. In each round, each mode has one turn, in random order: `plain`, `key` (GRADWIRE_KEY_FILE), and `checksum`
(COLLECTIVES_CHECKSUM=1). A turn times every case by the median of its calls. The cases are allreduces, the largest one also
with int8, and a step of training the GPT of 13 million parameters.

`time` is the median over the rounds, and `over plain` this time divided by that of `plain`, with the 95 % interval.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from gradwire.bench import hosts
from gradwire.bench.options import add_results, count_from
from gradwire.bench.results import software_and_machine, write_json
from gradwire.bench.timing import FEWEST_TURNS, format_interval, speedup_interval
from gradwire.collectives.control.key import Key
from gradwire.collectives.environment import CHECKSUM, KEY_FILE

PLAIN, KEY, CHECKSUMS = MODES = ("plain", "key", "checksum")
HOSTS = RANKS = 2
_TURN_S = 200.0
"""The time after which the ranks of a turn are killed."""


@dataclass(frozen=True)
class PrivateRow:
    """The times of a case in one mode. turns_ms: of each round. over_plain: their median divided by that of `plain`. interval:
    the 95 % interval of over_plain; None with fewer than FEWEST_TURNS rounds."""

    case: str
    mode: str
    turns_ms: list[float]
    over_plain: float
    interval: tuple[float, float] | None


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gradwire.bench private",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--rate", type=hosts.link_rate, default="10gbit", help="rate of each simulated host's link (10gbit)")
    add("--rounds", type=partial(count_from, 1), default=FEWEST_TURNS, help=f"turns of each mode ({FEWEST_TURNS})")
    add_results(parser)
    return parser.parse_args(arguments)


def planned(mode: str, key: Path, rate: str) -> list[hosts.Rank]:
    """Return the ranks of a turn. An empty value unsets what the environment of this process may have."""
    network = hosts.network_description(HOSTS, rate)
    settings = {KEY_FILE: str(key) if mode == KEY else "", CHECKSUM: "1" if mode == CHECKSUMS else ""}
    return [hosts.Rank(rank.host, {**rank.environment, **settings}) for rank in hosts.plan_ranks(RANKS, HOSTS, network)]


def take_turns(rate: str, rounds: int) -> list[dict[str, Any]]:
    """Return what the turns of each round have written, by mode. Raises HostsError if a turn fails."""
    order, taken = random.Random(0), list[dict[str, Any]]()
    with TemporaryDirectory(prefix="private.") as folder, hosts.Cluster(HOSTS, rate) as cluster:
        key, turn = Path(folder, "key"), Path(folder, "turn.json")
        Key.made().write(key)
        command = [sys.executable, "-m", "gradwire.bench.private.turns", str(turn)]
        for number in range(1, rounds + 1):
            found = {}
            for mode in order.sample(MODES, len(MODES)):
                if status := hosts.run_ranks(cluster, planned(mode, key, rate), command, _TURN_S):
                    raise hosts.HostsError(
                        f"a rank of the turn {mode!r} of round {number} ended with exit code {status}"
                    )
                found[mode] = json.loads(turn.read_text())
            taken.append(found)
            print(f"# round {number} of {rounds}", flush=True)
    return taken


def compare(taken: Sequence[Mapping[str, Any]]) -> list[PrivateRow]:
    """Return the rows of all cases and modes. taken: the turns of each round, by mode."""
    rows = []
    for case in taken[0][PLAIN]["ms"]:
        turns_ms = {mode: [turns[mode]["ms"][case] for turns in taken] for mode in MODES}
        for mode, each in turns_ms.items():
            over = median(each) / median(turns_ms[PLAIN])
            interval = None if mode == PLAIN else speedup_interval(np.array(turns_ms[PLAIN]), np.array(each))
            rows.append(PrivateRow(case, mode, each, over, interval))
    return rows


def format_table(rows: Sequence[PrivateRow], meta: Mapping[str, Any]) -> list[str]:
    return [
        f"# {meta['device']}, torch {meta['torch']}, {meta['network']}, {meta['rounds']} rounds",
        *(f"# {mode}: {'; '.join(routes)}" for mode, routes in meta["routes"].items()),
        "# case             mode      time (ms)  over plain",
        *(
            f"  {row.case:16} {row.mode:9} {median(row.turns_ms):9.3f} {row.over_plain:11.2f}  {format_interval(row.interval)}"
            for row in rows
        ),
    ]


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark. Return 1 if any result was wrong, and 2 if the hosts cannot be simulated or a turn fails."""
    flags = parse_arguments(arguments)
    try:
        hosts.check_machine()
        taken = take_turns(flags.rate, flags.rounds)
    except hosts.HostsError as error:
        print(f"bench private: {error}", file=sys.stderr)
        return 2
    meta = {
        **software_and_machine(torch.device("cpu")),
        "network": hosts.network_description(HOSTS, flags.rate),
        "rate": flags.rate,
        "world_size": RANKS,
        "rounds": flags.rounds,
        "routes": {mode: taken[0][mode]["routes"] for mode in MODES},
        "time": "median of a turn's calls on the slowest rank; a turn is a process group",
    }
    rows = compare(taken)
    print("\n".join(format_table(rows, meta)))
    write_json(flags.json, meta, rows)
    return int(any(turn["wrong"] for turns in taken for turn in turns.values()))
