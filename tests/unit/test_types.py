"""The strict type checker that users may have takes the docs' example of the collectives, and tells the forms of verbs apart."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT, python_blocks

#: Every verb in its three forms, and what mypy must take their results for.
FORMS = """
from typing import Any

from typing_extensions import assert_type

from gradwire.collectives import Communicator, Work


def forms(comm: Communicator, tensor: Any, waiting: bool) -> None:
"""
VERBS = {
    "allreduce": "tensor",
    "grouped_allreduce": "[tensor]",
    "reduce_scatter": "tensor, tensor",
    "reduce": "tensor",
    "allgather": "tensor, tensor",
    "broadcast": "tensor",
    "gather": "tensor",
    "scatter": "tensor",
    "alltoall": "tensor, tensor",
    "barrier": "",
}


@pytest.mark.wide
def test_mypy_takes_the_example_and_the_forms(tmp_path: Path) -> None:
    """It need not read torch for that, which would take half a minute."""
    (example,) = python_blocks("docs/guides/collectives.md")
    assert "work.wait()" in example
    lines = []
    for verb, arguments in VERBS.items():
        given = f"{arguments}, " if arguments else ""
        lines += [
            f"    comm.{verb}({given}async_op=True).wait()",
            f"    assert_type(comm.{verb}({given}async_op=waiting), Work | None)",
            f"    comm.{verb}({given}async_op=False).wait()  # error",
            f"    comm.{verb}({arguments}).wait()  # error",
        ]
    text = FORMS + "\n".join(lines)
    (tmp_path / "example.py").write_text(example)
    (tmp_path / "forms.py").write_text(text)
    options = "--strict --no-site-packages --ignore-missing-imports --follow-imports=silent --config-file="
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options.split(), f"--cache-dir={tmp_path}/cache", "example.py", "forms.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    wrong = {number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# error")}
    said = re.findall(r"(\w+\.py):(\d+): error", done.stdout)
    assert {(path, int(number)) for path, number in said} == {("forms.py", number) for number in wrong}, done.stdout
