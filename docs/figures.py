"""Put measured figures into README and docs, each table from the JSON of one run.

`python docs/figures.py` writes every page that shows a figure again. `python docs/figures.py measure` first runs the benchmarks
of RUNS that need no GPU, and `python docs/figures.py measure NAME ...` those named. `python docs/figures.py keep NAME FILE` keeps
what the command of NAME wrote elsewhere. Simulated hosts need root, and mpirun the extra `peers`. In a page,

    <!-- figures: VIEW NAME ... --> ... <!-- /figures -->

holds what VIEW (docs/figure_views.py) makes of docs/figures/NAME.json, or of several runs. Where a run is not measured yet, or
not with the command that it has here, the page says so. A test fails where a page and its JSON differ. The view `ratio` stands in
a line, and takes a run, a field and two competitors; `gap` stands in a line, too.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from figure_views import DOCS, FOLDER, VIEWS, figures

from gradwire.bench.results import commit

PAGES = (DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md")))
MARK = re.compile(r"(<!-- figures: (\S+)((?: [\w./+-]+)+) -->)(.*?)(<!-- /figures -->)", re.DOTALL)

_TORCHRUN = "torchrun --nproc-per-node {} -m gradwire.bench"
_HOSTS = "python -m gradwire.bench hosts --hosts {} --ranks {} --rate {} --"
_STEP = "step --preset 13m --batch 1"
_PLANS = f"{_STEP} --context 64 --plans"
_SIZES = "allreduce -b 1K -e 16M -f 4 -n {} --algorithm auto,torch"
_PEERS = "python -m gradwire.bench allreduce --peers -b 1K -e 64M -f 4 --algorithm auto,torch,mpi"
_LOCAL = "--preset 13m --batch 1 --context 128 --warmup-steps 60 --every 5"
_SHARES = "shares --batch 32 --steps 3 --rounds 8"
_TCP = "--mca btl tcp,self --mca pml ob1 -x COLLECTIVES_SHARED_MEMORY=0"

#: How each run is measured, by its name, in about 80 minutes together with ON_GPU, which is not measured on CPUs.
RUNS: dict[str, str] = {
    "step-one-host": f"{_TORCHRUN.format(2)} {_STEP} --steps 2 --rounds 20",
    "step-2-hosts-10gbit": f"{_HOSTS.format(2, 2, '10gbit')} {_STEP} --steps 2 --rounds 15",
    "step-4-hosts-1gbit": f"{_HOSTS.format(4, 4, '1gbit')} {_STEP} --steps 2 --rounds 8 --compression int8,onebit,powersgd",
    "step-small-one-host": f"{_TORCHRUN.format(2)} step --preset small --rounds 20",
    "step-overlap-4-hosts-1gbit": f"{_HOSTS.format(4, 4, '1gbit')} {_STEP} --steps 20 --rounds 3 --overlap",
    "plans-one-host": f"{_TORCHRUN.format(2)} {_PLANS} --steps 5 --rounds 12",
    "plans-2-hosts-10gbit": f"{_HOSTS.format(2, 2, '10gbit')} {_PLANS} --steps 3 --rounds 12",
    **{f"plans-{n}-hosts-1gbit": f"{_HOSTS.format(n, n, '1gbit')} {_PLANS} --steps 2 --rounds 6" for n in (2, 4)},
    "plans-mlp-one-host": f"{_TORCHRUN.format(2)} step --model mlp --plans --steps 10 --rounds 40",
    "step-shards-one-host": f"{_TORCHRUN.format(2)} {_STEP} --steps 2 --rounds 15 --shard-states",
    "step-shards-4-hosts-1gbit": f"{_HOSTS.format(4, 4, '1gbit')} {_STEP} --steps 2 --rounds 6 --shard-states --compression int8",
    "allreduce-2-hosts-10gbit": f"{_HOSTS.format(2, 2, '10gbit')} allreduce -b 1K -e 64M -f 4 -n 40 --algorithm auto,torch",
    **{f"allreduce-{n}-hosts-1gbit": f"{_HOSTS.format(n, n, '1gbit')} {_SIZES.format(7)}" for n in (2, 4, 8)},
    "allreduce-8-ranks-1gbit": f"{_HOSTS.format(4, 8, '1gbit')} {_SIZES.format(9)}",
    **{f"peers-{n}-shared": f"mpirun -n {n} --oversubscribe {_PEERS} -n 20 --shared" for n in (2, 4)},
    **{f"peers-{n}-any": f"mpirun -n {n} --oversubscribe {_PEERS} -n 20" for n in (2, 4)},
    **{f"peers-{n}-tcp": f"mpirun -n {n} --oversubscribe {_TCP} {_PEERS} -n 20" for n in (2, 4)},
    "compare-compressed": f"{_HOSTS.format(4, 4, '1gbit')} allreduce --codec int8,int4,onebit+ef -b 100M -e 100M",
    "codecs": "python -m gradwire.bench codec --iters 5",
    "codecs-gpu": "python -m gradwire.bench codec --device cuda",
    "gpu": f"{_TORCHRUN.format(2)} gpu",
    "convergence": f"{_TORCHRUN.format(4)} convergence --steps 100",
    "convex": f"{_TORCHRUN.format(4)} convex",
    "replicas": f"{_TORCHRUN.format(4)} replicas",
    "rules-slow-link": f"{_HOSTS.format(4, 4, '100mbit')} rules synchronous+powersgd average+onebit {_LOCAL} --seconds 240"
    " --warmup-codec powersgd",
    "rules-gigabit": f"{_HOSTS.format(4, 4, '1gbit')} rules ddp synchronous+powersgd average+int4 {_LOCAL} --seconds 180"
    " --warmup-codec int8",
    "rules-equal-tokens": f"{_TORCHRUN.format(4)} rules synchronous diloco average+chunktopk --steps 600",
    "rules-equal-tokens-every-10": f"{_TORCHRUN.format(4)} rules average+chunktopk --every 10 --steps 600",
    "rules-slow-rank": f"{_TORCHRUN.format(4)} rules synchronous quorum@0.6 stale@0.7 asynchronous@0.6 --seconds 45"
    " --slow 3:0.2 --staleness 96 --late drop",
    "rules-without-slow-rank": f"{_TORCHRUN.format(3)} rules synchronous --seconds 27",
    "rules-hogwild": f"{_TORCHRUN.format(2)} rules synchronous hogwild --seconds 20",
    "shares-one-host": f"{_TORCHRUN.format(2)} {_SHARES}",
    "shares-2-hosts-1gbit": f"{_HOSTS.format(2, 2, '1gbit')} {_SHARES}",
    **{f"private-{rate}": f"python -m gradwire.bench private --rate {rate} --rounds 8" for rate in ("10gbit", "1gbit")},
    "utilization": "python -m gradwire.bench utilization",
    "backends-one-host": f"{_TORCHRUN.format(2)} backends --rounds 20",
    "backends-2-hosts-10gbit": f"{_HOSTS.format(2, 2, '10gbit')} backends --rounds 12",
}

ON_GPU = {"codecs-gpu", "gpu"}


def is_measured(name: str) -> bool:
    """Return whether docs/figures has a run with the command that it has here."""
    return (FOLDER / f"{name}.json").exists() and figures(name)["command"] == RUNS[name]


def filled(text: str) -> str:
    """Return a page with its figures as docs/figures has them."""

    def fill(mark: re.Match[str]) -> str:
        begin, view, arguments, _, end = mark.groups()
        names = arguments.split()
        missing = [name for name in names if name in RUNS and not is_measured(name)]
        shown = f"\n(Not measured yet: {', '.join(missing)}.)\n" if missing else VIEWS[view](*names)
        return f"{begin}{shown}{end}"

    return MARK.sub(fill, text)


def measure(name: str) -> None:
    """Run a benchmark, and keep what it writes with its command."""
    path = FOLDER / f"{name}.json"
    scripts = Path(sys.executable).parent  # where torchrun, python and mpirun are
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment = {**os.environ, **root, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run([*shlex.split(RUNS[name]), "-J", str(path)], check=True, env=environment)
    keep(name, path)


def keep(name: str, written: Path) -> None:
    """Keep what the command of a run has written, with its command. A copy of this clone without git does not know its commit."""
    run = json.loads(written.read_text())
    run["meta"]["commit"] = run["meta"]["commit"] or commit()
    for row in run["rows"]:
        row.pop("losses", None)  # of every step: long, and no page shows them
    for key, results in (("rows", run), ("speedups", run["meta"])):  # the pages show the calls in place
        results[key] = [each for each in results.get(key, ()) if each.get("place") != "out-of-place"]
    (FOLDER / f"{name}.json").write_text(json.dumps({"command": RUNS[name], **run}, indent=1) + "\n")


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["measure"]:
        for name in arguments[1:] or [name for name in RUNS if name not in ON_GPU]:
            measure(name)
    if arguments[:1] == ["keep"]:
        keep(arguments[1], Path(arguments[2]))
    for page in PAGES:
        text = page.read_text()
        if (new := filled(text)) != text:
            page.write_text(new)
            print(f"written: {page.relative_to(DOCS.parent)}")


if __name__ == "__main__":
    main(sys.argv[1:])
