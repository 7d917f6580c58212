"""The results of `bench shares`: a table, and a picture of the samples per second over the share of the slow rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.bench.timing import format_interval

MEASURED, EQUAL, DDP, ALONE = "BatchShares", "equal", "ddp", "alone"


@dataclass(frozen=True)
class ShareRow:
    """Holds the result of a division of the global batch.

    parts: the samples of each rank, of BatchShares after its warm-up. parts_at_end: the same after the last turn. of_alone: the
    samples per second, divided by the sum of those of ranks that exchange nothing, with its 95 % interval.
    """

    competitor: str
    parts: list[int]
    parts_at_end: list[int]
    slow_rank: int
    step_ms: float
    samples_per_s: float
    of_alone: float
    interval: tuple[float, float] | None
    replicas_identical: bool

    @property
    def share(self) -> float:
        """Return the share of the slow rank."""
        return self.parts[self.slow_rank] / sum(self.parts)


def format_table(rows: Sequence[ShareRow], meta: Mapping[str, Any]) -> list[str]:
    """Return the lines of a table of the results."""
    return [
        f"# {meta['device']}, torch {meta['torch']}, {meta['network'] or 'one host'}, {meta['backend']}",
        f"# bytes_gpt: {meta['parameters'] / 1e6:.2f} M parameters, context {meta['context']}; {meta['slow']}",
        f"# {meta['rounds']} turns of {meta['steps']} steps each: {meta['time']}",
        f"# {'':12} {'samples of each rank':>22}  step (ms)  samples/s  of alone",
        *(
            f"  {row.competitor:12} {' + '.join(map(str, row.parts)):>22} {row.step_ms:10.1f} {row.samples_per_s:10.1f}"
            f" {row.of_alone:9.2f}  {format_interval(row.interval)}".rstrip()
            + ("" if row.replicas_identical else "  replicas differ")
            for row in rows
        ),
    ]


def draw(rows: Sequence[ShareRow], meta: Mapping[str, Any], path: Path) -> None:
    """Draw the samples per second of each division over the share of the slow rank."""
    from gradwire.bench.plots import DASHED, INK, OTHERS, OURS, REFERENCE, dress, page, save

    title = f"bytes_gpt, {meta['world_size']} ranks, {meta['slow']}"
    figure = page(title + (f"\n{meta['network']}" if meta["network"] else ""), 6.4, 3.8)
    panel = figure.subplots()
    of = {row.competitor: row for row in rows}
    fixed = sorted((row.share, row.samples_per_s) for row in rows if row.competitor not in (MEASURED, DDP, ALONE))
    panel.plot(*zip(*fixed, strict=True), color=OTHERS[0], marker=".", linewidth=1.6)
    panel.axhline(of[ALONE].samples_per_s, color=REFERENCE, linestyle=DASHED, linewidth=1)
    named = ((MEASURED, OURS, "o"), (DDP, OTHERS[1], "s"))
    for name, color, marker in named:
        panel.plot([of[name].share], [of[name].samples_per_s], color=color, marker=marker, markersize=7)
    labels = {
        MEASURED: ("BatchShares", (-7, -3), "right"),  # below the line of ALONE, which it nearly reaches
        DDP: ("DDP", (6, 6), "left"),
        ALONE: ("sum of the ranks without an exchange", (6, 6), "left"),
    }
    for name, (label, offset, side) in labels.items():
        place = (0 if name == ALONE else of[name].share, of[name].samples_per_s)
        panel.annotate(label, place, offset, textcoords="offset points", ha=side, fontsize=8, color=INK)
    dress(panel, "share of the slow rank", "samples per second")
    panel.set_xlim(0, max(share for share, _ in fixed) * 1.15)
    panel.set_ylim(0, of[ALONE].samples_per_s * 1.15)
    save(figure, path)
