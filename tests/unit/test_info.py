"""What `gradwire info` says of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def info(folder: Path) -> dict[str, str]:
    """What stands behind each first word, with a folder in front of all others that Python looks into."""
    done = subprocess.run(
        [sys.executable, "-m", "gradwire.collectives", "info"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{folder}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return {line.split()[0]: line.split(maxsplit=1)[1] for line in done.stdout.splitlines() if len(line.split()) > 1}


def test_versions(tmp_path: Path) -> None:
    metadata = tmp_path / "gradwire-9.9.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: gradwire\nVersion: 9.9\n")
    told = info(tmp_path)
    assert told["gradwire"] == "9.9"
    assert told["numba"][0].isdigit()
    assert told["ranks"] == "1"
