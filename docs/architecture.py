"""Draw docs/images/architecture.png: bench, trainer and collectives as three layers, and in each its main modules, with their
docstrings' first sentences. Every module may import those in rows below it, and none above.

`python docs/architecture.py` reads the rows from the import contracts in pyproject.toml and the sentences from the sources, so
the picture shows what is there. It carries a digest of what it shows, by which a test sees that it is still true.
"""

from __future__ import annotations

import ast
import hashlib
import textwrap
from collections.abc import Iterator
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

ROOT = Path(__file__).parents[1]
IMAGE = ROOT / "docs" / "images" / "architecture.png"
LINE = "#94a3b8"
FILLS = {"bench": "#fef3c7", "trainer": "#dcfce7", "collectives": "#dbeafe"}
PURPOSES = {
    "bench": "measures both",
    "trainer": "what is exchanged in training, and when",
    "collectives": "moves tensors between ranks; knows nothing of training",
}
#: Modules that only help others.
HELPERS = {
    *("arguments", "daemon_thread", "environment", "errors", "forks", "optimizers"),
    *("parsing", "precompile", "reduction", "thread_priority", "torch_internals"),
}
#: The width of the picture, of the names of the layers, and of the name of a module beside its sentence; letters in a unit of it.
WIDTH, LABEL, BESIDE, LETTERS = 15.0, 2.6, 1.8, 11.3
#: The height of a line of text; above and below a box comes half a gap.
TEXT, GAP = 0.22, 0.12


def rows() -> Iterator[tuple[str, list[str]]]:
    """Yield the package and the modules of each row, the highest first."""
    try:
        import tomllib
    except ImportError:  # Python 3.10
        import tomli as tomllib  # type: ignore[no-redef]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    yield "bench", ["bench"]
    for package in ("trainer", "collectives"):
        inside = next(contract for contract in contracts if contract.get("containers") == [f"gradwire.{package}"])
        for layer in inside["layers"]:
            names = [name.strip() for name in layer.split("|")]
            if wanted := [name for name in names if name not in HELPERS and name != "__main__"]:
                yield package, wanted


def sentence_of(package: str, module: str) -> str:
    """Return the first sentence of a module's docstring."""
    path = ROOT / package if module == package else ROOT / package / module
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(source.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split()).split(". ")[0].rstrip(".").replace("`", "")


def digest() -> str:
    """Return what stands for all that the picture shows."""
    shown = [(package, module, sentence_of(package, module)) for package, row in rows() for module in row]
    return hashlib.sha256(repr([list(rows()), shown, PURPOSES]).encode()).hexdigest()


def lines_of(package: str, module: str, width: float, *, is_alone: bool) -> list[str]:
    """Return the lines of text in a module's box: its sentence, below its name unless it is alone in its row."""
    room = width - BESIDE if is_alone else width
    return [*([] if is_alone else [""]), *textwrap.wrap(sentence_of(package, module), int(LETTERS * room))]


def main() -> None:
    drawn = []
    for package, row in rows():
        share = (WIDTH - LABEL) / len(row)
        drawn.append((package, row, share, [lines_of(package, name, share, is_alone=len(row) == 1) for name in row]))
    whole = sum(TEXT * (1 + max(map(len, texts))) + GAP for _, _, _, texts in drawn) + 2 * GAP * len(FILLS)
    figure, axes = plt.subplots(figsize=(12, 0.75 * whole))
    top = 0.0
    for package, color in FILLS.items():
        began, top = top, top - GAP
        for owner, row, share, texts in drawn:
            if owner == package:
                height = TEXT * (1 + max(map(len, texts)))
                for place, (module, lines) in enumerate(zip(row, texts, strict=True)):
                    name = "" if module == package else module
                    draw_box(axes, name, lines, (LABEL + place * share, top - height), (share - GAP, height))
                top -= height + GAP
        band = "round,pad=0,rounding_size=0.1"
        axes.add_patch(
            FancyBboxPatch((0.1, top), WIDTH - 0.1, began - top, band, facecolor=color, edgecolor=LINE, zorder=1)
        )
        axes.text(0.25, began - 0.25, package, fontsize=13, weight="bold", va="center")
        axes.text(0.25, began - 0.42, textwrap.fill(PURPOSES[package], 24), fontsize=8.5, va="top")
        top -= GAP
    axes.set_xlim(0, WIDTH + 0.1)
    axes.set_ylim(top, 0.05)
    axes.axis("off")
    figure.subplots_adjust(0, 0, 1, 1)
    figure.savefig(IMAGE, dpi=110, metadata={"Description": digest(), "Software": None})
    plt.close(figure)


def draw_box(axes: Axes, module: str, lines: list[str], corner: tuple[float, float], size: tuple[float, float]) -> None:
    """Draw a module's name and the lines of its sentence in its box; an empty first line leaves room for the name."""
    (left, bottom), (width, height) = corner, size
    axes.add_patch(
        FancyBboxPatch((left, bottom), width, height, "square,pad=0", facecolor="white", edgecolor=LINE, zorder=2)
    )
    first = bottom + height - TEXT
    axes.text(left + 0.1, first, module, fontsize=9.5, weight="bold", va="center", zorder=3)
    for number, line in enumerate(lines):
        beside = 0.1 if not module or not lines[0] else BESIDE
        axes.text(left + beside, first - TEXT * number, line, fontsize=8.5, va="center", zorder=3)


if __name__ == "__main__":
    main()
