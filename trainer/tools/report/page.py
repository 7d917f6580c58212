"""The page of a report: one HTML file that needs no other file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from string import Template

import numpy as np

from gradwire import __version__
from gradwire.collectives.errors import ranks_text
from gradwire.trainer.launcher.output import ending
from gradwire.trainer.tools.report.charts import over_steps, who_was_late
from gradwire.trainer.tools.report.measured import Measurements, Operation, OptimizerSteps

#: Operations with less than this share of the time of all operations are not shown.
_SHOWN_SHARE = 0.005


def page(
    command: str, facts: Iterable[str], exit_code: int, cause: str, last_lines: str, measured: Measurements
) -> str:
    """Return the page. facts: texts about the whole run. exit_code: of the command, negative for a signal. cause,
    last_lines: the error that a failed command printed, and the end of its stderr."""
    content = [_failure(exit_code, cause, last_lines)] if exit_code else []
    if measured.trainings:
        content.append(_cards(measured))
    for training in measured.trainings:
        of = _which(training, measured)
        content += [_steps(training, of), _stragglers(training, of), _bytes(training, of)]
    if not measured.trainings:
        said = "No step was measured. Steps are those of gradwire.DistributedOptimizer."
        content.append(_section("Steps", f"<p>{said}</p>"))
    content += [_operations(measured.operations), _ranks(measured)]
    versions = dict.fromkeys(version for process in measured.processes.values() for version in process["versions"])
    text = Template(files(__package__).joinpath("page.html").read_text())
    return text.substitute(
        command=escape(command),
        facts=" · ".join(map(escape, [*facts, *versions])),
        content="\n".join(content),
        version=escape(__version__),
    )


def _failure(exit_code: int, cause: str, last_lines: str) -> str:
    said = f"<p><strong>{escape(cause)}</strong></p>" if cause else ""
    return (
        f'<section class="failed"><h2>The command {escape(ending(exit_code))}</h2>{said}'
        f"<p>The last lines of its stderr:</p><pre>{escape(last_lines)}</pre></section>"
    )


def _cards(measured: Measurements) -> str:
    longest = max(measured.trainings, key=lambda training: training.steps)
    hosts = {process["host"] for process in measured.processes.values()}
    shown = {
        "ranks" if measured.size != 1 else "rank": f"{measured.size}",
        "hosts" if len(hosts) != 1 else "host": f"{len(hosts)}",
        f"steps{_which(longest, measured)}": f"{longest.steps:,}",
        "median step": _time(float(np.nanmedian(longest.seconds))),
        "of all time waiting": f"{_wait_share(longest):.1%}",
        "sent by each rank per step": _size(float(np.nanmean(longest.bytes_sent))),
    }
    return f'<div class="cards">{"".join(f"<div><b>{value}</b><span>{name}</span></div>" for name, value in shown.items())}</div>'


def _which(training: OptimizerSteps, measured: Measurements) -> str:
    """Return the optimizer and the generation of a training as text, as far as there are several."""
    several = any(each.number > 1 for each in measured.trainings)
    optimizer = f" of optimizer {training.number}" if several else ""
    generations = {each.generation for each in measured.trainings}
    return optimizer + (f" in generation {training.generation}" if len(generations) > 1 else "")


def _steps(training: OptimizerSteps, of: str) -> str:
    rows = []
    for name, values in (("step", training.seconds), ("of it waiting", training.seconds_waited)):
        quantiles = np.nanpercentile(values, (5, 50, 90, 99, 100)).tolist()
        rows.append([name, *map(_time, quantiles), _time(float(np.nansum(values)) / len(training.ranks))])
    total = _table(["", "5 %", "median", "90 %", "99 %", "longest", "in all"], rows)
    first = training.steps - training.seconds.shape[1] + 1
    said = (
        f"<p>From step {first} on, ranks waited for the exchange of gradients during {_wait_share(training):.1%} of the time. "
        "The exchange runs during backward(), so only its end is a wait.</p>"
    )
    legend = (
        '<p class="quiet">Milliseconds of each step:<i class="median"></i>median<i class="band"></i>10th to 90th percentile'
        '<i class="wait"></i>waiting for other ranks. Steps that took much longer are cut off at the top.</p>'
    )
    return _section(f"Steps{of}", said, legend, over_steps(first, training.seconds, training.seconds_waited), total)


def _stragglers(training: OptimizerSteps, of: str) -> str:
    found = training.stragglers
    if found is None:
        return _section(
            f"Stragglers{of}", "<p>No data: this needs at least two exchanges of gradients on several ranks.</p>"
        )
    slowest = training.ranks[found.slowest]
    others = "The other rank" if len(training.ranks) == 2 else "The others"
    said = (
        f"<p>No rank is much slower than another. Per step, on average in {found.steps:,} exchanges, the wait for rank {slowest} "
        f"was {_time(found.cost_s[found.slowest])}, the longest, and that for the next rank {_time(found.next_cost_s)}.</p>"
        if not found.is_clear
        else f"<p>{others} waited longest for <b>rank {slowest}</b>: in {found.steps:,} exchanges, on average "
        f"{_time(found.cost_s[found.slowest])} per step ({found.share:.1%} of the mean step of {_time(found.step_s)}), and at "
        f"most {_time(found.worst_s[found.slowest])}.</p>"
    )
    rows = [
        [str(rank), _time(found.cost_s[i]), _time(found.worst_s[i]), f"{found.cost_s[i] / found.step_s:.1%}"]
        for i, rank in enumerate(training.ranks)
    ]
    legend = '<p class="quiet">One row per rank, first exchange to last:<i class="late"></i>began the exchange late</p>'
    table = _table(["rank", "delayed others, mean", "most", "share of a step"], rows)
    return _section(f"Stragglers{of}", said, legend, who_was_late(training.late_s, training.ranks), table)


def _bytes(training: OptimizerSteps, of: str) -> str:
    sent, whole = float(np.nansum(training.bytes_sent)), float(np.nansum(training.bytes_uncompressed))
    fewer = (
        "nothing to send"
        if not sent
        else "uncompressed"
        if sent == whole
        else f"{whole / sent:.2f} times fewer bytes than the {_size(whole)} of uncompressed gradients"
    )
    per_step = _size(float(np.nanmean(training.bytes_sent)))
    said = (
        f"<p>Each rank sent <b>{per_step}</b> per step, all ranks together <b>{_size(sent)}</b> in all steps: {fewer}.</p>"
        '<p class="quiet">The numbers are calculated from the plans of the exchanges. With several hosts, they count the bytes '
        "between hosts; with one host, the bytes between its ranks, which use shared memory.</p>"
    )
    return _section(f"Bytes on the wire{of}", said)


def _operations(operations: Sequence[Operation]) -> str:
    if not operations:
        return _section("Operations", "<p>No operation was measured: no rank made a Communicator.</p>")
    total = sum(each.most_seconds for each in operations)
    shown = [each for each in operations if each.most_seconds >= _SHOWN_SHARE * total]
    rows = []
    for each in shown:
        called = [each.verb, each.algorithm or "-", each.codec, each.link or "-", f"{each.calls:,}"]
        took = [_size(each.nbytes / each.calls), _time(each.seconds), _time(each.most_seconds)]
        rates = (each.rate * each.on_bus, each.best * each.on_bus)
        rows.append([*called, *took, *(f"{_size(rate)}/s" if each.nbytes else "-" for rate in rates)])
    head = ["operation", "algorithm", "codec", "link", "calls", "message", "least total", "most total", "busbw", "best"]
    said = (
        "<p>least total: the time of all calls on the rank with the shortest time, for which the others waited. most total: "
        "that of the rank that waited longest. busbw: uncoded bytes per second on the rank with the most, as in nccl-tests. "
        f"best: busbw of the fastest call. {len(operations) - len(shown)} kinds with less than {_SHOWN_SHARE:.1%} of the "
        "time are not shown.</p>"
    )
    return _section("Operations", said, _table(head, rows, texts=4))


def _ranks(measured: Measurements) -> str:
    rows = [
        [str(rank), each["host"], each["device"], str(each["threads"]), "; ".join(each["routes"]) or "-"]
        for rank, each in measured.processes.items()
    ]
    missing = sorted(set(range(measured.size)) - set(measured.processes))
    said = (
        f"<p>{ranks_text(missing).capitalize()} wrote no data. Other hosts must share the folder of the report.</p>"
        if missing
        else ""
    )
    head = ["rank", "host", "device", "threads", "links"]
    return _section("Ranks, hosts and links", said, _table(head, rows, texts=5)) if rows else ""


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """Return a table whose first `texts` columns are text, and whose others are numbers."""

    def row(cells: Sequence[str], tag: str) -> str:
        kinds = [' class="text"' if i < texts else "" for i in range(len(cells))]
        return f"<tr>{''.join(f'<{tag}{kind}>{escape(cell)}</{tag}>' for kind, cell in zip(kinds, cells, strict=True))}</tr>"

    return f'<div class="wide"><table>{row(head, "th")}{"".join(row(cells, "td") for cells in rows)}</table></div>'


def _wait_share(training: OptimizerSteps) -> float:
    return float(np.nansum(training.seconds_waited) / np.nansum(training.seconds))


def _time(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:.{0 if seconds >= 0.1 else 2}f} ms"


def _size(nbytes: float) -> str:
    unit, name = next(
        (10**power, name)
        for power, name in ((9, "GB"), (6, "MB"), (3, "kB"), (0, "B"))
        if nbytes >= 10**power or not power
    )
    return f"{nbytes / unit:.{0 if unit == 1 else 2}f} {name}"
