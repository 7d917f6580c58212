"""Time and bus bandwidth over size, one line per algorithm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.sizes import format_size
from bench.table import Row

AUTO, NATIVE = "#d1495b", "#222222"
OTHERS = ("#2e86ab", "#e09f3e", "#5b8e7d", "#8e6c8a", "#7a9cc6", "#a26769", "#9aa15c")
GRID = "#e4e4e4"
QUIET = "#666666"


def label(row: Row, rows: Sequence[Row]) -> str:
    """The algorithm, with what else tells it from the other lines."""
    several_dtypes = len({other.dtype for other in rows}) > 1
    several_ops = len({other.op for other in rows}) > 1
    return " ".join([row.algorithm, *([row.dtype] if several_dtypes else []), *([row.op] if several_ops else [])])


def _style(algorithm: str, index: int) -> dict[str, Any]:
    if algorithm == "auto":
        return {"color": AUTO, "linewidth": 2.6, "marker": "o", "markersize": 4.5, "zorder": 4}
    if algorithm == "native":
        return {
            "color": NATIVE,
            "linewidth": 1.8,
            "marker": "s",
            "markersize": 3.5,
            "linestyle": (0, (4, 2)),
            "zorder": 5,
        }
    return {"color": OTHERS[index % len(OTHERS)], "linewidth": 1.2, "marker": ".", "markersize": 4, "zorder": 3}


def draw(rows: Sequence[Row], meta: Mapping[str, Any], path: Path) -> None:
    """Write a PNG. Rows of one collective.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; the message says what to install.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("--plot needs matplotlib: pip install 'gradwire[bench]'") from error

    figure = Figure(figsize=(10.5, 4.6), dpi=160)
    panels = figure.subplots(1, 2)
    lines: dict[str, list[Row]] = {}
    for row in rows:
        lines.setdefault(label(row, rows), []).append(row)
    for index, (name, line) in enumerate(lines.items()):
        sizes = [row.bytes for row in line]
        style = _style(line[0].algorithm, index)
        native = f"{name} ({meta['backend']})" if line[0].algorithm == "native" else name
        panels[0].plot(sizes, [row.time_us for row in line], label=native, **style)
        panels[1].plot(sizes, [row.busbw_GBps for row in line], **style)

    panels[0].set_title("time, lower is better", loc="left", fontsize=10, color=QUIET)
    panels[1].set_title("bus bandwidth, higher is better", loc="left", fontsize=10, color=QUIET)
    panels[0].yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: _with_unit(value, (("us", 1), ("ms", 1e3), ("s", 1e6))))
    )
    panels[1].yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: _with_unit(value * 1e9, (("kB/s", 1e3), ("MB/s", 1e6), ("GB/s", 1e9))))
    )
    for panel in panels:
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", nonpositive="mask")
        panel.xaxis.set_major_locator(LogLocator(base=2, numticks=9))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_size(round(size)) if size >= 1 else ""))
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.yaxis.set_minor_formatter(NullFormatter())
        panel.set_xlabel("size (bytes, 1K = 1024)", fontsize=9, color=QUIET)
        panel.grid(True, which="major", color=GRID, linewidth=0.8)
        panel.tick_params(which="both", labelsize=9, color=GRID, labelcolor="#333333")
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            panel.spines[side].set_color("#bbbbbb")
    figure.suptitle(title(rows, meta), x=0.012, ha="left", fontsize=12.5, fontweight="bold")
    figure.text(0.012, 0.905, subtitle(rows, meta), fontsize=9, color=QUIET)
    figure.legend(loc="lower center", ncols=min(len(lines), 8), frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.06, 1, 0.91))
    figure.savefig(path)


def _with_unit(value: float, units: Sequence[tuple[str, float]]) -> str:
    name, scale = next(((name, scale) for name, scale in reversed(units) if value >= scale), units[0])
    return f"{value / scale:g} {name}"


def title(rows: Sequence[Row], meta: Mapping[str, Any]) -> str:
    hosts = len(meta["hosts"])
    where = f"{hosts} hosts" if hosts > 1 else "one host"
    return f"{rows[0].collective}, {rows[0].world_size} ranks on {where}"


def subtitle(rows: Sequence[Row], meta: Mapping[str, Any]) -> str:
    dtypes, ops = {row.dtype for row in rows}, {row.op for row in rows}
    what = [" ".join(group) for group in (dtypes, ops - {"none"}) if len(group) == 1 and group != {"none"}]
    network = [meta["network"]] if meta["network"] else []
    return " · ".join([*what, *network, meta["device"], f"median of {meta['iters']} interleaved turns, slowest rank"])
