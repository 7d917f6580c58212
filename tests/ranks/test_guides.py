"""The scripts in README and docs, run as they stand, by the command that the pages give."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages import EXTENDING, PAGES, README, python_blocks
from tests.ranks.programs import torchrun

SCRIPTS = [
    pytest.param(block, id=f"{page}:{number}")
    for page in PAGES
    if page != EXTENDING
    for number, block in enumerate(python_blocks(page))
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_runs_as_it_stands(script: str, tmp_path: Path) -> None:
    torchrun(script, tmp_path)


def test_the_example_of_sharded_states_learns_and_divides_the_state(tmp_path: Path) -> None:
    script = (ROOT / "docs/examples/shard_states.py").read_text()
    assert len(script.splitlines()) < 40
    lines = [line for line in torchrun(script, tmp_path).splitlines() if line.startswith("rank ")]
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in lines]
    kept = [int(line.split(", ")[1].split()[0]) for line in lines]
    steps = 4 * 4  # a number for each parameter, on each rank
    assert len(lines) == 2
    assert max(losses) < 4.0, "the sum of eight normal numbers has variance 8"
    assert sum(kept) == 8 * (8 * 256 + 256 + 256 + 1) + 2 * steps
    assert max(kept) < 0.6 * sum(kept)


@pytest.mark.wide
def test_the_script_of_the_readme_learns_with_a_codec(tmp_path: Path) -> None:
    (script,) = python_blocks(README)
    said = torchrun(script.replace('compression="none"', 'compression="int8"'), tmp_path)
    losses = [float(line.split("loss ")[1].split()[0]) for line in said.splitlines() if line.startswith("epoch")]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert "on 2 processes" in said
    assert (tmp_path / "model.pt").exists()
