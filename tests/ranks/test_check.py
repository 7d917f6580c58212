"""A whole run of `gradwire check`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[2])


def test_all_that_is_needed_works_here() -> None:
    outer = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "gradwire.trainer.cli.check"],
        env={**os.environ, **outer, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    for start in (
        "ok      torch ",
        "ok      numba ",
        "ok      torchrun: rank 0 of 1, meets at 127.0.0.1:1",
        "ok      two ranks over gloo: sums are right",
        "ok      two ranks over TCP: sums are right",
        "ok      two ranks over shared memory: sums are right",
    ):
        assert any(line.startswith(start) for line in lines), done.stdout
    assert lines[-1] == "all that is needed works"
