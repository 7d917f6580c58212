"""The strict type checker that users may have takes the docs' example of the collectives, and knows what verbs return."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT, python_blocks

#: What mypy must take the results of verbs for, and what it must refuse.
FORMS = """
from typing import Any

from typing_extensions import assert_type

from gradwire.collectives import Communicator, Work
from gradwire.collectives.engine.point_to_point import MessageWork


def forms(comm: Communicator, tensor: Any) -> None:
    assert_type(comm.recv(tensor, 1), int)
    assert_type(comm.isend(tensor, 1), MessageWork)
    assert_type(comm.irecv(tensor, 1), MessageWork)
    comm.broadcast(tensor, sorce=1)  # error
"""
VERBS = {
    "allreduce": "tensor",
    "grouped_allreduce": "[tensor]",
    "reduce_scatter": "tensor, tensor",
    "reduce": "tensor",
    "reduce_shares": "tensor",
    "gather_shares": "tensor",
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
        lines += [
            f"    assert_type(comm.{verb}({arguments}), Work)",
            f"    comm.{verb}({arguments + ', ' if arguments else ''}async_op=True).wait()",
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
