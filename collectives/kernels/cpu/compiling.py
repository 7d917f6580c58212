"""Compiles kernels with Numba to object files."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from llvmlite import binding as llvm
from llvmlite import ir
from numba import cfunc

from gradwire.collectives.kernels.cpu.library import CALLER, KERNEL, machine

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


def build(module: str, name: str) -> bytes:
    """Compile a function of a module of this package by numba.cfunc, and return the object file.

    The arguments `scale` and `decay` are float32, all others and the result int64. The function must not raise, nor use Numba's
    arrays.
    """
    function = getattr(import_module(f"{__package__}.{module}"), name)
    kinds = ["float32" if each in ("scale", "decay") else "int64" for each in inspect.signature(function).parameters]
    made = cfunc(f"int64({', '.join(kinds)})", error_model="numpy")(function)
    code = llvm.parse_assembly(made.inspect_llvm())
    code.get_function(made.native_name).name = KERNEL
    missing = {each.name for each in code.functions if each.is_declaration and each.name.startswith(_NUMBA_ONLY)}
    if missing - _RAISE:
        raise TypeError(f"the kernel {name} must not allocate: it calls {', '.join(sorted(missing - _RAISE))}")
    stubs = [f"define void @{each}() {{\n call void @abort()\n unreachable\n}}" for each in sorted(missing)]
    code.link_in(llvm.parse_assembly("\n".join(["declare void @abort()", *stubs])))
    code.link_in(llvm.parse_assembly(_caller(kinds)))
    for each in (*code.functions, *code.global_variables):
        if not each.is_declaration and each.name not in (KERNEL, CALLER):
            each.linkage = "internal"
    code.verify()
    emitted: bytes = machine().emit_object(code)
    return emitted


def _caller(kinds: list[str]) -> str:
    """Return the LLVM code of a function that Python can call (METH_FASTCALL), which calls the kernel without the GIL."""
    module, i64, double, void = ir.Module(), ir.IntType(64), ir.DoubleType(), ir.VoidType()
    pointer = ir.IntType(8).as_pointer()
    types = [ir.FloatType() if kind == "float32" else i64 for kind in kinds]

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
    for index, type_ in enumerate(types):
        item = builder.load(builder.gep(given, [ir.Constant(i64, index)]))
        is_integer = type_ is i64
        number = builder.call(as_integer if is_integer else as_float, [item])
        arguments.append(number if is_integer else builder.fptrunc(number, type_))
    failed = builder.icmp_unsigned(
        "!=", builder.call(declared("PyErr_Occurred", pointer), ()), ir.Constant(pointer, None)
    )
    with builder.if_then(failed):
        builder.ret(ir.Constant(pointer, None))
    state = builder.call(declared("PyEval_SaveThread", pointer), ())
    result = builder.call(declared(KERNEL, i64, *types), arguments)
    builder.call(declared("PyEval_RestoreThread", void, pointer), [state])
    builder.ret(builder.call(declared("PyLong_FromLongLong", pointer, i64), [result]))
    return str(module)
