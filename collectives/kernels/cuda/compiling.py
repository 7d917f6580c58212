"""The CUDA sources, and their compilation by NVRTC."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from gradwire.collectives.kernels.files import KernelFiles

_FOLDER = Path(__file__).parent

#: Round every operation separately, and keep denormals, so that a GPU and a CPU write the same bytes.
OPTIONS = ("-std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")

_FILES = KernelFiles(".cubin", sorted(path for kind in ("*.cu", "*.cuh") for path in _FOLDER.glob(kind)))


@cache
def source(family: str) -> str:
    """Return the text of `<family>.cu`, with every #include replaced by the header's text."""
    return re.sub(r'#include "(.+)"', lambda include: _text(include[1]), _text(f"{family}.cu"))


def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def code_of(cupy: Any, family: str, kernel: str, architecture: str) -> tuple[bytes, str]:
    """Return the machine code of a kernel, kept on the disk or compiled, and the kernel's name in it.

    Raises RuntimeError with the compiler's message.
    """
    nvrtc = cupy.cuda.nvrtc
    compiler = (cupy.__version__, nvrtc.getVersion(), OPTIONS)
    file = _FILES.name(kernel.partition("<")[0], family, kernel, architecture, *compiler)
    content = _FILES.kept(file)
    if content is None:
        content = _FILES.compiled(file, lambda: _content(*compile_kernel(nvrtc, family, kernel, architecture)))
    name, _, code = content.partition(b"\0")
    return code, name.decode()


def _content(code: bytes, name: str) -> bytes:
    """Return what a file contains: the kernel's name, a zero, and the code."""
    return name.encode() + b"\0" + code


def compile_kernel(nvrtc: Any, family: str, kernel: str, architecture: str) -> tuple[bytes, str]:
    """Return the machine code of a kernel, and the kernel's name in it. nvrtc: cupy.cuda.nvrtc.

    Raises RuntimeError with the compiler's message.
    """
    program = nvrtc.createProgram(source(family), f"{family}.cu", (), ())
    try:
        nvrtc.addNameExpression(program, kernel)
        nvrtc.compileProgram(program, (*OPTIONS, f"-arch={architecture}"))
        return nvrtc.getCUBIN(program), nvrtc.getLoweredName(program, kernel)
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"{family}.cu, {kernel}: {nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)
