"""Files of results. They contain the software, machine, network and protocol, so that results can be compared."""

from __future__ import annotations

import csv
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from gradwire.collectives.schedules.topology import Machine


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return Machine.here().description


def commit() -> str | None:
    """Return the commit of this tree, with `-dirty` if tracked files have changed; None without a repository or git."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude", "*"]
    try:
        done = subprocess.run(describe, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=30)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def software_and_machine(device: torch.device) -> dict[str, Any]:
    return {
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device_name(device),
        "network": os.environ.get("BENCH_NETWORK"),
    }


def write_json(path: Path | None, meta: Mapping[str, Any], rows: Sequence[Any]) -> None:
    """Write meta and rows, which are dataclasses or were read from such a file, to a file, and make its folder. Do nothing if
    path is None."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        written = [row if isinstance(row, dict) else asdict(row) for row in rows]
        path.write_text(json.dumps({"meta": meta, "rows": written}, indent=1) + "\n")


def write_csv(path: Path | None, rows: Sequence[Any]) -> None:
    """Write rows, which are dataclasses of one kind, to a file with a line of names, and make its folder. None is an empty
    cell. Do nothing if path is None."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, asdict(rows[0]))
            writer.writeheader()
            writer.writerows(map(asdict, rows))
