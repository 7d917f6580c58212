"""The script that `make matrix` runs with every version that is claimed, by a torchrun of its own."""

import sys

import pytest

from tests.harness import RUN_TIMEOUT_S
from tests.pages import ROOT
from tests.ranks.programs import start


@pytest.mark.wide
@pytest.mark.timeout(3 * RUN_TIMEOUT_S)
def test_the_smoke_test_of_the_matrix() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    smoke = start([*torchrun, "tests/smoke.py"], ROOT)
    # Three interpreters import torch, beside the worlds of eight ranks of other tests.
    said, _ = smoke.communicate(timeout=2 * RUN_TIMEOUT_S)
    assert smoke.returncode == 0, said
    assert any(line.startswith("ok: ") and line.endswith("2 ranks") for line in said.splitlines()), said
