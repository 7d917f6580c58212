"""The programs of a parameter server in docs/examples, on four ranks, and what each of them shows."""

import re
from pathlib import Path

import pytest

from tests.harness import wide
from tests.pages import ROOT
from tests.ranks.programs import launch

NUMBERS = r"(\d+) updates at (\d+) servers, of contributions (.*?); (.*?); (\d+) late, (\d+) dropped"


@pytest.mark.parametrize("program", ["hybrid", *wide("parameter_server", "asynchronous", "stale_synchronous")])
def test_a_scheme_trains(program: str, tmp_path: Path) -> None:
    said = launch(ROOT / "docs" / "examples" / f"{program}.py", tmp_path, processes=4)
    losses = re.findall(r"rank (\d): loss ([\d.]+) to ([\d.]+)", said)
    assert {rank for rank, _, _ in losses} == ({"0", "1", "2", "3"} if program == "hybrid" else {"1", "2", "3"}), said
    before, after = float(losses[0][1]), min(float(last) for _, _, last in losses)
    assert after < 0.7 * before, said  # whoever ends last has the parameters of all updates
    (found,) = re.findall(NUMBERS, said)
    updates, servers, contributions, ages, late, dropped = found
    if program == "hybrid":
        assert contributions == "80 from rank 0, 80 from rank 2"
        assert (updates, servers) == ("160", "2")
        assert said.count("as in all of its group: True") == 4
    else:
        assert contributions == "40 from rank 1, 40 from rank 2, 40 from rank 3"
        assert servers == "1"
    if program in ("asynchronous", "stale_synchronous"):
        assert updates == "120"  # every gradient is one
    if program == "parameter_server":
        assert int(updates) < 120
        assert int(dropped) == int(late) > 0
    else:
        assert int(dropped) == 0
    assert sum(int(count) for count in re.findall(r"(\d+) of age", ages)) == sum(
        int(count) for count in re.findall(r"(\d+) from", contributions)
    )
