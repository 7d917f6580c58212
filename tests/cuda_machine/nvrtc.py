"""The compiler, as a library from PyPI."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from cuda.bindings import nvrtc

from gradwire.collectives.kernels.cuda.compiling import OPTIONS, source


class CompileError(Exception):
    """What the compiler said."""


@dataclass(frozen=True)
class Compiled:
    code: bytes
    name: str  # of the kernel in it
    log: str


def _checked(answer: tuple[Any, ...]) -> Any:
    if answer[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(str(answer[0]))
    return answer[1] if len(answer) > 1 else None


def _text(size: tuple[Any, ...], read: Any, program: Any) -> bytes:
    nbytes = _checked(size)
    buffer = bytes(nbytes + 1)  # written to; of one byte, it could be an object that all of Python shares
    _checked(read(program, buffer))
    return buffer[:nbytes]


@cache
def compile_kernel(family: str, expression: str, architecture: str) -> Compiled:
    """One kernel of a family (a .cu file), as PTX for an architecture `compute_*` or as machine code for one `sm_*`."""
    return compile_text(source(family), f"{family}.cu", expression, architecture)


def compile_text(text: str, file: str, expression: str, architecture: str) -> Compiled:
    """file: what the compiler calls it. Raises CompileError."""
    program = _checked(nvrtc.nvrtcCreateProgram(text.encode(), file.encode(), 0, [], []))
    _checked(nvrtc.nvrtcAddNameExpression(program, expression.encode()))
    options = [option.encode() for option in (*OPTIONS, f"-arch={architecture}")]
    result = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = _text(nvrtc.nvrtcGetProgramLogSize(program), nvrtc.nvrtcGetProgramLog, program).decode().strip("\0\n ")
    if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"{file}, {expression}: {log}")
    name = _checked(nvrtc.nvrtcGetLoweredName(program, expression.encode())).decode()
    if architecture.startswith("compute_"):
        code = _text(nvrtc.nvrtcGetPTXSize(program), nvrtc.nvrtcGetPTX, program).rstrip(b"\0")
    else:
        code = _text(nvrtc.nvrtcGetCUBINSize(program), nvrtc.nvrtcGetCUBIN, program)
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return Compiled(code, name, log)
