"""Compiles with Numba for the CPU: once per machine, kept on the disk; if that is not possible, once per process."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llvmlite import binding as llvm
from llvmlite import ir

from gradwire.collectives.kernels.cpu.deferred import cfunc, real, use_numba
from gradwire.collectives.kernels.cpu.object_files import (
    CALLER,
    KERNEL,
    SOURCES_DIGEST,
    CFunction,
    digest,
    keep,
    kept,
    kernel_folder,
    loaded,
    machine,
    machine_key,
)
from gradwire.collectives.kernels.first_use import FIRST_USE

#: How long one process may compile; one that holds the lock for longer counts as stopped.
COMPILE_S = 60.0
_POLL_S = 0.01

#: Numba's functions that a kernel would call if it raised, which it does not. They are not there when a kernel is loaded.
_RAISE = {
    "NRT_Free",
    "numba_do_raise",
    "numba_gil_ensure",
    "numba_gil_release",
    "numba_runtime_build_excinfo_struct",
    "numba_unpickle",
}

#: The beginnings of the names of all functions that exist only where Numba is imported.
_NUMBA_ONLY = ("NRT_", "numba_", "__svml_")


def compiled(signature: str) -> Callable[[Callable[..., Any]], CFunction]:
    """Return a decorator that compiles a function by numba.cfunc, at once.

    signature: Numba's, as text. The arguments are int64, float32 and pointers, the result is int64 or void. The function must
    not raise, nor use Numba's arrays.

    The result is loaded from the disk if it is there, and saved there if a folder is writable. Processes wait for each other
    only to compile: one that is stopped while it loads a kernel delays no other.
    """

    def finish(function: Callable[..., Any]) -> CFunction:
        name, cells = function.__name__, [cell.cell_contents for cell in function.__closure__ or ()]
        key = *machine_key(), function.__module__, function.__qualname__, cells, signature
        file = f"{name}.{SOURCES_DIGEST}.{digest(repr(key).encode())}.o"
        code = kept(file)
        if code is None:
            folder = kernel_folder()
            with FIRST_USE.compiling(name, kept=folder is not None), _one_at_a_time():
                code = kept(file)
                if code is None:
                    code = _built(function, signature)
                    if folder is not None:
                        keep(folder / file, code)
        return loaded(name, code)

    return finish


def entry(arguments: int) -> Callable[[Callable[..., Any]], Callable[..., int]]:
    """Return a decorator for the functions of a module that Python calls: compiled() for so many int64, and a result of int64."""

    def finish(function: Callable[..., Any]) -> Callable[..., int]:
        return compiled(f"int64({', '.join(['int64'] * arguments)})")(function).call

    return finish


def _built(function: Callable[..., Any], signature: str) -> bytes:
    """Compile a function, and return the object file."""
    use_numba(function.__globals__)
    made = real(cfunc)(signature, error_model="numpy")(function)
    module = llvm.parse_assembly(made.inspect_llvm())
    module.get_function(made.native_name).name = KERNEL
    missing = {each.name for each in module.functions if each.is_declaration and each.name.startswith(_NUMBA_ONLY)}
    if missing - _RAISE:
        raise TypeError(
            f"the kernel {function.__name__} must not allocate: it calls {', '.join(sorted(missing - _RAISE))}"
        )
    stubs = [f"define void @{name}() {{\n call void @abort()\n unreachable\n}}" for name in sorted(missing)]
    module.link_in(llvm.parse_assembly("\n".join(["declare void @abort()", *stubs])))
    module.link_in(llvm.parse_assembly(_caller(signature)))
    for each in (*module.functions, *module.global_variables):
        if not each.is_declaration and each.name not in (KERNEL, CALLER):
            each.linkage = "internal"
    module.verify()
    code: bytes = machine().emit_object(module)
    return code


def _caller(signature: str) -> str:
    """Return the LLVM code of a function that Python can call (METH_FASTCALL), which calls the kernel without the GIL."""
    module, i64, double, void = ir.Module(), ir.IntType(64), ir.DoubleType(), ir.VoidType()
    pointer = ir.IntType(8).as_pointer()
    named = {"float32": ir.FloatType(), "int64": i64}
    returned, _, rest = signature.partition("(")
    names = [name for name in rest[:-1].split(", ") if name]
    kinds = [pointer if name.startswith("CPointer(") else named[name] for name in names]
    returns = {"int64": True, "void": False}[returned]

    def declared(name: str, result: Any, *arguments: Any) -> Any:
        return ir.Function(module, ir.FunctionType(result, arguments), name)

    builder = ir.IRBuilder()
    caller = declared(CALLER, pointer, pointer, pointer.as_pointer(), i64)
    builder.position_at_end(caller.append_basic_block())
    _, given, count = caller.args
    with builder.if_then(builder.icmp_unsigned("!=", count, ir.Constant(i64, len(kinds)))):
        builder.call(declared("PyErr_BadArgument", ir.IntType(32)), ())
        builder.ret(ir.Constant(pointer, None))
    as_float = declared("PyFloat_AsDouble", double, pointer)
    as_integer = declared("PyLong_AsUnsignedLongLongMask", i64, pointer)  # negative, or above 2**63
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
    result = builder.call(declared(KERNEL, i64 if returns else void, *kinds), arguments)
    builder.call(declared("PyEval_RestoreThread", void, pointer), [state])
    number = result if returns else ir.Constant(i64, 0)
    builder.ret(builder.call(declared("PyLong_FromLongLong", pointer, i64), [number]))
    return str(module)


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
