"""Put measured figures into README and docs, each table from the JSON of one run.

`python docs/figures.py` writes every page that shows a figure again. `python docs/figures.py measure [NAME ...]` runs the
benchmarks of RUNS before that, all of them or those named; between hosts they need root. In a page,

    <!-- figures: NAME VIEW ARGUMENTS --> ... <!-- /figures -->

holds what VIEW makes of docs/figures/NAME.json. A test fails where a page and its JSON differ.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from gradwire.collectives.notation import format_size

DOCS = Path(__file__).parent
FOLDER = DOCS / "figures"
PAGES = (DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md")))
MARK = re.compile(r"(<!-- figures: (\S+) (\S+)((?: \S+)*) -->)(.*?)(<!-- /figures -->)", re.DOTALL)

_TORCHRUN = "torchrun --nproc-per-node {} -m gradwire.bench"
_HOSTS = "python -m gradwire.bench hosts --hosts {} --ranks {} --rate {} --"
_STEP = "step --preset 13m --batch 1 --steps 2"

#: How each run is measured, by its name.
RUNS: dict[str, str] = {
    "step-one-host": f"{_TORCHRUN.format(2)} {_STEP} --rounds 20",
    "step-2-hosts-10gbit": f"{_HOSTS.format(2, 2, '10gbit')} {_STEP} --rounds 15",
    "step-4-hosts-1gbit": f"{_HOSTS.format(4, 4, '1gbit')} {_STEP} --rounds 8 --compression int8,onebit,powersgd",
    "step-small-one-host": f"{_TORCHRUN.format(2)} step --preset small --rounds 20",
    "allreduce-2-hosts-10gbit": f"{_HOSTS.format(2, 2, '10gbit')} allreduce -b 1K -e 64M -f 4 -n 40 --algorithm auto,torch",
    "allreduce-8-ranks-1gbit": f"{_HOSTS.format(4, 8, '1gbit')} allreduce -b 1K -e 16M -f 4 -n 9 --algorithm auto,torch",
}


def figures(name: str) -> dict[str, Any]:
    """Return what a run wrote, with its command."""
    read: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return read


def _table(heading: Iterable[str], rows: Iterable[Iterable[str]], alignment: str) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (heading, *rows)]
    lines.insert(1, f"|{alignment}|")
    return "\n" + "\n".join(lines) + "\n"


def _number(value: float) -> str:
    """Return a ratio with as many digits as its size makes worth reading: 0.95, 2.3, 11."""
    return f"{value:.2f}" if value < 2 else f"{value:.1f}" if value < 10 else f"{value:.0f}"


def _interval(interval: list[float] | None) -> str:
    return "" if interval is None else f" [{_number(interval[0])}, {_number(interval[1])}]"


def _speedup(run: dict[str, Any], competitor: str, peer: str) -> dict[str, Any]:
    return next(each for each in run["meta"]["speedups"] if (each["competitor"], each["peer"]) == (competitor, peer))


def times(run: dict[str, Any], competitor: str, peer: str = "ddp") -> str:
    """Return how many times as fast a training step is as a peer's, with the 95 % interval where the run has one."""
    speedup = _speedup(run, competitor, peer)
    return f"**{_number(speedup['times'])}**{_interval(speedup['interval'])}"


def steps(run: dict[str, Any]) -> str:
    """Return a table of all competitors' training steps over those of DDP."""
    rows = (
        (
            f"`{row['competitor']}`",
            times(run, row["competitor"])
            if row["competitor"] not in ("ddp", "compute", "ddp+fp16")
            else _number(row["as_ddp"]),
            "" if row["competitor"] == "compute" else _number(row["beyond_compute_as_ddp"]),
        )
        for row in run["rows"]
    )
    return _table(("", "a step, times as fast as DDP", "beyond computing"), rows, "---|---|---:")


def sizes(run: dict[str, Any], peer: str = "torch") -> str:
    """Return a table of a collective by size: how many times as fast `auto` is as a peer."""
    rows = (
        (
            f"{format_size(each['bytes'])[:-1]} {format_size(each['bytes'])[-1]}B",
            f"**{_number(each['times'])}**{_interval(each['interval'])}",
            each["runs"],
        )
        for each in run["meta"]["speedups"]
        if each["peer"] == peer
    )
    return _table(
        ("size", f"times as fast as {'gloo' if peer == 'torch' else 'Open MPI'}", "algorithm"), rows, "---:|---|---"
    )


def command(run: dict[str, Any]) -> str:
    """Return the command of a run, and what it ran on."""
    meta = run["meta"]
    where = ", ".join(
        filter(None, (meta["device"], f"torch {meta['torch']}", meta["network"], f"commit {meta['commit']}"))
    )
    return f"\n```\n{run['command']}\n```\n\n({where}.)\n"


VIEWS: dict[str, Callable[..., str]] = {"times": times, "steps": steps, "sizes": sizes, "command": command}


def filled(text: str) -> str:
    """Return a page with its figures as docs/figures has them."""

    def fill(mark: re.Match[str]) -> str:
        begin, name, view, arguments, _, end = mark.groups()
        return f"{begin}{VIEWS[view](figures(name), *arguments.split())}{end}"

    return MARK.sub(fill, text)


def measure(name: str) -> None:
    """Run a benchmark, and keep what it writes with its command."""
    path = FOLDER / f"{name}.json"
    program, *arguments = shlex.split(RUNS[name])
    launcher = {"torchrun": ["-m", "torch.distributed.run"], "python": []}[program]
    subprocess.run([sys.executable, *launcher, *arguments, "-J", str(path)], check=True)
    path.write_text(json.dumps({"command": RUNS[name], **json.loads(path.read_text())}, indent=1) + "\n")


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["measure"]:
        for name in arguments[1:] or RUNS:
            measure(name)
    for page in PAGES:
        text = page.read_text()
        if (new := filled(text)) != text:
            page.write_text(new)
            print(f"written: {page.relative_to(DOCS.parent)}")


if __name__ == "__main__":
    main(sys.argv[1:])
