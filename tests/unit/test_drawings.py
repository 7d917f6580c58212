"""What is drawn in the docs is what the sources say."""

import runpy
from pathlib import Path

import pytest
from PIL import Image

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("script", ["drawings.py", "plots.py"])
def test_every_picture_shows_what_is_planned_or_measured(script: str) -> None:
    pictures = list(runpy.run_path(str(DOCS / script))["pictures"]())
    assert pictures
    for picture in pictures:
        with Image.open(DOCS / "images" / f"{picture.name}.png") as drawn:
            assert drawn.info.get("Description") == picture.digest(), f"{picture.name}: run docs/{script}"


@pytest.mark.parametrize("script", ["architecture.py", "training_steps.py"])
def test_the_pictures_of_the_packages_and_of_training_steps_show_what_is_there(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    shown = runpy.run_path(str(DOCS / script))
    with Image.open(shown["IMAGE"]) as drawn:
        assert drawn.info.get("Description") == shown["digest"](), f"run docs/{script}"
