"""Compiles with Numba for the CPU: once per machine, kept on the disk; if that is not possible, once per process.

A kernel is kept as an object file, which llvmlite loads. Its name has digests of the sources of all kernels, and of what else
the code depends on: the versions of Numba and llvmlite, and the processor.
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
from llvmlite import ir

from gradwire.collectives.kernels.cpu.deferred import cfunc, real, use_numba
from gradwire.collectives.kernels.first_use import FIRST_USE

_log = logging.getLogger("gradwire")

#: How long one process may compile; one that holds the lock for longer counts as stopped.
COMPILE_S = 60.0
_POLL_S = 0.01

#: The version of the kernels: a digest of their sources. Kernels call nothing outside of this package.
_SOURCES = sorted(Path(__file__).parents[1].rglob("*.py"))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


_DIGEST = _digest(b"".join(source.read_bytes() for source in _SOURCES))

#: The names in an object file: the C function, and the function that Python calls, which calls the C function.
_KERNEL, _CALLER = "kernel", "caller"


class CFunction(NamedTuple):
    """A compiled C function, as something to call, with positional arguments and without the GIL, and as an address."""

    call: Callable[..., Any]
    address: int


#: What keeps the loaded code in memory: the process never unloads it.
_LOADED: list[Any] = []


def compiled(signature: str) -> Callable[[Callable[..., Any]], CFunction]:
    """Return a decorator that compiles a function by numba.cfunc, at once. signature: as text, of int64, float32, pointers and
    void. The function must not raise, nor use Numba's arrays or objects.

    The result is loaded from the disk if it is there, and saved there if a folder is writable. Processes wait for each other
    only to compile: one that is stopped while it loads a kernel delays no other.
    """

    def finish(function: Callable[..., Any]) -> CFunction:
        name = function.__name__
        key = *_machine_key(), function.__module__, function.__qualname__, signature
        file = f"{name}.{_DIGEST}.{_digest(repr(key).encode())}.o"
        code, folder = _kept(file), kernel_folder()
        if code is None:
            with FIRST_USE.compiling(name, kept=folder is not None), _one_at_a_time():
                code = _kept(file) or _built(function, signature)
                if folder is not None:
                    _keep(folder / file, code)
        return _loaded(name, code)

    return finish


def entry(arguments: int) -> Callable[[Callable[..., Any]], Callable[..., int]]:
    """Return a decorator for the functions of a module that Python calls: compiled() for so many int64, and a result of int64."""

    def finish(function: Callable[..., Any]) -> Callable[..., int]:
        return compiled(f"int64({', '.join(['int64'] * arguments)})")(function).call

    return finish


@cache
def kernel_folder() -> Path | None:
    """Return the writable folder for kernels, or None, and delete the kernels of other sources in it."""
    for folder in _folders():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError:
            continue
        for kept in folder.glob("*.o"):
            if _DIGEST not in kept.name:
                with suppress(OSError):
                    kept.unlink()
        return folder
    _warn("no folder is writable")
    return None


def _folders() -> list[Path]:
    """Return the folders where kernels may be, the preferred one first."""
    given = os.environ.get("NUMBA_CACHE_DIR")
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    own = [Path(__file__).parent / "__pycache__", Path(caches) / "gradwire"]
    return [Path(given) / "gradwire", *own] if given else own


def _kept(file: str) -> bytes | None:
    for folder in _folders():
        with suppress(OSError):
            return (folder / file).read_bytes()
    return None


def _keep(path: Path, code: bytes) -> None:
    """Save a kernel, so that other processes find it complete or not at all."""
    part = path.with_suffix(f".{os.getpid()}")
    try:
        part.write_bytes(code)
        part.replace(path)
    except OSError as error:  # a full disk
        with suppress(OSError):
            part.unlink()
        _warn(str(error.strerror))


@cache
def _machine_key() -> tuple[str, ...]:
    return version("numba"), version("llvmlite"), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


def _machine() -> Any:
    """Return a new llvmlite TargetMachine for this processor. Each execution engine takes one."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    return llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(cpu, features, opt=3, jit=True)


