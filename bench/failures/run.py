"""`python -m gradwire.bench failures` trains while ranks and hosts are killed, and compares ways to survive this.

The ways run for the same time, one after the other. `undisturbed` trains without kills. `in-process` recovers by
`gradwire run --min-np`. `torchrun` restarts all ranks from commits in memory, and `disk` from a checkpoint on disk.

Every --every-s seconds, a rank drawn at random is killed by SIGKILL. With --hosts (as root), the ranks train on
simulated hosts, and the launcher and torchrun's store run on one more host. Every third kill then takes a host drawn at
random: its link goes down, all its processes are killed, and it comes back after --repair-s seconds. The launcher of
`in-process` notices this at once, because the pipe to its agent is on the same machine. torchrun's agents notice it
when a time limit ends.

Goodput is the number of steps without repetitions, divided by that of the undisturbed run. A job hangs if it does not
end, or makes no progress for two minutes. -J adds the results to a file of the same settings, commit, software and
machine, so that the ways can be measured one by one.

    python -m gradwire.bench failures --minutes 20 --hosts 2 -J docs/failures.json --plot docs/images/failures.png
    python -m gradwire.bench failures --plot docs/images/failures.png docs/failures.json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gradwire.bench.failures.kills import Killer
from gradwire.bench.failures.outcome import Outcome, compare, described, line
from gradwire.bench.failures.ways import UNDISTURBED, WAYS, hosts_for, kill_all, start
from gradwire.bench.hosts import HostsError, check_machine, link_rate
from gradwire.bench.options import count_from, names_of, picture
from gradwire.bench.results import software_and_machine, write_json

_END_S = 60.0
"""The time that a job has to end after its training time. If it does not, it hangs."""
_KILL_S = 10.0
_SETTINGS = ("minutes", "every_s", "repair_s", "ranks", "hosts", "rate", "seed")
"""The settings that must be equal for all ways that are compared."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gradwire.bench failures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("files", nargs="*", type=Path, help="with --plot: draw what a run has written by -J, and run nothing")
    add("--ways", type=partial(names_of, WAYS), default=list(WAYS), help=f"{', '.join(WAYS)}, or all (all)")
    add("--minutes", type=float, default=2.0, help="minutes of each way (2)")
    add("--every-s", type=float, default=30.0, help="seconds between kills (30)")
    add("--repair-s", type=float, default=5.0, help="seconds after which a host that was lost comes back (5)")
    add("--ranks", type=partial(count_from, 2), default=4, help="number of ranks (4)")
    add("--hosts", type=partial(count_from, 1), default=1, help="simulated hosts; 1, the default: this machine")
    add("--rate", type=link_rate, default="1gbit", help="rate of each simulated host's link (1gbit)")
    add("--seed", type=partial(count_from, 0), default=0, help="seed of the choice of the ranks to kill (0)")
    add("-J", "--json", type=Path, metavar="FILE", help="write meta and rows, beside those of other ways in the file")
    add("--plot", type=picture, metavar="FILE.png", help="draw the file of -J, or the one that is given")
    flags = parser.parse_args(arguments)
    if len(flags.files) != bool(flags.plot and flags.json is None):
        parser.error("--plot needs either -J FILE, or one file that an earlier run has written")
    if flags.ranks % flags.hosts:
        parser.error(f"--ranks {flags.ranks} cannot be divided among --hosts {flags.hosts}")
    return flags


def run(way: str, flags: argparse.Namespace) -> Outcome:
    """Run one way, and return its results. Raises HostsError if hosts cannot be simulated."""
    folder = Path(tempfile.mkdtemp(prefix=f"failures.{way}."))  # not removed
    print(f"# the output of {way} is in {folder / 'output.txt'}", flush=True)
    log = folder / "steps.jsonl"
    with hosts_for(flags, folder) as hosts, (folder / "output.txt").open("wb") as output:
        killer = Killer(flags.seed, log, hosts)
        began = time.time()
        until = began + 60 * flags.minutes
        try:
            job = start(way, hosts, flags, log, until, output)
            next_kill = began + flags.every_s
            back_at: dict[int, float] = {}
            while job.status() is None and time.time() < until + _END_S:
                time.sleep(0.05)
                for host in [host for host, at in back_at.items() if time.time() >= at]:
                    del back_at[host]
                    hosts.set_link(host, "up")
                    job.bring_back(host)
                if way != UNDISTURBED and next_kill <= time.time() < until - flags.every_s:
                    if (lost := killer()) is not None:
                        job.lose(lost)
                        back_at[lost] = time.time() + flags.repair_s
                    next_kill += flags.every_s
            status = job.status()
        finally:
            kill_all(log, _KILL_S)
    return described(way, status, log, began, 60 * flags.minutes, killer.kills)


def earlier(path: Path | None, meta: dict[str, Any], ways: Sequence[str]) -> list[Outcome]:
    """Return the runs of other ways in a file. Raises ValueError if they were measured with other settings, commit or
    software, or on another machine."""
    if path is None or not path.exists():
        return []
    read = json.loads(path.read_text())
    others = [row for row in read["rows"] if row["way"] not in ways]
    differing = [f"{name} {read['meta'].get(name)}" for name, value in meta.items() if read["meta"].get(name) != value]
    if others and differing:
        raise ValueError(
            f"{path} has other ways with other settings ({', '.join(differing)}): give -J the name of another file"
        )
    return [Outcome.from_record(row) for row in others]


def main(arguments: Sequence[str]) -> int:
    flags = parse_arguments(arguments)
    if not flags.files:
        settings = {name: getattr(flags, name) for name in _SETTINGS}
        meta = software_and_machine(torch.device("cpu")) | settings
        try:
            if flags.hosts > 1:
                check_machine()
            runs = earlier(flags.json, meta, flags.ways)
            for way in flags.ways:
                runs.append(run(way, flags))
                runs.sort(key=lambda each: WAYS.index(each.way))
                compare(runs)
                print(line(next(each for each in runs if each.way == way)), flush=True)
                write_json(flags.json, meta, runs)
        except (HostsError, ValueError) as error:
            print(f"bench failures: {error}", file=sys.stderr)
            return 2
    if flags.plot:
        from gradwire.bench.failures.plot import draw

        draw(json.loads((flags.json or flags.files[0]).read_text()), flags.plot)
    return 0 if flags.files else int(any(each.exit_status != 0 or each.hangs for each in runs))
