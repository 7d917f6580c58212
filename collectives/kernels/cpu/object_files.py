"""Object files of compiled kernels: where they are kept, and how they are loaded, which needs llvmlite, but not Numba.

The name of a file has digests of the sources of all kernels, and of what else its code depends on: the versions of Numba and
llvmlite, Numba's settings, and the processor.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from llvmlite import binding as llvm

_log = logging.getLogger("gradwire")

#: The version of the kernels: a digest of their sources. Kernels call nothing outside of this package.
_SOURCES = sorted(Path(__file__).parents[1].rglob("*.py"))


def digest(data: bytes) -> str:
    """Return a part of the SHA-256 of data, for the name of a file."""
    return hashlib.sha256(data).hexdigest()[:16]


SOURCES_DIGEST = digest(b"".join(source.read_bytes() for source in _SOURCES))

#: The names in an object file: the C function, and the function that Python calls, which calls the C function.
KERNEL, CALLER = "kernel", "caller"

#: The length of the digest before an object file.
_CHECK_BYTES = 32


def _check(code: bytes) -> bytes:
    return hashlib.sha256(code).digest()


#: Kernels of other versions of gradwire in a folder that several installations may use are deleted when they are this old.
_OLD_S = 30 * 24 * 3600.0


class CFunction(NamedTuple):
    """A compiled C function, as something to call, with positional arguments and without the GIL, and as an address. Both are
    valid until the process ends."""

    call: Callable[..., Any]
    address: int


@cache
def kernel_folder() -> Path | None:
    """Return the writable folder for kernels, or None, and delete the kernels of other sources in it."""
    for folder in _folders():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError:
            continue
        _clean(folder)
        return folder
    _warn("no folder is writable")
    return None


def _clean(folder: Path) -> None:
    """Delete the kernels of other sources: in the folder of this package all, in others, which other installations may use, the
    old ones. Before object files, Numba kept kernels as .nbc and .nbi."""
    for path in [path for kind in ("*.o", "*.part", "*.nbc", "*.nbi") for path in folder.glob(kind)]:
        is_part = path.suffix == ".part"  # another process may be writing it
        age_s = 0.0 if folder == _OWN and not is_part else _OLD_S
        with suppress(OSError):
            if (is_part or SOURCES_DIGEST not in path.name) and path.stat().st_mtime < time.time() - age_s:
                path.unlink()


#: The preferred folder, which this installation has for itself.
_OWN = Path(__file__).parent / "__pycache__"


@cache
def _folders() -> list[Path]:
    """Return the folders where kernels may be, the preferred one first."""
    if given := os.environ.get("NUMBA_CACHE_DIR"):
        folder = Path(given).absolute() / "gradwire"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            return [folder]
    user = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return [_OWN, user / "gradwire"] if user.is_absolute() else [_OWN]


def kept(file: str) -> bytes | None:
    """Return a kept object file; None if there is none, or only a damaged one."""
    for folder in _folders():
        with suppress(OSError):
            code = (folder / file).read_bytes()
            if code[:_CHECK_BYTES] == _check(code[_CHECK_BYTES:]):
                return code[_CHECK_BYTES:]
    return None


def keep(path: Path, code: bytes) -> None:
    """Save a kernel, so that other processes find it complete or not at all, after a loss of power too."""
    part = ""
    try:
        descriptor, part = tempfile.mkstemp(".part", path.name, path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(_check(code) + code)
        os.chmod(part, 0o644)
        os.replace(part, path)
    except OSError as error:  # a full disk
        with suppress(OSError):
            os.unlink(part)
        _warn(str(error.strerror))


@cache
def machine_key() -> tuple[Any, ...]:
    """Return what the code of a kernel depends on besides its sources."""
    settings = sorted(
        item for item in os.environ.items() if item[0].startswith("NUMBA_") and item[0] != "NUMBA_CACHE_DIR"
    )
    return version("numba"), version("llvmlite"), _processor(), settings


@cache
def _processor() -> tuple[str, str]:
    """Return LLVM's name of the processor and of its features, which Numba's variables replace."""
    named = os.environ.get("NUMBA_CPU_NAME", "")
    features = "" if named else llvm.get_host_cpu_features().flatten()
    return named or llvm.get_host_cpu_name(), os.environ.get("NUMBA_CPU_FEATURES", features)


def machine() -> Any:
    """Return a new llvmlite TargetMachine for this processor. Each execution engine takes one."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    reloc = "static" if target.name.startswith("x86") else "default"  # as Numba has it
    return target.create_target_machine(*_processor(), opt=3, reloc=reloc, jit=True)


class _Method(ctypes.Structure):
    """PyMethodDef of Python's C API."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_METH_FASTCALL = 0x80
_function_of = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.POINTER(_Method), ctypes.py_object, ctypes.c_void_p)(
    ("PyCFunction_NewEx", ctypes.pythonapi)
)


#: The engines and methods of all loaded kernels, which exist until the process ends. If two threads load a kernel at the same
#: time, a cache keeps the CFunction of one of them, and the other thread still calls its own.
_in_memory: list[tuple[Any, _Method]] = []


def loaded(name: str, code: bytes) -> CFunction:
    """Load an object file into memory, for as long as the process lives."""
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    method = _Method(name.encode(), engine.get_function_address(CALLER), _METH_FASTCALL, None)
    _in_memory.append((engine, method))
    call = _function_of(ctypes.byref(method), None, None)
    return CFunction(call, engine.get_function_address(KERNEL))


@cache
def _warn(reason: str) -> None:
    """Warn that nothing is kept, once for each reason."""
    _log.warning(
        "gradwire: kernels cannot be saved (%s), so every process compiles them, which takes some seconds: "
        "set NUMBA_CACHE_DIR to a writable folder",
        reason,
    )
