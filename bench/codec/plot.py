"""Draws the rates of the codecs, ours and torch's, in one panel per operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradwire.bench.codec.turns import OPERATIONS, CodecRow
from gradwire.bench.plots import FRAME, INK, OURS, QUIET, REFERENCE, dress, legend, page, save

TITLES = {
    "encode": "encode",
    "encode_ef": "encode with error feedback",
    "decode": "decode",
    "decode_add": "decode and add",
}


def draw(rows: Sequence[CodecRow], meta: Mapping[str, Any], path: Path) -> None:
    """Write a PNG of the rates."""
    names = list(dict.fromkeys(row.codec for row in rows))
    title = (
        f"Codecs on {meta['where']}\n{4 * meta['elements'] / 1e6:.0f} MB of gaussian float32 · {meta['device']} · median of"
        f" {meta['iters']} interleaved turns · 2.0x: torch takes twice as long"
    )
    figure = page(title, 13, 2.2 + 0.31 * len(names))
    panels = figure.subplots(1, len(OPERATIONS), sharey=True)
    for panel, operation in zip(panels, OPERATIONS, strict=True):
        ours = {row.codec: row for row in rows if row.operation == operation}
        places = [len(names) - 1 - names.index(name) for name in ours]
        rates = [row.rate_GBps for row in ours.values()]
        torchs = [row.rate_GBps / row.torch_over_ours for row in ours.values()]
        panel.hlines(places, torchs, rates, color=FRAME, linewidth=1.6, zorder=2)
        panel.plot(rates, places, "o", color=OURS, markersize=6, zorder=4, label="gradwire")
        panel.plot(torchs, places, "s", color=REFERENCE, markersize=4.5, zorder=3, label="torch")
        panel.axvline(meta["copy_GBps"], color=QUIET, linestyle=(0, (1, 1.2)), linewidth=1.4, zorder=1, label="a copy")
        dress(panel, "GB/s of float32", x_log=10)
        low, high = panel.get_xlim()
        panel.set_xlim(low / 1.2, high * (high / low) ** 0.15)  # room for the ratios
        for place, row in zip(places, ours.values(), strict=True):
            panel.text(
                1, place, f"{row.torch_over_ours:.1f}x", transform=panel.get_yaxis_transform(), ha="right", va="center",
                fontsize=8.5, color=INK,
            )  # fmt: skip
        panel.set_title(TITLES[operation], loc="left", fontsize=10, color=QUIET)
        panel.set_yticks(range(len(names)), reversed(names))
        panel.grid(False, axis="y")
        panel.tick_params(axis="y", length=0)
        panel.spines["left"].set_visible(False)
    legend(figure, panels[0], 3)
    save(figure, path)
