"""The views of docs/figures.py: each returns, in Markdown, what a page shows of a run, or of several.

`predictions` shows all runs that a folder of docs has, `failures` and `published` a file of docs that `python -m gradwire.bench
failures -J` and `gradwire simulate -J` have written.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from gradwire.bench.codec.turns import OPERATIONS
from gradwire.bench.failures.ways import LABELS, UNDISTURBED
from gradwire.bench.predicted import (
    CODECS,
    PredictedRow,
    codec_over_best,
    codec_pays_from,
    measured_twice,
    over_best,
)
from gradwire.bench.private.run import MODES, PLAIN
from gradwire.collectives.parsing import format_size

DOCS = Path(__file__).parent
FOLDER = DOCS / "figures"


def figures(name: str) -> dict[str, Any]:
    """Return what a run wrote, with its command."""
    read: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return read


def _table(heading: Iterable[str], rows: Iterable[Iterable[str]], alignment: str) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (heading, *rows)]
    lines.insert(1, f"|{alignment}|")
    return "\n" + "\n".join(lines) + "\n"


def _number(value: float) -> str:
    """Return a ratio with as many digits as its size makes worth reading: 0.95, 2.34, 11."""
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _interval(interval: list[float] | None) -> str:
    return "" if interval is None else f" [{_number(interval[0])}, {_number(interval[1])}]"


def _times(run: dict[str, Any], competitor: str, peer: str = "ddp") -> str:
    """Return how many times as fast a competitor's training step is as a peer's, with the 95 % interval."""
    found = (each for each in run["meta"]["speedups"] if (each["competitor"], each["peer"]) == (competitor, peer))
    speedup = next(found)
    return f"**{_number(speedup['times'])}**{_interval(speedup['interval'])}"


#: What the README says of training steps: where, what to write, the run and its competitor.
_GAINS = (
    ("2 processes on one computer", "`hvd.DistributedOptimizer(...)`, uncompressed", "step-one-host", "gradwire"),
    ("2 computers, 10 Gbit/s", "the same", "step-2-hosts-10gbit", "gradwire"),
    ("4 computers, 1 Gbit/s", "the same", "step-4-hosts-1gbit", "gradwire"),
    ("", '`compression="int8"`', "step-4-hosts-1gbit", "gradwire+int8"),
    ("", '`compression="powersgd"`', "step-4-hosts-1gbit", "gradwire+powersgd"),
    ("", '`compression="onebit"`', "step-4-hosts-1gbit", "gradwire+onebit"),
)


def gains(*names: str) -> str:
    """Return the table of the README, of the runs with these names."""
    rows = []
    for where, write, name, competitor in _GAINS:
        if name in names:
            rows.append((where, write, _times(figures(name), competitor)))
    return _table(("where", "optimizer", "a training step, times as fast as DDP"), rows, "---|---|---")


def steps(name: str) -> str:
    """Return a table of all competitors' training steps over those of DDP."""
    run = figures(name)
    rows = (
        (
            f"`{row['competitor']}`",
            _times(run, row["competitor"]) if row["competitor"].startswith("gradwire") else _number(row["as_ddp"]),
            "" if row["competitor"] == "compute" else _number(row["beyond_compute_as_ddp"]),
        )
        for row in run["rows"]
    )
    return _table(("", "a step, times as fast as DDP", "beyond computing"), rows, "---|---|---:")


def shares(*names: str) -> str:
    """Return a table of the divisions of a global batch: for each of these runs, the samples of each rank, and the samples per
    second over the sum of those of ranks that exchange nothing."""
    runs = [figures(name) for name in names]
    columns = [{row["competitor"]: row for row in run["rows"]} for run in runs]
    labels = {"BatchShares": "`hvd.BatchShares`", "equal": "equal shares", "ddp": "DDP, equal shares"}
    rows = []
    for name, label in labels.items():
        cells = ((" : ".join(map(str, column[name]["parts"])), _number(column[name]["of_alone"])) for column in columns)
        rows.append((label, *chain.from_iterable(cells)))
    where = [(run["meta"]["network"] or "one host").split(" (")[0] for run in runs]
    heading = chain.from_iterable((f"{each}: samples of each rank", "of the ranks' own speed") for each in where)
    return _table(("", *heading), rows, "|".join(["---"] + ["---:"] * 2 * len(runs)))


