"""What is kept of compiling: all that is still true and no more; and where nothing can be, kernels work all the same."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gradwire import collectives
from gradwire.collectives.kernels.cpu import compiling
from tests.interpreter import python

SCRIPT = """
    import resource, sys
    import torch
    from gradwire.collectives.kernels import cpu_arithmetic
    from gradwire.collectives.kernels.cpu.hashing import hash_words

    if sys.argv[1] == "full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    assert hash_words(torch.zeros(1, dtype=torch.int64)) != hash_words(torch.ones(1, dtype=torch.int64))
    assert cpu_arithmetic(torch.float32).address
"""


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("no folder", "no folder for it can be written"), ("full disk", "File too large")],
)
def test_what_cannot_be_kept_is_compiled_all_the_same(tmp_path: Path, kind: str, reason: str) -> None:
    """As root, too, who may write everywhere but in what is no folder."""
    package = Path(collectives.__file__).parent
    copy = shutil.copytree(package, tmp_path / "gradwire" / "collectives", ignore=shutil.ignore_patterns("__pycache__"))
    (copy.parent / "__init__.py").touch()
    nowhere = tmp_path / "nowhere"
    nowhere.touch()
    if kind == "no folder":
        (copy / "kernels" / "cpu" / "__pycache__").touch()
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    without = {"HOME": str(nowhere), "XDG_CACHE_HOME": str(nowhere), "NUMBA_CACHE_DIR": str(nowhere)}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), kind],  # whose own folder, with the copy, comes first
        env={**os.environ, **without, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "gradwire: compil" not in line]
    assert reason in line
    assert "set NUMBA_CACHE_DIR to a folder that can be written" in line
    if kind == "no folder":
        assert "does it ahead" not in done.stderr


CALLER = """
    from numba import int64, njit

    from gradwire.collectives.kernels.cpu.callee import answer
    from gradwire.collectives.kernels.cpu.compiling import compiled


    @compiled(njit, int64())
    def ask():
        return answer()
"""

CALLEE = """
    from numba import njit


    @njit
    def answer():
        return {}
"""

ASK = """
    import logging

    logging.basicConfig(level=logging.INFO)
    from gradwire.collectives.kernels.cpu.caller import ask

    print(ask(), sum(ask.stats.cache_hits.values()))
"""


def test_what_calls_into_an_edited_file_is_compiled_anew(tmp_path: Path) -> None:
    """And what was compiled before the edit is kept no longer. That it is compiled is said, that it is loaded is not."""
    package = Path(collectives.__file__).parent
    without = shutil.ignore_patterns("__pycache__")
    copy = shutil.copytree(package / "kernels", tmp_path / "gradwire" / "collectives" / "kernels", ignore=without)
    for imports_torch in (copy.parent.parent / "__init__.py", copy.parent / "__init__.py", copy / "__init__.py"):
        imports_torch.write_text("")
    (copy / "cpu" / "caller.py").write_text(textwrap.dedent(CALLER))
    (tmp_path / "script.py").write_text(textwrap.dedent(ASK))
    kept = tmp_path / "kept"
    told: list[int] = []

    def ask(answer: int) -> tuple[str, int]:
        (copy / "cpu" / "callee.py").write_text(textwrap.dedent(CALLEE).format(answer))
        done = subprocess.run(
            [sys.executable, str(tmp_path / "script.py")],
            env={**os.environ, "NUMBA_CACHE_DIR": str(kept), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=110,
        )
        assert done.returncode == 0, done.stderr
        told.append(done.stderr.count("gradwire: compiling kernels once, some seconds"))
        return done.stdout.strip(), len(list(kept.rglob("*.nbc")))

    assert ask(41) == ("41 0", 1)  # compiled
    assert ask(41) == ("41 1", 1)  # loaded
    assert ask(42) == ("42 0", 1)
    assert told == [1, 0, 1]


def test_what_is_kept_is_loaded_though_another_process_holds_the_lock() -> None:
    """A process can be stopped while it holds it, and everyone else would wait for as long as compiling may take."""
    load = "import torch; from gradwire.collectives.kernels import cpu_arithmetic; cpu_arithmetic(torch.float32)"
    subprocess.run([python(), "-c", load], check=True, timeout=110)
    with Path(compiling.__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run([python(), "-c", load], check=True, timeout=compiling.COMPILE_S - 10)
