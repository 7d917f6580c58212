"""The drawn schedules of docs/algorithms.md are those of the planners."""

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
