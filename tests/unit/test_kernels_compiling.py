"""What is kept of compiling: all that is still true and no more; and where nothing can be, kernels work all the same."""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gradwire import collectives
from gradwire.collectives.kernels import files
from tests.harness import wide, wide_rows
from tests.interpreter import python

CALLER = """
import numpy as np

from gradwire.collectives.kernels.cpu.callee import answer


def ask():
    return answer()


def twice(number):
    return 2 * number


def weighted(a, b, c, d, e, f, scale):
    return a + 2 * b + 3 * c + 4 * d + 5 * e + 6 * f + int(scale * 2)


def allocating(n):
    return np.zeros(n).sum()
"""

CALLEE = """
from numba import njit


@njit
def answer():
    return {}
"""

ASK = """
import resource
import sys

if "full disk" in sys.argv:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
from gradwire.collectives.kernels.cpu.library import kernel

assert kernel("caller", "twice").call(21) == 42
print(kernel("caller", "ask").call(), "numba" in sys.modules)
"""

#: Calls, and an address that is valid though its kernel was loaded a second time, as in a thread whose CFunction the cache drops.
CALLS = """
import ctypes
import gc

from gradwire.collectives.kernels.cpu.library import kernel

call = kernel("caller", "weighted").call
assert call(1, 10, 100, 1000, 10000, 100000, 1.5) == 654321 + 3
assert call(-1, 0, 0, 0, 0, 0, 0) == -1
assert call(2**64 - 5, True, 0, 0, 0, 0, 0.0) == -3
for wrong in ((1, 2), (1,) * 8, (1, 2, 3, 4, 5, 6, "7"), (1.5, 2, 3, 4, 5, 6, 7)):
    try:
        call(*wrong)
    except TypeError:
        continue
    raise AssertionError(wrong)
address = kernel.__wrapped__("caller", "weighted").address
gc.collect()
function = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 6, ctypes.c_float)(address)
assert function(1, 10, 100, 1000, 10000, 100000, 1.5) == 654321 + 3
"""

#: Loads a kernel for a GPU with a compiler that counts its calls.
CUDA = """
import hashlib
import sys
from types import SimpleNamespace

from gradwire.collectives.kernels.cuda.compiling import code_of

compiled = []
nvrtc = SimpleNamespace(
    NVRTCError=RuntimeError,
    getVersion=lambda: (13, 0),
    createProgram=lambda source, *rest: source,
    addNameExpression=lambda program, kernel: compiled.append(kernel),
    compileProgram=lambda program, options: None,
    getCUBIN=lambda program: hashlib.sha256(program.encode()).digest() + b"\\0\\1",
    getLoweredName=lambda program, kernel: "_Z" + kernel,
    destroyProgram=lambda program: None,
)
cupy = SimpleNamespace(__version__=sys.argv[2], cuda=SimpleNamespace(nvrtc=nvrtc))
code, name = code_of(cupy, "quantize", "encode<Int8<256, false>, true, float>", sys.argv[1])
assert code.endswith(b"\\0\\1") and name == "_Zencode<Int8<256, false>, true, float>"
print(len(compiled), code.hex())
"""

ALLOCATES = """
from gradwire.collectives.kernels.cpu.library import kernel

try:
    kernel("caller", "allocating")
except TypeError as error:
    print(error)
"""


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    """Return the folder of a copy of the kernels for the CPU, whose packages import no torch, with two kernels more."""
    package = Path(collectives.__file__).parent
    copy = tmp_path / "gradwire" / "collectives" / "kernels"
    shutil.copytree(package / "kernels", copy, ignore=shutil.ignore_patterns("__pycache__"))
    for imports_torch in (copy.parent.parent, copy.parent, copy):
        (imports_torch / "__init__.py").write_text("")
    (copy / "cpu" / "caller.py").write_text(CALLER)
    return copy / "cpu"


