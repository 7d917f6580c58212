"""Draw the pictures of measurements from the runs in docs/figures/, as the benchmarks' own --plot does.

Each picture carries a digest of its run, by which a test sees that it shows it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from gradwire.bench.codec import plot as codec_plot
from gradwire.bench.codec.turns import CodecRow
from gradwire.bench.micro import plot as micro_plot
from gradwire.bench.micro.table import Row
from gradwire.bench.training import convex_report, rules_report, shares_report
from gradwire.bench.training.convex_report import ConvexRow
from gradwire.bench.training.rules_report import RuleRow
from gradwire.bench.training.shares_report import ShareRow
from gradwire.bench.utilization import report as utilization_report
from gradwire.bench.utilization.report import UtilizationRow

DOCS = Path(__file__).parent


def digest_of(*sources: Path) -> str:
    """Return what stands for the runs in these files."""
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


def sign(picture: Path, digest: str) -> None:
    """Write into a picture which runs it shows."""
    said = PngInfo()
    said.add_text("Description", digest)
    with Image.open(picture) as drawn:
        drawn.save(picture, pnginfo=said)


class Picture(NamedTuple):
    """A picture in docs/images/, the run that it shows, what its rows are, and what draws them."""

    name: str
    run: str
    row: Callable[..., Any]
    draw: Callable[..., None]

    @property
    def path(self) -> Path:
        return DOCS / "images" / f"{self.name}.png"

    @property
    def source(self) -> Path:
        return DOCS / "figures" / f"{self.run}.json"

    def digest(self) -> str:
        return digest_of(self.source)

    def write(self) -> None:
        run = json.loads(self.source.read_text())
        self.draw([self.row(**row) for row in run["rows"]], run["meta"], self.path)
        sign(self.path, self.digest())


def pictures() -> Iterator[Picture]:
    """Yield all pictures."""
    yield Picture("hosts", "allreduce-8-ranks-1gbit", Row, micro_plot.draw)
    yield Picture("shared-memory", "peers-2-shared", Row, micro_plot.draw)
    yield Picture("codecs", "codecs", CodecRow, codec_plot.draw)
    yield Picture("convex", "convex", ConvexRow, convex_report.draw)
    for name in ("rules-slow-link", "rules-gigabit", "rules-slow-rank"):
        yield Picture(name, name, RuleRow, rules_report.draw)
    yield Picture("shares", "shares-one-host", ShareRow, shares_report.draw)
    yield Picture("utilization", "utilization", UtilizationRow, utilization_report.draw)


if __name__ == "__main__":
    for picture in pictures():
        picture.write()
