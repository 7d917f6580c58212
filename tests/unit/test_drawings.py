"""What is drawn in the docs is what the sources say."""

from __future__ import annotations

import runpy
from pathlib import Path

from PIL import Image

DOCS = Path(__file__).parents[2] / "docs"


def test_every_picture_shows_what_is_planned() -> None:
    """Drawn again by any version of matplotlib, it shows the same."""
    pictures = list(runpy.run_path(str(DOCS / "drawings.py"))["pictures"]())
    assert len(pictures) > 5
    for picture in pictures:
        with Image.open(DOCS / "images" / f"{picture.name}.png") as drawn:
            assert drawn.info.get("Description") == picture.digest(), f"{picture.name}: run docs/drawings.py"


def test_the_picture_of_the_packages_shows_what_is_there() -> None:
    shown = runpy.run_path(str(DOCS / "architecture.py"))
    with Image.open(shown["IMAGE"]) as drawn:
        assert drawn.info.get("Description") == shown["digest"](), "run docs/architecture.py"


def test_the_picture_of_the_readme_shows_the_numbers() -> None:
    shown = runpy.run_path(str(DOCS / "comparisons.py"))
    with Image.open(shown["IMAGE"]) as drawn:
        assert drawn.info.get("Description") == shown["digest"](), "run docs/comparisons.py"
