"""The compiled kernels: object files on the disk, which are loaded by llvmlite, without Numba.

To import Numba and set it up takes most of a second on every rank, so only a process that compiles imports it, and the modules
with the kernels' sources. Besides the sources, the code depends on the versions of Numba and llvmlite, Numba's settings, and the
processor.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from llvmlite import binding as llvm

from gradwire.collectives.kernels.files import KernelFiles

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

#: The names in an object file: the C function, and the function that Python calls, which calls the C function.
KERNEL, CALLER = "kernel", "caller"

#: The kernels call nothing outside of this package and layout.
_FILES = KernelFiles(".o", [*sorted(Path(__file__).parent.glob("*.py")), Path(__file__).parents[1] / "layout.py"])


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
    """Return the object file of a kernel: kept on the disk, or compiled. quiet: do not log that this process compiles."""
    file = _file_of(module, name)
    if (code := _FILES.kept(file)) is not None:
        return code
    from gradwire.collectives.kernels.cpu.compiling import build

    return _FILES.compiled(file, lambda: build(module, name), quiet=quiet)


def is_kept(module: str, name: str) -> bool:
    """Return whether a kernel is on the disk."""
    return _FILES.is_kept(_file_of(module, name))


def kernel_folder() -> Path | None:
    """Return the writable folder for kernels; None, with a warning, if there is none."""
    return _FILES.folder


def _file_of(module: str, name: str) -> str:
    """Return the name of a kernel's object file."""
    return _FILES.name(name, *_machine_key(), module)


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
