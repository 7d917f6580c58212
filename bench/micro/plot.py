"""Draws time and bus bandwidth over size, one line per algorithm. With only "auto" and peers, a band reaches from the
median time to the 99th percentile."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator

from gradwire.bench.micro.table import Row
from gradwire.bench.plots import DASHED, OTHERS, OURS, REFERENCE, dress, legend, page, save
from gradwire.collectives.parsing import format_size

STYLES: dict[str, dict[str, Any]] = {
    # Broad and pale, because the line of the algorithm that 'auto' has chosen lies on it.
    "auto": {"color": OURS, "linewidth": 7, "alpha": 0.35, "solid_capstyle": "round", "zorder": 3},
    "native": {
        "color": REFERENCE,
        "linewidth": 1.8,
        "linestyle": DASHED,
        "marker": "s",
        "markersize": 3.5,
        "zorder": 6,
    },
    "torch": {"color": "#777777", "linewidth": 1.8, "linestyle": (0, (1, 1.2)), "zorder": 6},
    "mpi": {"color": OTHERS[0], "linewidth": 1.8, "linestyle": DASHED, "zorder": 6},
}
#: The style of "auto" if no line of the algorithm that it has chosen lies on it.
ALONE: dict[str, Any] = {"color": OURS, "linewidth": 2.2, "zorder": 7}
TIME_UNITS = (("us", 1.0), ("ms", 1e3), ("s", 1e6))
BANDWIDTH_UNITS = (("kB/s", 1e-6), ("MB/s", 1e-3), ("GB/s", 1.0))


def with_unit(value: float, units: Sequence[tuple[str, float]]) -> str:
    """Return the text of a value in the largest unit in which it is at least 1."""
    name, scale = next(((name, scale) for name, scale in reversed(units) if value >= scale * 0.999), units[0])
    return f"{value / scale:g} {name}"


def line_name(row: Row, rows: Sequence[Row], backend: str) -> str:
    """Return the name of a line: the algorithm or codec, then dtype and op if they differ between rows."""
    peers = {"native": f"native ({backend})", "torch": f"torch.distributed ({backend})", "mpi": "Open MPI"}
    name = peers.get(row.algorithm, row.algorithm)
    dtype = [row.dtype] if len({other.dtype for other in rows}) > 1 else []
    op = [row.op] if len({other.op for other in rows}) > 1 else []
    return " ".join([name if row.codec == "none" else row.codec, *dtype, *op])


def title(rows: Sequence[Row], meta: Mapping[str, Any]) -> str:
    hosts = len(meta["hosts"])
    return f"{rows[0].collective}, {rows[0].world_size} ranks on {f'{hosts} hosts' if hosts > 1 else 'one host'}"


def subtitle(rows: Sequence[Row], meta: Mapping[str, Any]) -> str:
    dtypes, ops = {row.dtype for row in rows}, {row.op for row in rows}
    single = [name for group in (dtypes, ops - {"none"}) if len(group) == 1 for name in group]
    network = [meta["network"]] if meta["network"] else []
    return " · ".join([*single, *network, meta["device"], f"median of {meta['iters']} interleaved turns"])


def draw(rows: Sequence[Row], meta: Mapping[str, Any], path: Path) -> None:
    """Write a PNG of the rows of one collective: of the calls in place, if there are such."""
    rows = [row for row in rows if row.place == rows[-1].place]
    lines: dict[str, list[Row]] = {}
    for row in rows:
        lines.setdefault(line_name(row, rows, meta["backend"]), []).append(row)
    figure = page(f"{title(rows, meta)}\n{subtitle(rows, meta)}", 10.5, 5)
    time_panel, bandwidth_panel = figure.subplots(1, 2)
    alone = {row.algorithm for row in rows} <= STYLES.keys() and all(row.codec == "none" for row in rows)
    unlike = itertools.product(("-", (0, (3, 1.5)), (0, (1, 1))), OTHERS)
    for name, line in lines.items():
        known = STYLES.get(line[0].algorithm) if line[0].codec == "none" else None
        if known is None:
            linestyle, color = next(unlike)
            known = {"color": color, "linestyle": linestyle, "linewidth": 1.3, "marker": ".", "zorder": 4}
        elif alone and line[0].algorithm == "auto":
            known = ALONE
        sizes = [row.bytes for row in line]
        time_panel.plot(sizes, [row.time_us for row in line], label=name, **known)
        bandwidth_panel.plot(sizes, [row.busbw_GBps for row in line], **known)
        if alone:
            times, slow = ([getattr(row, key) for row in line] for key in ("time_us", "p99_us"))
            time_panel.fill_between(sizes, times, slow, color=known["color"], alpha=0.15, linewidth=0)

    sizes = sorted({row.bytes for row in rows})
    bands = "; bands: to the 99th percentile" if alone else ""
    dress(time_panel, "bytes of the tensor, 1K = 1024", f"time{bands}", x_log=2, y_log=10)
    dress(bandwidth_panel, "bytes of the tensor, 1K = 1024", "bus bandwidth", x_log=2, y_log=10)
    for panel, units in ((time_panel, TIME_UNITS), (bandwidth_panel, BANDWIDTH_UNITS)):
        panel.set_yscale("log", nonpositive="mask")
        panel.xaxis.set_major_locator(FixedLocator(sizes[:: -(-len(sizes) // 9)]))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_size(round(size))))
        low, high = panel.get_ylim()
        panel.yaxis.set_major_locator(LogLocator(subs=(1,) if high / low > 300 else (1, 2, 5), numticks=20))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _, units=units: with_unit(value, units)))
    legend(figure, time_panel, 5)
    save(figure, path)
