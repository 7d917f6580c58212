"""`python -m gradwire.bench failures`: training while ranks are killed, beside the same training undisturbed.

Each way runs for the same time: undisturbed; in process, by `gradwire run --min-np`; by torchrun, which starts all ranks again,
from commits in memory; and by torchrun from checkpoints on disk alone. Every so many seconds one rank, drawn by lot, is killed by
SIGKILL. Goodput is the steps that count, over those of the undisturbed run. --hosts kills whole hosts, too (as root, in process
only): simulated ones, while the launcher is on another.

    python -m gradwire.bench failures --minutes 20 -J failures.json
    python -m gradwire.bench failures --plot failures.png failures.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from gradwire.bench.hosts import Cluster
from gradwire.bench.options import count_from, names_of, picture
from gradwire.bench.results import software_and_machine, write_json

UNDISTURBED, IN_PROCESS, RESTART, DISK = WAYS = ("undisturbed", "in-process", "torchrun", "disk")
_MODULE = "gradwire.bench.failures.training"
_CHECKPOINT_S = 5.0
_END_S = 60.0
"""What a run has beyond its time to end, after which it hangs."""
_LAST = 50
"""Over how many steps the last loss is averaged."""


@dataclass
class Run:
    """What one way came to. goodput: steps over those of the undisturbed run. loss_over: the last loss, over that of the
    undisturbed run at the same steps, less 1. outages_s: after each kill, how long it took to the next step further than before.
    curve: (seconds, step, loss, ranks) of every step that was logged."""

    way: str
    exit_status: int | None
    steps: int = 0
    goodput: float = 0.0
    loss: float = 0.0
    loss_over: float = 0.0
    kills_s: list[float] = field(default_factory=list)
    outages_s: list[float] = field(default_factory=list)
    curve: list[tuple[float, int, float, int]] = field(default_factory=list)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gradwire.bench failures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("files", nargs="*", type=Path, help="with --plot: what a run has written by -J")
    add("--ways", type=partial(names_of, WAYS), default=list(WAYS), help=f"{', '.join(WAYS)}, or all (all)")
    add("--minutes", type=float, default=2.0, help="of each way (2)")
    add("--every-s", type=float, default=30.0, help="seconds between kills (30)")
    add("--ranks", type=partial(count_from, 2), default=4, help="default 4")
    add("--hosts", type=partial(count_from, 1), default=1, help="simulated hosts, of which every third kill takes one")
    add("--at-once", action="store_true", help="run all ways at the same time, which share the cores")
    add("--rate", default="1gbit", help="of each simulated host's link (1gbit)")
    add("--seed", type=partial(count_from, 0), default=0, help="of who is killed (0)")
    add("-J", "--json", type=Path, metavar="FILE", help="write meta and rows")
    add("--plot", type=picture, metavar="FILE.png", help="draw the file")
    flags = parser.parse_args(arguments)
    if bool(flags.files) != bool(flags.plot):
        parser.error("--plot takes what an earlier run has written, and nothing else does")
    if flags.hosts > 1 and {RESTART, DISK} & set(flags.ways):
        parser.error("--hosts is for --ways undisturbed,in-process")
    return flags


def command(way: str, flags: argparse.Namespace, log: Path, until: float) -> list[str]:
    """Return what starts the training."""
    script = ["-m", _MODULE, "--into", str(log), "--until", str(until)]
    if way in (RESTART, DISK):
        restarts = ["--standalone", "--nproc-per-node", str(flags.ranks), "--max-restarts", "100000"]
        disk = ["--checkpoint-s", str(_CHECKPOINT_S)] if way == DISK else []
        return [sys.executable, "-m", "torch.distributed.run", *restarts, *script, *disk]
    each = flags.ranks // flags.hosts
    hosts = ["-H", ",".join(f"host{host}:{each}" for host in range(flags.hosts))] if flags.hosts > 1 else []
    least = ["--min-np", str(each if flags.hosts > 1 else flags.ranks // 2)]
    return [sys.executable, "-m", "gradwire", "run", "-np", str(flags.ranks), *least, *hosts, *script]


def ranks_running(log: Path) -> list[int]:
    """Return the processes that train for a log, by what launchers set in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_rank = b"TORCHELASTIC_RUN_ID=" in (folder / "environ").read_bytes()
            trains = str(log).encode() in (folder / "cmdline").read_bytes().split(b"\0")
            if is_rank and trains:
                found.append(int(folder.name))
    return sorted(found)


class Killer:
    """Kills a rank, or every third time a host where there are several, and notes when."""

    def __init__(self, seed: int, log: Path, networks: Sequence[str]) -> None:
        self._random = random.Random(seed)
        self._log = log
        self._networks = networks
        self.times: list[float] = []

    def __call__(self) -> None:
        if self._networks and len(self.times) % 3 == 2:
            network = self._random.choice(self._networks)
            holders = [
                int(folder.name)
                for folder in Path("/proc").glob("[0-9]*")
                if _network_of(folder) == network and b"gradwire" in (folder / "cmdline").read_bytes()
            ]
        elif running := ranks_running(self._log):
            holders = [self._random.choice(running)]
        else:
            return  # all are being started
        self.times.append(time.time())
        for process in holders:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def _network_of(folder: Path) -> str | None:
    with suppress(OSError):
        return os.readlink(folder / "ns" / "net")
    return None


