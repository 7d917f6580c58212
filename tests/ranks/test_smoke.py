"""The script that `make matrix` runs with every version that is claimed."""

import os
import subprocess
import sys
from pathlib import Path

from tests.harness import RUN_TIMEOUT_S

SMOKE = Path(__file__).parents[1] / "smoke.py"


def test_the_smoke_test_of_the_matrix() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SMOKE)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SMOKE.parents[1])},
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ok: ")
    assert done.stdout.endswith("2 ranks\n")