def plans(*names: str) -> str:
    """Return a table of the plans of an exchange, with a column for each of these runs: a training step as a multiple of that of
    the fastest fixed plan, and the plan that was chosen."""
    runs = [figures(name) for name in names]
    columns = [{row["competitor"]: row for row in run["rows"]} for run in runs]
    competitors = [
        each for each in dict.fromkeys(chain.from_iterable(columns)) if each.split()[0] in ("gradwire", "ddp")
    ]
    rows = []
    for name in competitors:
        cells = (f"{column[name]['of_best_plan']:.2f}" if name in column else "" for column in columns)
        rows.append((name.removeprefix("gradwire ").replace("gradwire", "chosen").replace("ddp", "DDP"), *cells))
    rows.append(("the plan chosen", *((column["gradwire"]["plan"] or "").removeprefix("in ") for column in columns)))
    where = [f"{(run['meta']['network'] or 'one host').split(' (')[0]}, {run['meta']['model']}" for run in runs]
    return _table(("", *where), rows, "|".join(["---"] + ["---:"] * len(runs)))


def private(*names: str) -> str:
    """Return a table of the cases of `bench private`, with two columns for each of these runs: the times with a key and with
    checksums, as multiples of that without."""
    columns: list[dict[tuple[str, str], dict[str, Any]]] = []
    heading, runs = [""], [figures(name) for name in names]
    for run in runs:
        columns.append({(row["case"], row["mode"]): row for row in run["rows"]})
        rate = run["meta"]["rate"].replace("gbit", " Gbit/s")
        heading += [f"{rate}: with a key", "with checksums"]
    found = []
    for case in dict.fromkeys(case for case, _ in columns[0]):
        cells = [case]
        for column in columns:
            for row in (column[case, mode] for mode in MODES if mode != PLAIN):
                cells.append(f"**{_number(row['over_plain'])}**{_interval(row['interval'])}")
        found.append(cells)
    (where,) = {_where({**run["meta"], "network": None}) for run in runs}
    return _table(heading, found, f"---{'|---|---' * len(names)}") + f"\n({where}.)\n"


def backends(*names: str) -> str:
    """Return a table of torch's ways to train over our backend, as fast as over gloo, with a column for each of these runs."""
    runs = [figures(name) for name in names]
    columns = [{(row["program"], row["backend"]): row for row in run["rows"]} for run in runs]
    rows = []
    for program, backend in columns[0]:
        if backend not in ("gloo", "compute"):
            found = [column[program, backend] for column in columns]
            times = (f"**{_number(row['as_gloo'])}**{_interval(row['interval'])}" for row in found)
            rows.append((f"`{program}`", backend, *times))
    where = ((run["meta"]["network"] or "one host").split(" (")[0] for run in runs)
    return _table(("program", "backend", *where), rows, "|".join(["---"] * (2 + len(runs))))


def sizes(name: str) -> str:
    """Return a table of a collective by size: how many times as fast `auto` is as gloo. Of all sizes, it has every second one."""
    found = [each for each in figures(name)["meta"]["speedups"] if each["peer"] == "torch"]
    rows = (
        (_size(each["bytes"]), f"**{_number(each['times'])}**{_interval(each['interval'])}", each["runs"])
        for each in found[::-2][::-1]
    )
    return _table(("size", "times as fast as gloo", "algorithm"), rows, "---:|---|---")


def across(*names: str) -> str:
    """Return a table of allreduces by size: how many times as fast `auto` is as each peer, a column for each run and peer. Of all
    sizes, it has every second one."""
    columns: dict[str, dict[int, float]] = {}
    for name in names:
        meta = figures(name)["meta"]
        peers = dict.fromkeys(each["peer"] for each in meta["speedups"])
        hosts = len(meta["hosts"])
        heading = _TENSORS.get(name.rpartition("-")[2]) or (
            f"{hosts} hosts" if hosts > 1 else f"{meta['world_size']} ranks"
        )
        for peer in peers:
            column = f"{heading}: {_PEERS[peer]} / gradwire" if len(peers) > 1 else heading
            columns[column] = {each["bytes"]: each["times"] for each in meta["speedups"] if each["peer"] == peer}
    rows = (
        (_size(nbytes), *(_number(column[nbytes]) for column in columns.values()))
        for nbytes in [*next(iter(columns.values()))][::-2][::-1]
    )
    return _table(("size", *columns), rows, f"---:{'|---:' * len(columns)}")


