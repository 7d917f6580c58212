"""The script that `make matrix` runs by torchrun with every version that is claimed."""

import pytest

from tests.pages import ROOT
from tests.ranks.programs import launch


@pytest.mark.wide
def test_the_smoke_test_of_the_matrix() -> None:
    said = launch(ROOT / "tests/smoke.py", ROOT)
    assert any(line.startswith("ok: ") and line.endswith("2 ranks") for line in said.splitlines()), said