def run(way: str, flags: argparse.Namespace, folder: Path) -> Run:
    """Run one way, and return what came of it."""
    log = folder / f"{way}.jsonl"
    with _hosts(flags) as (enter, environment, networks):
        killer = Killer(flags.seed, log, networks)
        until = time.time() + 60 * flags.minutes
        started = enter(command(way, flags, log, until))
        with (folder / f"{way}.txt").open("wb") as output:
            job = subprocess.Popen(
                started, stdout=output, stderr=output, env={**os.environ, **environment, "OMP_NUM_THREADS": "1"}
            )
            next_kill = time.time() + flags.every_s
            try:
                while job.poll() is None and time.time() < until + _END_S:
                    time.sleep(0.1)
                    if way != UNDISTURBED and next_kill <= time.time() < until - flags.every_s / 2:
                        killer()
                        next_kill += flags.every_s
                status = job.poll()
            finally:
                job.kill()
                job.wait()
    return described(way, status, log, until - 60 * flags.minutes, killer.times)


@contextmanager
def _hosts(
    flags: argparse.Namespace,
) -> Iterator[tuple[Callable[[Sequence[str]], list[str]], dict[str, str], list[str]]]:
    """Make simulated hosts, and one more for the launcher, which reaches them by an `ssh` that enters their namespaces."""
    if flags.hosts == 1:
        yield list, {}, []
        return
    with Cluster(flags.hosts + 1, flags.rate) as cluster, tempfile.TemporaryDirectory() as folder:
        cases = "".join(f"host{number}) target={each.pid};;\n" for number, each in enumerate(cluster.hosts))
        ssh = Path(folder, "ssh")
        ssh.write_text(
            '#!/bin/sh\nwhile [ "${1#host}" = "$1" ]; do shift; done\n'
            f'case "$1" in\n{cases}esac\n'
            f'exec nsenter --target "$target" --net --uts --mount --wd="{os.getcwd()}" -- sh -c "$2"\n'
        )
        ssh.chmod(0o755)
        networks = [os.readlink(f"/proc/{each.pid}/ns/net") for each in cluster.hosts[:-1]]
        settings = {"PATH": f"{folder}:{os.environ['PATH']}", "GLOO_SOCKET_IFNAME": "eth0"}
        yield cluster.hosts[-1].enter, settings, networks


def described(way: str, status: int | None, log: Path, began: float, kills: Sequence[float]) -> Run:
    """Return a run by its log."""
    records: list[dict[str, Any]] = []
    with suppress(OSError):
        records = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
    curve = [(each["time"] - began, each["step"], each["loss"], each["ranks"]) for each in records]
    found = Run(way, status, curve=curve, kills_s=[at - began for at in kills])
    found.steps = max((step for _, step, *_ in curve), default=0)
    for at in found.kills_s:
        before = max((step for seconds, step, *_ in curve if seconds <= at), default=0)
        after = [seconds for seconds, step, *_ in curve if seconds > at and step > before + 1]
        if after:
            found.outages_s.append(min(after) - at)
    return found


def compare(runs: Sequence[Run]) -> None:
    """Set goodput and losses beside the first run's."""
    reference = {step: loss for _, step, loss, _ in runs[0].curve}
    for each in runs:
        losses = {step: loss for _, step, loss, _ in each.curve}
        last = [step for step in range(each.steps - _LAST + 1, each.steps + 1) if step in losses and step in reference]
        each.goodput = each.steps / max(1, runs[0].steps)
        if last:
            each.loss = sum(losses[step] for step in last) / len(last)
            each.loss_over = each.loss / (sum(reference[step] for step in last) / len(last)) - 1


def _line(run: Run) -> str:
    outage = f"outage {median(run.outages_s):.2f} s (median), {max(run.outages_s):.2f} (most)" if run.outages_s else ""
    return (
        f"{run.way:12} exit {run.exit_status}  steps {run.steps:6}  goodput {run.goodput:5.2f}  loss {run.loss:.4f}"
        f" ({run.loss_over:+.2%})  {len(run.kills_s)} kills  {outage}"
    )


def main(arguments: Sequence[str]) -> int:
    flags = parse_arguments(arguments)
    if flags.plot:
        from gradwire.bench.failures.plot import draw

        draw(json.loads(flags.files[0].read_text()), flags.plot)
        return 0
    meta = software_and_machine(torch.device("cpu"))
    meta |= {key: getattr(flags, key) for key in ("minutes", "every_s", "ranks", "hosts", "at_once", "seed")}
    runs: list[Run] = []
    folder = Path(tempfile.mkdtemp(prefix="failures."))  # with the output of every way
    with ThreadPoolExecutor(len(flags.ways) if flags.at_once else 1) as threads:
        for each in threads.map(lambda way: run(way, flags, folder), flags.ways):
            runs.append(each)
            compare(runs)
            print(_line(each), flush=True)
            write_json(flags.json, meta, runs)
    return int(any(each.exit_status != 0 for each in runs))