#: How across() calls runs that differ in the tensors, by the last word of their names.
_TENSORS = {"shared": "without a copy", "any": "any tensor"}
_PEERS = {"torch": "gloo", "mpi": "Open MPI"}


def compressed(name: str) -> str:
    """Return a table of an allreduce by codec: how many times as fast as gloo it is, and what it sends."""
    rows = figures(name)["rows"]
    gloo = next(row for row in rows if row["algorithm"] == "torch")
    found = (
        (
            f"`{row['codec']}`",
            f"**{_number(gloo['time_us'] / row['time_us'])}**",
            f"{row['wire_bytes'] / 1e6:.1f} MB",
            _number(row["ratio"]),
        )
        for row in rows
        if row is not gloo
    )
    heading = ("codec", "times as fast as gloo", "bytes sent per rank", "float32 bytes / bytes sent")
    return _table(heading, found, "---|---:|---:|---:")


def codecs(name: str) -> str:
    """Return a table of codecs: the rate of each operation beside that of a copy."""
    rows: dict[str, dict[str, Any]] = {}
    for row in figures(name)["rows"]:
        rows.setdefault(row["codec"], {})[row["operation"]] = row
    found = (
        (f"`{codec}`", *(f"{of[operation]['of_copy']:.2f}" for operation in OPERATIONS)) for codec, of in rows.items()
    )
    heading = ("codec", "encode", "encode, ef", "decode", "decode, add")
    return _table(heading, found, f"---{'|---:' * 4}")


def gpu_steps(name: str) -> str:
    """Return a table of training steps on a GPU beside those of DDP: two columns for each network."""
    rows = [row for row in figures(name)["rows"] if row["part"] == "step"]
    networks = list(dict.fromkeys(row["network"] for row in rows))
    by_place = {(row["competitor"], row["network"]): row for row in rows}
    heading = [""]
    for network in networks:
        heading += [f"{(network or 'one host').split(' (')[0]}: step, ms", "as fast as DDP", "beyond computing"]
    found: dict[str, list[str]] = {}
    for competitor, network in by_place:
        row = by_place[competitor, network]
        beyond = row["beyond_compute_as_ddp"]
        cells = (f"{row['step_ms']:.1f}", _number(row["as_ddp"]), "" if beyond is None else _number(beyond))
        found.setdefault(competitor, []).extend(cells)
    table = ((f"`{competitor}`", *cells) for competitor, cells in found.items())
    return _table(heading, table, f"---{'|---:' * (len(heading) - 1)}")


def gpu_calls(name: str) -> str:
    """Return a table of the host's time in the call of an asynchronous allreduce on a GPU, and what became of the verbs."""
    rows = figures(name)["rows"]
    calls = (
        (row["backend"], f"{row['world_size']}", _size(row["bytes"]), f"{row['host_us']:.0f}", f"{row['torch_us']:.0f}")
        for row in rows
        if row["part"] == "call"
    )
    verbs = [row for row in rows if row["part"] == "verb"]
    right = sum(row["same_bits"] for row in verbs)
    table = _table(("backend", "ranks", "size", "gradwire, us", "PyTorch, us"), calls, "---|---:|---:|---:|---:")
    return (
        f"{table}\n{right} of {len(verbs)} verbs over {verbs[0]['backend']} gave the right bits.\n" if verbs else table
    )


def gpu_overlap(name: str) -> str:
    """Return a table of the share of codecs and copies on a GPU beside which backward ran, for each competitor."""
    rows = (
        (
            f"`{row['competitor']}`",
            f"{row['backward_ms']:.1f}",
            f"{row['codec_and_copy_ms']:.1f}",
            "" if row["share"] is None else f"{row['share']:.2f}",
        )
        for row in figures(name)["rows"]
        if row["part"] == "overlap"
    )
    heading = ("", "backward, ms a step", "codecs and copies, ms a step", "share of these beside backward")
    return _table(heading, rows, "---|---:|---:|---:")


def gpu_goals(name: str) -> str:
    """Return a table of the goals of a run on a GPU, and whether it has reached them."""
    rows = (
        (
            goal["what"],
            "not measured" if goal["value"] is None else _number(goal["value"]),
            f"at {'least' if goal['at_least'] else 'most'} {goal['limit']:g}",
            goal["missing"] or ("yes" if goal["is_reached"] else "no"),
        )
        for goal in figures(name)["meta"]["goals"]
    )
    return _table(("", "measured", "goal", "reached"), rows, "---|---:|---|---")


