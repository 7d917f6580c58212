"""Draw docs/images/architecture.png: the modules of each package, a box for each with its docstring's first sentence. An arrow
says that one imports the other; it is left out where others lead the same way. On the left are bench and trainer, which import
what is on the right, collectives.

`python docs/architecture.py` reads the layers from the import contracts in pyproject.toml and the imports from the sources, so
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
from matplotlib.patches import FancyArrowPatch, Rectangle

ROOT = Path(__file__).parents[1]
IMAGE = ROOT / "docs" / "images" / "architecture.png"
LINE = "#94a3b8"
THIN = {"arrowstyle": "-|>", "mutation_scale": 7, "color": LINE, "linewidth": 0.8}
FILLS = {"bench": "#fef3c7", "trainer": "#dcfce7", "collectives": "#dbeafe"}
WIDTH, MARGIN = 7.4, 1.3
#: Of a box: the height of its name with the margins, and of a line of its sentence; below it comes a gap.
NAME, SENTENCE, GAP = 0.42, 0.2, 0.26
#: How many letters of a sentence fit in a unit of width, and of a name.
LETTERS, LETTERS_OF_NAME = 13.5, 11


def layers() -> Iterator[tuple[str, ...]]:
    """Yield the modules of each layer, the highest first: bench, then trainer's, then collectives'."""
    try:
        import tomllib
    except ImportError:  # Python 3.10
        import tomli as tomllib  # type: ignore[no-redef]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    yield ("bench",)
    for package in ("trainer", "collectives"):
        inside = next(contract for contract in contracts if contract.get("containers") == [f"gradwire.{package}"])
        for layer in inside["layers"]:
            names = tuple(f"{package}.{name.strip()}" for name in layer.split("|"))
            if wanted := tuple(name for name in names if not name.endswith("__main__")):
                yield wanted


def source_of(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path if path.is_dir() else path.with_suffix(".py")


def sentence_of(module: str) -> str:
    """Return the first sentence of a module's docstring."""
    path = source_of(module)
    text = ast.get_docstring(ast.parse((path / "__init__.py" if path.is_dir() else path).read_text())) or ""
    return " ".join(text.split("\n\n")[0].split()).split(". ")[0].rstrip(".")


def imports(modules: list[str]) -> list[tuple[str, str]]:
    """Return who imports whom, of these modules and all inside of them."""

    def owner(name: str) -> str | None:
        return next((module for module in modules if name == module or name.startswith(f"{module}.")), None)

    found = set()
    for module in modules:
        path = source_of(module)
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            for node in ast.walk(ast.parse(file.read_text())):
                names = []
                if isinstance(node, ast.ImportFrom) and node.module:
                    names = [f"{node.module}.{alias.name}" for alias in node.names]
                elif isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                found |= {
                    (module, target)
                    for name in names
                    if (target := owner(name.removeprefix("gradwire."))) and target != module
                }
    return sorted(found)


def direct(arrows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the arrows that no way over other modules stands for."""
    targets: dict[str, set[str]] = {}
    for importer, imported in arrows:
        targets.setdefault(importer, set()).add(imported)

    def reached(module: str) -> set[str]:
        return {further for target in targets.get(module, ()) for further in {target, *reached(target)}}

    return [(a, b) for a, b in arrows if not any(b in reached(c) for c in targets[a] - {b})]


def digest() -> str:
    """Return what stands for all that the picture shows."""
    rows = list(layers())
    modules = [module for row in rows for module in row]
    shown = [rows, [sentence_of(module) for module in modules], imports(modules)]
    return hashlib.sha256(repr(shown).encode()).hexdigest()


def main() -> None:
    rows = list(layers())
    columns = [
        [row for row in rows if not row[0].startswith("collectives")],
        [row for row in rows if row[0].startswith("collectives")],
    ]
    wrapped = {
        module: textwrap.wrap(sentence_of(module), int(LETTERS * WIDTH / len(row))) for row in rows for module in row
    }

    def height_of(row: tuple[str, ...]) -> float:
        return NAME + SENTENCE * max(len(wrapped[module]) for module in row)

    whole = max(sum(height_of(row) + GAP for row in column) for column in columns)
    figure, axes = plt.subplots(figsize=(15, 0.6 * whole + 0.3))
    for left, column in zip((0.0, WIDTH + MARGIN), columns, strict=True):
        spare = (whole - sum(height_of(row) + GAP for row in column)) / len(column)
        places: dict[str, tuple[float, float, int]] = {}
        bottom = 0.0
        for number, row in enumerate(column):
            height, share = height_of(row), WIDTH / len(row)
            bottom -= height + GAP + spare
            for place, module in enumerate(row):
                draw_box(axes, module, wrapped[module], (left + place * share, bottom), (share, height))
                places[module] = left + (place + 1) * share, bottom + height / 2, number
        for importer, imported in direct(imports(list(places))):
            (right, y, here), (other_right, other_y, there) = places[importer], places[imported]
            if here != there:
                start = (max(right, left + WIDTH) - 0.03, y)
                end = (max(other_right, left + WIDTH) - 0.03, other_y)
                axes.add_patch(FancyArrowPatch(start, end, connectionstyle="arc3,rad=-0.35", zorder=1, **THIN))
    middle = -whole / 2
    across = FancyArrowPatch(
        (WIDTH + 0.35, middle), (WIDTH + MARGIN - 0.05, middle), **{**THIN, "linewidth": 3, "mutation_scale": 24}
    )
    axes.add_patch(across)
    axes.set_xlim(-0.05, 2 * WIDTH + MARGIN + 1.2)
    axes.set_ylim(-whole - 0.05, 0)
    axes.axis("off")
    figure.tight_layout()
    figure.savefig(IMAGE, dpi=110, metadata={"Description": digest(), "Software": None})
    plt.close(figure)


def draw_box(
    axes: Axes, module: str, sentence: list[str], corner: tuple[float, float], size: tuple[float, float]
) -> None:
    """Draw a module's name and sentence in its box."""
    (left, bottom), (width, height) = corner, size
    package, _, name = module.partition(".")
    axes.add_patch(
        Rectangle((left + 0.03, bottom), width - 0.06, height, facecolor=FILLS[package], edgecolor=LINE, zorder=2)
    )
    name = module if width > WIDTH / 3 else name or module
    top, letters = bottom + height, min(9, 9 * LETTERS_OF_NAME * width / len(name))
    axes.text(left + 0.1, top - 0.18, name, fontsize=letters, weight="bold", va="center", zorder=3)
    axes.text(left + 0.1, top - 0.33, "\n".join(sentence), fontsize=7.5, va="top", zorder=3)


if __name__ == "__main__":
    main()
