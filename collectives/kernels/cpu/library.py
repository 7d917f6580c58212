"""The compiled kernels: object files on the disk, which are loaded by llvmlite, without Numba.

To import Numba and set it up takes most of a second on every rank, so only a process that compiles imports it, and the modules
with the kernels' sources. The name of a file has digests of the sources of all kernels, and of what else its code depends on:
the versions of Numba and llvmlite, Numba's settings, and the processor.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from llvmlite import binding as llvm

_log = logging.getLogger("gradwire")

#: The names of the kernels in each module of this package.
KERNELS = {
    "shared_memory": ("allreduce",),
    "waits": ("publish",),
    "messages": ("add", "move", "next_sender"),
    "tcp": ("add", "wait_for", "next_sender"),
    "execute_program": ("execute_program",),
    "arithmetic": tuple(
        f"reduce_{dtype}"
        for dtype in ("float16", "bfloat16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64")
    ),
    "memory": ("hash_words", "add_pieces"),
    "quantize": tuple(
        f"{codec}_{way}" for codec in ("fp16", "bf16", "fp8", "int8", "int4") for way in ("encode", "decode")
    ),
    "onebit": ("onebit_encode", "onebit_decode"),
    "stochastic": tuple(f"{codec}_{way}" for codec in ("qsgd", "terngrad", "natural") for way in ("encode", "decode")),
    "chunks": ("chunktopk_encode", "chunktopk_decode"),
    "selection": ("select",),
    "sparse": ("scatter", "randomk_encode", "randomk_decode"),
    "matrices": ("orthonormalize", "multiply"),
}

#: How long one process may compile; one that holds the lock for longer counts as stopped.
COMPILE_S = 60.0
_POLL_S = 0.01

#: The names in an object file: the C function, and the function that Python calls, which calls the C function.
KERNEL, CALLER = "kernel", "caller"

#: Kernels of other versions of gradwire in a folder that several installations may use are deleted when they are this old.
_OLD_S = 30 * 24 * 3600.0

#: The length of the digest before an object file.
_CHECK_BYTES = 32


class CFunction(NamedTuple):
    """A compiled C function, as something to call, with positional arguments and without the GIL, and as an address. Both are
    valid until the process ends."""

    call: Callable[..., Any]
    address: int


@cache
def kernel(module: str, name: str) -> CFunction:
    """Return a kernel, loaded from the disk, or compiled. Raises ImportError if it must be compiled and Numba is missing."""
    return _loaded(name, code_of(module, name))


def code_of(module: str, name: str, *, quiet: bool = False) -> bytes:
    """Return the object file of a kernel. If it is not on the disk, compile it, and save it if a folder is writable. quiet: do
    not log that this process compiles.

    Processes wait for each other only to compile: one that is stopped while it loads a kernel delays no other.
    """
    file = file_of(module, name)
    if (code := _kept(file)) is not None:
        return code
    from gradwire.collectives.kernels.cpu.compiling import build

    folder = kernel_folder()
    with _one_at_a_time() as is_first:
        if (code := _kept(file)) is not None:
            return code
        if is_first and not quiet:
            _tell(folder is not None)
        code = build(module, name)
        if folder is not None:
            _keep(folder / file, code)
        return code


def is_kept(module: str, name: str) -> bool:
    """Return whether a kernel is on the disk."""
    file = file_of(module, name)
    return any((folder / file).exists() for folder in _folders())


@cache
def _tell(saves: bool) -> None:
    """Log, once in a process, that it compiles."""
    hint = " for this and later runs, in up to a minute; `gradwire precompile` does it ahead" if saves else ""
    _log.warning("gradwire: compiling kernels%s", hint)


@contextmanager
def _one_at_a_time() -> Iterator[bool]:
    """Wait for the other processes of the machine, so that all but the first find the compiled kernels on the disk. Yield whether
    this process did not have to wait.

    If there are no locks, or the first one takes too long, they compile at the same time, which only costs time.
    """
    deadline, is_first = time.monotonic() + COMPILE_S, True
    with Path(__file__).open() as source:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(source, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                is_first = False
                time.sleep(_POLL_S)
            except OSError:  # a file system without locks
                break
        yield is_first


def file_of(module: str, name: str) -> str:
    """Return the name of a kernel's object file."""
    return f"{name}.{_sources_digest()}.{_digest(repr((*_machine_key(), module, name)).encode())}.o"


def _digest(data: bytes) -> str:
    """Return a part of the SHA-256 of data, for the name of a file."""
    return hashlib.sha256(data).hexdigest()[:16]


@cache
def _sources_digest() -> str:
    """Return a digest of the sources of the kernels, which call nothing outside of this package and layout."""
    sources = [*sorted(Path(__file__).parent.glob("*.py")), Path(__file__).parents[1] / "layout.py"]
    return _digest(b"".join(source.read_bytes() for source in sources))


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
            if (is_part or _sources_digest() not in path.name) and path.stat().st_mtime < time.time() - age_s:
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


def _kept(file: str) -> bytes | None:
    """Return a kept object file; None if there is none, or only a damaged one."""
    for folder in _folders():
        with suppress(OSError):
            code = (folder / file).read_bytes()
            if code[:_CHECK_BYTES] == hashlib.sha256(code[_CHECK_BYTES:]).digest():
                return code[_CHECK_BYTES:]
    return None


def _keep(path: Path, code: bytes) -> None:
    """Save a kernel, so that other processes find it complete or not at all, after a loss of power too."""
    part = ""
    try:
        descriptor, part = tempfile.mkstemp(".part", path.name, path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.chmod(part, 0o644)
        os.replace(part, path)
    except OSError as error:  # a full disk
        with suppress(OSError):
            os.unlink(part)
        _warn(str(error.strerror))


@cache
def _machine_key() -> tuple[Any, ...]:
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


def _loaded(name: str, code: bytes) -> CFunction:
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
