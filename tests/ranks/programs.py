"""Programs as a user runs them, under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.pages import ROOT

DEADLINE_S = 100.0


def torchrun(script: str, folder: Path, processes: int = 2, deadline_s: float = DEADLINE_S) -> str:
    """Run a script on several ranks in a folder, and return what it says."""
    (folder / "train.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "train.py"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=deadline_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
