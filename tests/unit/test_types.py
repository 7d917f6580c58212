"""The docs' example of the collectives passes the strict type checker that users may have."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

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


def complaints(tmp_path: Path, text: str) -> str:
    """What mypy --strict says of a program. It need not read torch for that, which would take half a minute."""
    (tmp_path / "program.py").write_text(text)
    options = ["--strict", "--no-site-packages", "--ignore-missing-imports", "--follow-imports=silent"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, f"--cache-dir={tmp_path}/cache", "--config-file=", "program.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return "" if done.returncode == 0 else done.stdout


def test_the_example_of_the_collectives(tmp_path: Path) -> None:
    (example,) = python_blocks("docs/guides/collectives.md")
    assert "work.wait()" in example
    assert complaints(tmp_path, example) == ""


def test_what_verbs_return_depends_on_async_op(tmp_path: Path) -> None:
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
    wrong = {number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# error")}
    said = complaints(tmp_path, text)
    assert {int(number) for number in re.findall(r"program.py:(\d+): error", said)} == wrong, said
