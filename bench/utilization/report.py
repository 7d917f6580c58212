"""The rows of `bench utilization`, their text, and a picture of the utilization."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class UtilizationRow:
    """The result for a codec, a number of steps between exchanges, and a rate. Field names are the keys of the JSON.

    step_ms: a step without an exchange. exchange_ms: what an exchange adds to the steps before it. bytes_per_exchange: of the
    rank that sends most. transfer_ms: the time of these bytes at the rate of the link. computing_over_transfer: the time of
    `every` steps without an exchange, divided by the transfer time. utilization: the time of steps without an exchange, divided
    by that with them, as the median over the pairs of turns.
    """

    codec: str
    every: int
    rate: str
    step_ms: float
    exchange_ms: float
    transfer_ms: float
    bytes_per_exchange: int
    computing_over_transfer: float
    utilization: float
    replicas_identical: bool


@dataclass(frozen=True)
class LossRow:
    """The loss on text not trained on after equal tokens. rule: as in `bench rules`. sent_bytes: of a rank, in the whole run."""

    codec: str
    every: int
    rule: str
    loss: float
    sent_bytes: float
    replicas_identical: bool


@dataclass(frozen=True)
class PublishedRow:
    """A published utilization, and the predicted one. fitted: whether an input of the prediction was chosen to match."""

    mbit: int
    every: int
    published: float
    predicted: float
    computing_over_transfer: float
    fitted: bool


def format_table(rows: Sequence[UtilizationRow], losses: Sequence[LossRow], meta: Mapping[str, Any]) -> list[str]:
    """Return the lines of a table of the results."""
    return [
        f"# {meta['device']}, torch {meta['torch']}, {meta['network']}",
        f"# bytes_gpt: {meta['parameters'] / 1e6:.2f} M parameters, context {meta['context']}, batch {meta['batch']} a rank",
        f"# {meta['rounds']} turns: {meta['time']}",
        "# codec      every      rate  step (ms)  exchange (ms)  transfer (ms)  sent (MB)  utilization",
        *(
            f"  {row.codec:10} {row.every:5} {row.rate:>9} {row.step_ms:10.1f} {row.exchange_ms:14.1f} {row.transfer_ms:14.1f}"
            f" {row.bytes_per_exchange / 1e6:10.3f} {row.utilization:12.1%}"
            for row in rows
        ),
        f"# codec      every  rule             loss  sent (MB), of {meta['loss_steps']} steps",
        *(
            f"  {row.codec:10} {row.every:5}  {row.rule:12} {row.loss:8.4f} {row.sent_bytes / 1e6:10.3f}"
            for row in losses
        ),
    ]


def draw(rows: Sequence[UtilizationRow], meta: Mapping[str, Any], path: Path) -> None:
    """Draw the utilization over the computing time between exchanges, divided by the transfer time; beside what others have
    published, and the curve of exchanges that take just the transfer time."""
    import numpy as np

    from gradwire.bench.plots import DASHED, OTHERS, OURS, QUIET, REFERENCE, dress, legend, page, save

    published = [PublishedRow(**row) for row in meta["published"]]
    figure = page(f"bytes_gpt, {meta['parameters'] / 1e6:.2f} M parameters, {meta['network'].split(' (')[0]}", 7.2, 4.2)
    panel = figure.subplots()
    axis = np.geomspace(5e-4, max(row.computing_over_transfer for row in rows), 200)
    panel.plot(axis, axis / (1 + axis), color=REFERENCE, linestyle=DASHED, linewidth=1, label="x / (1 + x)")
    colors = dict(zip(dict.fromkeys(row.codec for row in rows), (OURS, *OTHERS), strict=False))
    for codec, color in colors.items():
        points = [(row.computing_over_transfer, row.utilization) for row in rows if row.codec == codec]
        label = "uncompressed" if codec == "none" else codec
        panel.plot(*zip(*points, strict=True), color=color, marker="o", markersize=5, linestyle="", label=label)
    points = [(row.computing_over_transfer, row.published) for row in published]
    label = "published, x by the cost model"
    panel.plot(*zip(*points, strict=True), color=QUIET, marker="x", markersize=5, linestyle="", label=label)
    dress(
        panel,
        "x: time of the steps between exchanges / transfer time",
        "share of the time that ranks compute",
        x_log=10,
    )
    panel.set_ylim(0, 1.1)
    legend(figure, panel, 3)
    save(figure, path)