def _built(function: Callable[..., Any], signature: str) -> bytes:
    """Compile a function, and return the object file."""
    use_numba(function.__globals__)
    made = real(cfunc)(signature, error_model="numpy")(function)
    module = llvm.parse_assembly(made.inspect_llvm())
    module.get_function(made.native_name).name = _KERNEL
    # Numba's own functions, by which a kernel would raise or free memory, need not be there when it is loaded.
    unused = [
        each.name for each in module.functions if each.is_declaration and each.name.startswith(("numba_", "NRT_"))
    ]
    stubs = [f"define void @{name}() {{\n call void @abort()\n unreachable\n}}" for name in unused]
    module.link_in(llvm.parse_assembly("\n".join(["declare void @abort()", *stubs])))
    module.link_in(llvm.parse_assembly(_caller(made._sig)))
    for each in (*module.functions, *module.global_variables):
        if not each.is_declaration and each.name not in (_KERNEL, _CALLER):
            each.linkage = "internal"
    module.verify()
    code: bytes = _machine().emit_object(module)
    return code


def _caller(signature: Any) -> str:
    """Return the LLVM code of a function that Python can call (METH_FASTCALL), which calls the kernel without the GIL."""
    module, i64, double, void = ir.Module(), ir.IntType(64), ir.DoubleType(), ir.VoidType()
    pointer = ir.IntType(8).as_pointer()
    named = {"float32": ir.FloatType(), "int64": i64}
    kinds = [named.get(str(kind), pointer) for kind in signature.args]
    returns = str(signature.return_type) != "none"

    def declared(name: str, result: Any, *arguments: Any) -> Any:
        return ir.Function(module, ir.FunctionType(result, arguments), name)

    builder = ir.IRBuilder()
    caller = declared(_CALLER, pointer, pointer, pointer.as_pointer(), i64)
    builder.position_at_end(caller.append_basic_block())
    _, given, count = caller.args
    with builder.if_then(builder.icmp_unsigned("!=", count, ir.Constant(i64, len(kinds)))):
        builder.call(declared("PyErr_BadArgument", ir.IntType(32)), ())
        builder.ret(ir.Constant(pointer, None))
    as_float = declared("PyFloat_AsDouble", double, pointer)
    as_integer = declared("PyLong_AsUnsignedLongLongMask", i64, pointer)  # of an address, and of a number below 0
    arguments = []
    for index, kind in enumerate(kinds):
        item = builder.load(builder.gep(given, [ir.Constant(i64, index)]))
        number = builder.call(as_float if kind is named["float32"] else as_integer, [item])
        if kind is not i64:
            number = builder.inttoptr(number, kind) if kind is pointer else builder.fptrunc(number, kind)
        arguments.append(number)
    failed = builder.icmp_unsigned(
        "!=", builder.call(declared("PyErr_Occurred", pointer), ()), ir.Constant(pointer, None)
    )
    with builder.if_then(failed):
        builder.ret(ir.Constant(pointer, None))
    state = builder.call(declared("PyEval_SaveThread", pointer), ())
    result = builder.call(declared(_KERNEL, i64 if returns else void, *kinds), arguments)
    builder.call(declared("PyEval_RestoreThread", void, pointer), [state])
    number = result if returns else ir.Constant(i64, 0)
    builder.ret(builder.call(declared("PyLong_FromLongLong", pointer, i64), [number]))
    return str(module)


class _Method(ctypes.Structure):
    """PyMethodDef of Python's C API."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_METH_FASTCALL = 0x80
_function_of = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.POINTER(_Method), ctypes.c_void_p, ctypes.c_void_p)(
    ("PyCFunction_NewEx", ctypes.pythonapi)
)


def _loaded(name: str, code: bytes) -> CFunction:
    """Load an object file into memory."""
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    method = _Method(name.encode(), engine.get_function_address(_CALLER), _METH_FASTCALL, None)
    call = _function_of(ctypes.byref(method), None, None)
    _LOADED.append((engine, method))
    return CFunction(call, engine.get_function_address(_KERNEL))


@cache
def _warn(reason: str) -> None:
    """Warn that nothing is kept, once for each reason."""
    _log.warning(
        "gradwire: kernels cannot be saved (%s), so every process compiles them, which takes some seconds: "
        "set NUMBA_CACHE_DIR to a writable folder",
        reason,
    )


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Wait for the other processes of the machine, so that all but the first find the compiled kernels on the disk.

    If there are no locks, or the first one takes too long, they compile at the same time, which only costs time.
    """
    deadline = time.monotonic() + COMPILE_S
    with Path(__file__).open() as source:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(source, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_POLL_S)
            except OSError:  # a file system without locks
                break
        yield
