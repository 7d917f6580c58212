"""The scripts in README and docs, run as they stand, by the command that the pages give."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages import EXTENDING, PAGES, README, ROOT, TRAIN, python_blocks
from tests.ranks.programs import launch, launch_text

SCRIPTS = [
    pytest.param(block, id=f"{page}:{number}")
    for page in PAGES
    if page not in (EXTENDING, README)
    for number, block in enumerate(python_blocks(page))
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_runs_as_it_stands(script: str, tmp_path: Path) -> None:
    """Also in a folder in which more ranks have saved before."""
    (tmp_path / "optimizer.rank2.pt").write_bytes(b"of an older checkpoint")
    launch_text(script, tmp_path)


def test_the_script_of_the_readme_learns(tmp_path: Path) -> None:
    """It is the file, by a test of the pages."""
    said = launch(ROOT / TRAIN, tmp_path)
    losses = [float(line.split("loss ")[1].split()[0]) for line in said.splitlines() if line.startswith("epoch")]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert "on 2 processes" in said
    assert (tmp_path / "model.pt").exists()
