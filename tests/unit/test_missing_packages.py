"""What is said where a package of an extra is not installed: how to install it from a clone, since no index has gradwire."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Runs an example in an interpreter that cannot find some packages.
WITHOUT = """
import runpy, sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in {missing} else super().find_spec(name, path, target)

sys.meta_path = [Without if finder is PathFinder else finder for finder in sys.meta_path]
sys.argv = ["example", "--help"]
runpy.run_module("gradwire.trainer.examples.{example}", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("example", "missing"),
    [("bytes_gpt", {"matplotlib"}), ("bytes_gpt", {"matplotlib", "rich"}), ("digits_cnn", {"sklearn"})],
)
def test_examples(example: str, missing: set[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(missing=missing, example=example)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert all(package in last for package in missing)
    assert last.endswith("pip install '.[train]' in a clone of gradwire")