def losses(name: str) -> str:
    """Return a table of training with each codec, two columns for each model: fewer bytes, and the loss or the accuracy."""
    rows = figures(name)["rows"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    heading, found = ["codec"], dict[str, list[str]]()
    for model in models:
        of_model = [row for row in rows if row["model"] == model]
        has_accuracy = of_model[0]["accuracy"] is not None
        heading += [f"`{model}`: times fewer bytes", "accuracy" if has_accuracy else "loss / loss without compression"]
        for row in of_model:
            result = f"{100 * row['accuracy']:.1f} %" if has_accuracy else f"{row['validation_over_none']:.3f}"
            found.setdefault(row["codec"], []).extend((_number(row["ratio"]), result))
    cells = ((f"`{codec}`", *of) for codec, of in found.items())
    return _table(heading, cells, f"---{'|---:' * (len(heading) - 1)}")


def convex(name: str) -> str:
    """Return a table of the codecs of `bench convex`: the loss above its minimum at the end, over that at the start, without and
    with error feedback for each schedule of the step size."""
    rows = figures(name)["rows"]
    columns = [(each, on) for each in dict.fromkeys(row["schedule"] for row in rows) for on in (False, True)]
    gaps = {(row["codec"], row["schedule"], row["feedback"]): _gap(row) for row in rows}
    heading = [f"{each} step size, {'with feedback' if on else 'without'}" for each, on in columns]
    codecs = dict.fromkeys(row["codec"] for row in rows)
    cells = ((f"`{codec}`", *(gaps.get((codec, *column), "") for column in columns)) for codec in codecs)
    return _table(("codec", *heading), cells, f"---{'|---:' * len(columns)}")


def _gap(row: dict[str, Any]) -> str:
    return f"{row['gap']:.1g}".replace("e-0", "e-")


def gap(name: str, codec: str, schedule: str, feedback: str) -> str:
    """Return one number of the table of convex(), for a place within a line. feedback: `with` or `without`."""
    wanted = (codec, schedule, feedback == "with")
    of_codec = {(row["codec"].split()[0], row["schedule"], row["feedback"]): row for row in figures(name)["rows"]}
    return _gap(of_codec[wanted])


def ratio(name: str, field: str, competitor: str, base: str) -> str:
    """Return a field of a run's competitor or codec, divided by that of another one, for a place within a line. Hyphens replace
    the spaces of their names."""
    rows: dict[str, dict[str, Any]] = {}
    for row in figures(name)["rows"]:
        rows.setdefault(row.get("competitor", row.get("codec")).partition("@")[0].replace(" ", "-"), row)
    return _number(rows[competitor][field] / rows[base][field])


def rules(*names: str) -> str:
    """Return a table of update rules, of one run or several with the same seed: ratios to the first row of all."""
    runs = [figures(name) for name in names]
    first, first_every = runs[0]["rows"][0], runs[0]["meta"]["every"]
    rows = []
    for run in runs:
        every = run["meta"]["every"]
        for row in run["rows"]:
            differs = [f"every {every} steps"] if every != first_every else []
            differs += [f"{row['world_size']} ranks"] if row["world_size"] != first["world_size"] else []
            is_beside = run is runs[0] and row is not first
            cells = (
                ", ".join([f"`{row['competitor'].partition('@')[0]}`", *differs]),
                f"{row['loss'] / first['loss']:.3f}",
                _number(row["tokens_per_s"] / first["tokens_per_s"]),
                _number(row["sent_bytes"] / first["sent_bytes"]),
                "" if not is_beside else "not reached" if row["reach_time"] is None else _number(row["reach_time"]),
            )
            rows.append(cells)
    heading = ("rule", "loss", "tokens per second", "bytes sent per rank", "time to the loss of the first row")
    return _table(heading, rows, f"---{'|---:' * 4}")


def replicas(name: str) -> str:
    """Return a table of the models of `bench replicas`: the lowest and the highest validation loss of each at the exchanges of a
    rule, over that of the common parameters after the same exchange."""
    ratios: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in figures(name)["rows"]:
        for model, losses in (("previous", [row["previous"]]), ("one", row["replicas"]), ("all", [row["average"]])):
            ratios[row["rule"]][model] += [loss / row["common"] for loss in losses]
    cells = (
        (f"`{rule}`", *(_range(of[model], "{:.3f}".format) for model in ("previous", "one", "all")))
        for rule, of in ratios.items()
    )
    heading = ("", "the last common parameters", "one rank's parameters", "the average of the ranks' parameters")
    return _table(heading, cells, "---|---:|---:|---:")


def utilization(name: str) -> str:
    """Return a table of the share of the time that ranks compute: a row for each codec and number of steps between exchanges, and
    a column for each rate; with the bytes sent until the losses after equal tokens, and these losses, over those of uncompressed
    gradients. And a line with the distance from x / (1 + x)."""
    run = figures(name)
    rows: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for row in run["rows"]:
        rows[row["codec"], row["every"]].append(row)
    trained: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for row in run["meta"]["losses"]:
        trained[row["codec"], row["every"]].append(row)
    (base,) = trained["none", 1]
    cells = []
    for (codec, every), each in rows.items():
        shares = (f"{100 * row['utilization']:.0f} %" for row in each)
        first, *others = trained[codec, every]
        of_training = (f"{first[of] / base[of]:.3f}" for of in ("sent_bytes", "loss"))
        with_outer = f"{others[0]['loss'] / base['loss']:.3f}" if others else ""
        cells.append(("none" if codec == "none" else f"`{codec}`", str(every), *shares, *of_training, with_outer))
    rates = dict.fromkeys(row["rate"].replace("mbit", " Mbit/s").replace("gbit", " Gbit/s") for row in run["rows"])
    heading = ("codec", "steps between exchanges", *rates, "bytes", "loss", "loss, `diloco`")
    xs = (row["computing_over_transfer"] for row in run["rows"])
    off = [100 * abs(row["utilization"] - x / (1 + x)) for row, x in zip(run["rows"], xs, strict=True)]
    line = f"(From x / (1 + x), the median distance is {median(off):.0f} points, the largest {max(off):.0f}.)"
    return _table(heading, cells, f"---{'|---:' * (len(heading) - 1)}") + f"\n{line}\n"


def published_utilization(name: str) -> str:
    """Return a table of published utilizations and of those that the cost model predicts."""
    run = figures(name)["meta"]["published"]
    rows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in run:
        rows[row["every"]].append(row)
    cells = (
        (
            str(every),
            *(
                f"{100 * row['published']:.3g}, {'fitted' if row['fitted'] else format(100 * row['predicted'], '.3g')}"
                for row in each
            ),
        )
        for every, each in rows.items()
    )
    rates = [f"{row['mbit']} Mbit/s" for row in next(iter(rows.values()))]
    over = [row["predicted"] / row["published"] for row in run if not row["fitted"]]
    line = f"(Predicted over published: median {median(over):.2f}, from {min(over):.2f} to {max(over):.2f}.)"
    return _table(("steps between exchanges", *rates), cells, "---:" + "|---:" * len(rates)) + f"\n{line}\n"


def _size(nbytes: int) -> str:
    text = format_size(nbytes)
    return f"{text[:-1]} {text[-1]}B"


def gpu(name: str) -> str:
    """Return the command of a run on a GPU, and its tables, each below a line that says what it shows."""
    tables = (
        ("Training steps", gpu_steps),
        ("Goals", gpu_goals),
        ("The host's time in the call of an asynchronous allreduce, as the median of 50 calls", gpu_calls),
        ("Codecs and copies on other streams than that of backward, and the share beside which it ran", gpu_overlap),
    )
    return command(name) + "".join(f"\n{title}:\n{view(name)}" for title, view in tables)


def command(name: str) -> str:
    """Return the command of a run, and what it ran on."""
    run = figures(name)
    return f"\n```\n{run['command']}\n```\n\n({_where(run['meta'])}.)\n"


def _where(meta: dict[str, Any]) -> str:
    found = (meta["device"], f"torch {meta['torch']}", meta.get("network"), f"commit {meta['commit']}")
    return ", ".join(filter(None, found))


def predictions(folder: str) -> str:
    """Return a table of the runs of `bench predicted` in a folder, a row for all runs that differ in the number of hosts or ranks
    only: how far predictions are off, 'auto' from the best, and from which size on codecs pay."""
    runs = [json.loads(path.read_text()) for path in sorted((DOCS / folder).glob("*.json"))]
    kinds: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for run in runs:
        number, _, kind = run["meta"]["title"].partition(" ")
        kinds[kind][int(number)] = run
    rows = []
    for kind, by_number in kinds.items():
        found = [[PredictedRow(**row) for row in run["rows"]] for _, run in sorted(by_number.items())]
        errors = [abs(row.predicted_s / row.seconds - 1) for row in chain(*found)]
        over, codec_over = ([ratio for each in found for _, ratio in of(each)] for of in (over_best, codec_over_best))
        twice = [ratio for each in found for ratio in measured_twice(each)]  # empty for older runs
        sizes = ([codec_pays_from(each, codec) or math.inf for each in found] for codec in CODECS)
        cells = (
            f"{100 * median(errors):.1f} %, {100 * max(errors):.0f} %",
            f"{median(over):.3f}, {max(over):.2f}",
            f"{median(codec_over):.3f}, {max(codec_over):.2f}",
            *([f"{median(twice):.3f}, {max(twice):.2f}"] if twice else []),
            *(_range(each, lambda size: "never" if size == math.inf else format_size(int(size))) for each in sizes),
            _range([run["meta"]["tuned_s"] for run in by_number.values()], "{:.1f} s".format),
        )
        rows.append((f"{_range(by_number, str)} {kind}", *cells))
    pay = (f"`{codec}` pays from" for codec in CODECS)
    again = ("measured twice",) if twice else ()
    heading = ("", "error", "algorithm over the best", "codec over the best", *again, *pay, "links measured in")
    (where,) = {_where({**run["meta"], "network": None}) for run in runs}
    return _table(heading, rows, f"---{'|---:' * (len(heading) - 1)}") + f"\n({where}.)\n"


def _range(values: Iterable[float], text: Callable[[Any], str]) -> str:
    """Return the smallest and the largest of the values as text, once if both are the same."""
    sorted_values = sorted(values)
    least, most = text(sorted_values[0]), text(sorted_values[-1])
    return least if least == most else f"{least} to {most}"


def failures(name: str) -> str:
    """Return a table of a run of `bench failures`: what each way lost by the failures."""
    run = json.loads((DOCS / f"{name}.json").read_text())
    rows = []
    for row in run["rows"]:
        if row["way"] == UNDISTURBED:
            continue
        hosts, firsts = (sum(kill[of] for kill in row["kills"]) for of in ("of_host", "of_rank_0"))
        outages = row["outages_s"]
        cells = (
            f"{len(row['kills'])}; {hosts} took down a host, {firsts} ended rank 0",
            row["hangs"],
            "" if row["goodput"] is None else f"{row['goodput']:.2f}",
            "" if row["loss_over"] is None else f"{100 * row['loss_over']:+.2f} %",
            f"{median(outages):.1f} s" if outages else "",
            f"{max(outages):.1f} s" if outages else "",
        )
        rows.append((LABELS[row["way"]], *map(str, cells)))
    heading = ("", "kills", "hangs", "goodput", "loss at the same steps", "outage, median", "worst")
    return _table(heading, rows, "---|---|---:|---:|---:|---:|---:") + f"\n({_where(run['meta'])}.)\n"


def published(name: str) -> str:
    """Return what a file of docs that `gradwire simulate --preset all -J` has written says of the errors of predictions, for a
    place within a line."""
    rows = [row for row in json.loads((DOCS / f"{name}.json").read_text())["rows"] if not row["fitted"]]
    worst = max(rows, key=lambda row: abs(row["error"]))
    error = 100 * median(abs(row["error"]) for row in rows)
    return (
        f"Of the {len(rows)} rows to which no input was fitted, the median absolute error is {error:.1f} %, and the largest"
        f" {100 * abs(worst['error']):.0f} %, at {worst['ranks']} ranks with {worst['method']}"
    )


VIEWS: dict[str, Callable[..., str]] = {
    "gains": gains,
    "steps": steps,
    "shares": shares,
    "plans": plans,
    "backends": backends,
    "private": private,
    "sizes": sizes,
    "across": across,
    "compressed": compressed,
    "codecs": codecs,
    "gpu": gpu,
    "losses": losses,
    "convex": convex,
    "gap": gap,
    "ratio": ratio,
    "rules": rules,
    "replicas": replicas,
    "utilization": utilization,
    "published_utilization": published_utilization,
    "command": command,
    "predictions": predictions,
    "failures": failures,
    "published": published,
}