def run(
    kernels: Path, script: str, answer: int, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    (kernels / "callee.py").write_text(CALLEE.format(answer))
    file = kernels.parents[3] / "script.py"  # whose own folder comes first
    file.write_text(script)
    done = subprocess.run(
        [sys.executable, str(file), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return done


def ask(kernels: Path, answer: int, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(kernels, ASK, answer, *arguments, **environment)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("no folder", "no folder is writable"), *wide_rows(("full disk", "File too large"))],
)
def test_what_cannot_be_kept_is_compiled_all_the_same(kernels: Path, tmp_path: Path, kind: str, reason: str) -> None:
    """As root, too, who may write everywhere but in what is no folder."""
    nowhere = tmp_path / "nowhere"
    nowhere.touch()
    if kind == "no folder":
        (kernels.parent / "__pycache__").touch()
    without = {"HOME": str(nowhere), "XDG_CACHE_HOME": str(nowhere), "NUMBA_CACHE_DIR": str(nowhere)}
    done = ask(kernels, 41, kind, **without)
    assert done.stdout == "41 True\n"
    (line,) = [line for line in done.stderr.splitlines() if "gradwire: compil" not in line]
    assert reason in line
    assert "set NUMBA_CACHE_DIR to a writable folder" in line
    if kind == "no folder":
        assert "does it ahead" not in done.stderr


def test_what_calls_into_an_edited_file_is_compiled_anew(kernels: Path, tmp_path: Path) -> None:
    """And what was compiled before the edit is deleted when it is old. That it is compiled is said, that it is loaded is not."""
    kept = tmp_path / "kept"
    compiled_first, loaded, compiled_again = (41, True, 1), (41, False, 0), (42, True, 1)
    for answer, imports, told in (compiled_first, loaded, compiled_again):
        done = ask(kernels, answer, NUMBA_CACHE_DIR=str(kept))
        assert done.stdout == f"{answer} {imports}\n"
        assert len(list(kept.rglob("*.o"))) == 2
        for file in kept.rglob("*.o"):
            os.utime(file, (0, 0))
        assert done.stderr.count("gradwire: compiling kernels for this and later runs") == told


@pytest.mark.parametrize("damage", [lambda code: code[:-1] + b"?", *wide(lambda code: b"")])
def test_a_damaged_file_is_replaced(kernels: Path, tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    """A kernel whose file is empty, cut off or altered, for example after a loss of power, is compiled again. So is one that
    another user has written, who could make this user execute it."""
    kept = tmp_path / "kept"
    ask(kernels, 41, NUMBA_CACHE_DIR=str(kept))
    (file,), (other,) = kept.rglob("twice.*.o"), kept.rglob("ask.*.o")
    code = file.read_bytes()
    file.write_bytes(damage(code))
    if os.geteuid() == 0:  # who alone gives files to others
        os.chown(other, 12345, -1)
    for imports in (True, False):
        assert ask(kernels, 41, NUMBA_CACHE_DIR=str(kept)).stdout == f"41 {imports}\n"
    assert len(file.read_bytes()) == len(code)
    assert other.stat().st_uid == os.geteuid()


def test_kernels_for_gpus_are_kept(kernels: Path, tmp_path: Path) -> None:
    """For each source, architecture and version of the compiler, and again if the file is damaged."""
    kept = tmp_path / "kept"

    def loaded(architecture: str = "sm_90", version: str = "14") -> tuple[int, str]:
        done = run(kernels, CUDA, 0, architecture, version, NUMBA_CACHE_DIR=str(kept)).stdout
        return int(done.split()[0]), done.split()[1]

    first = loaded()
    assert (first[0], loaded()) == (1, (0, first[1]))
    assert loaded("sm_80")[0] == loaded(version="15")[0] == 1
    for file in kept.rglob("*.cubin"):
        file.write_bytes(file.read_bytes()[:-1])
    assert (loaded(), loaded()) == (first, (0, first[1]))
    with (kernels.parent / "cuda" / "codecs.cuh").open("a") as header:
        header.write("// edited")
    edited = loaded()
    assert edited[0] == 1
    assert edited[1] != first[1]


def test_python_passes_integers_of_64_bits_and_floats_and_addresses_stay_valid(kernels: Path) -> None:
    run(kernels, CALLS, 0)


def test_a_kernel_that_would_need_numba_where_it_is_loaded_is_refused(kernels: Path) -> None:
    assert "the kernel allocating must not allocate: it calls NRT_" in run(kernels, ALLOCATES, 0).stdout


def test_what_is_kept_is_loaded_though_another_process_holds_the_lock() -> None:
    """A process can be stopped while it holds it, and everyone else would wait for as long as compiling may take."""
    load = "import torch; from gradwire.collectives.kernels import cpu_arithmetic; cpu_arithmetic(torch.float32)"
    subprocess.run([python(), "-c", load], check=True, timeout=110)
    with Path(files.__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run([python(), "-c", load], check=True, timeout=files.COMPILE_S - 10)
