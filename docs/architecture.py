"""Draw docs/images/architecture.png: the packages, a box for each with its docstring's first sentence, and what imports what
(an arrow is left out where others lead the same way).

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
from matplotlib.patches import FancyArrowPatch, Rectangle

ROOT = Path(__file__).parents[1]
IMAGE = ROOT / "docs" / "images" / "architecture.png"
LINE = "#94a3b8"
FILLS = {"bench": "#fef3c7", "trainer": "#dcfce7", "collectives": "#dbeafe"}
WIDTH = 7.4
#: Of a box: the height of its name with the margins, and of a line of its sentence; below it comes a gap.
NAME, SENTENCE, GAP = 0.42, 0.2, 0.26
#: How many letters of a sentence fit in a unit of width, and of a name.
LETTERS, LETTERS_OF_NAME = 22, 13


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
                found |= {(module, target) for name in names if (target := owner(name.removeprefix("gradwire."))) and target != module}
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
    modules = [module for row in rows for module in row]
    wrapped = {
        module: textwrap.wrap(sentence_of(module), int(LETTERS * WIDTH / len(row))) for row in rows for module in row
    }
    heights = [NAME + SENTENCE * max(len(wrapped[module]) for module in row) for row in rows]
    whole = sum(heights) + GAP * len(rows)
    figure, axes = plt.subplots(figsize=(11, 0.62 * whole + 0.3))
    places: dict[str, tuple[float, float, float]] = {}
    bottom = 0.0
    for number, (row, height) in enumerate(zip(rows, heights, strict=True)):
        share = WIDTH / len(row)
        bottom -= height + GAP
        for column, module in enumerate(row):
            left, top = column * share, bottom + height
            package = module.partition(".")[0]
            box = Rectangle(
                (left + 0.03, bottom), share - 0.06, height, facecolor=FILLS[package], edgecolor=LINE, zorder=2
            )
            axes.add_patch(box)
            name = module if len(row) <= 4 else module.partition(".")[2]
            size = min(8, 8 * LETTERS_OF_NAME * share / len(name))
            axes.text(left + 0.1, top - 0.18, name, fontsize=size, weight="bold", va="center", zorder=3)
            axes.text(left + 0.1, top - 0.32, "\n".join(wrapped[module]), fontsize=6.5, va="top", zorder=3)
            places[module] = left + share, bottom + height / 2, number
    for importer, imported in direct(imports(modules)):
        (right, y, here), (other_right, other_y, there) = places[importer], places[imported]
        if here != there:
            bend = -0.35
            start, end = (max(right, WIDTH) - 0.03, y), (max(other_right, WIDTH) - 0.03, other_y)
            style = {"arrowstyle": "-|>", "mutation_scale": 7, "color": LINE, "linewidth": 0.8, "zorder": 1}
            axes.add_patch(FancyArrowPatch(start, end, connectionstyle=f"arc3,rad={bend}", **style))
    axes.set_xlim(-0.05, WIDTH + 1.4)
    axes.set_ylim(-whole - 0.05, 0)
    axes.axis("off")
    figure.tight_layout()
    figure.savefig(IMAGE, dpi=130, metadata={"Description": digest(), "Software": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
