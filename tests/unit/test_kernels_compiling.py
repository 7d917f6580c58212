"""What is kept of compiling: all that is still true and no more; and where nothing can be, kernels work all the same."""

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

CALLER = """
    from gradwire.collectives.kernels.cpu.callee import answer
    from gradwire.collectives.kernels.cpu.compiling import compiled, entry


    @entry(0)
    def ask():
        return answer()


    @compiled("int64(int64)")
    def twice(number):
        return 2 * number
"""

CALLEE = """
    from gradwire.collectives.kernels.cpu.deferred import njit


    @njit
    def answer():
        return {}
"""

ASK = """
    import logging
    import resource
    import sys

    if "full disk" in sys.argv:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    if "aloud" in sys.argv:
        logging.basicConfig(level=logging.INFO)
    from gradwire.collectives.kernels.cpu.caller import ask, twice

    assert twice.call(21) == 42
    print(ask(), "numba" in sys.modules)
"""


def write(path: Path, text: str) -> None:
    path.write_text(textwrap.dedent(text))


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    """Return the folder of a copy of the kernels for the CPU, whose packages import no torch, with two kernels more."""
    package = Path(collectives.__file__).parent
    copy = tmp_path / "gradwire" / "collectives" / "kernels"
    shutil.copytree(package / "kernels", copy, ignore=shutil.ignore_patterns("__pycache__"))
    for imports_torch in (copy.parent.parent, copy.parent, copy):
        (imports_torch / "__init__.py").write_text("")
    write(copy / "cpu" / "caller.py", CALLER)
    write(tmp_path / "script.py", ASK)
    return copy / "cpu"


def ask(kernels: Path, answer: int, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    write(kernels / "callee.py", CALLEE.format(answer))
    done = subprocess.run(
        [sys.executable, str(kernels.parents[3] / "script.py"), *arguments],  # whose own folder comes first
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("no folder", "no folder is writable"), ("full disk", "File too large")],
)
def test_what_cannot_be_kept_is_compiled_all_the_same(kernels: Path, tmp_path: Path, kind: str, reason: str) -> None:
    """As root, too, who may write everywhere but in what is no folder."""
    nowhere = tmp_path / "nowhere"
    nowhere.touch()
    if kind == "no folder":
        (kernels / "__pycache__").touch()
    without = {"HOME": str(nowhere), "XDG_CACHE_HOME": str(nowhere), "NUMBA_CACHE_DIR": str(nowhere)}
    done = ask(kernels, 41, kind, **without)
    assert done.stdout == "41 True\n"
    (line,) = [line for line in done.stderr.splitlines() if "gradwire: compil" not in line]
    assert reason in line
    assert "set NUMBA_CACHE_DIR to a writable folder" in line
    if kind == "no folder":
        assert "does it ahead" not in done.stderr


def test_what_calls_into_an_edited_file_is_compiled_anew(kernels: Path, tmp_path: Path) -> None:
    """And what was compiled before the edit is kept no longer. That it is compiled is said, that it is loaded is not."""
    kept = tmp_path / "kept"
    for answer, imports, told in (
        (41, True, 1),
        (41, False, 0),
        (42, True, 1),
    ):  # compiled, loaded without Numba, compiled
        done = ask(kernels, answer, "aloud", NUMBA_CACHE_DIR=str(kept))
        assert done.stdout == f"{answer} {imports}\n"
        assert len(list(kept.rglob("*.o"))) == 2
        assert done.stderr.count("gradwire: compiling kernels for this and later runs, some seconds") == told


def test_what_is_kept_is_loaded_though_another_process_holds_the_lock() -> None:
    """A process can be stopped while it holds it, and everyone else would wait for as long as compiling may take."""
    load = "import torch; from gradwire.collectives.kernels import cpu_arithmetic; cpu_arithmetic(torch.float32)"
    subprocess.run([python(), "-c", load], check=True, timeout=110)
    with Path(compiling.__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run([python(), "-c", load], check=True, timeout=compiling.COMPILE_S - 10)
