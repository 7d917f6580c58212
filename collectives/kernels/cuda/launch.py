"""The CUDA sources, and their compilation and launch by CuPy, on torch's current stream and memory."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

from gradwire.collectives.torch_internals import current_stream_handle

_FOLDER = Path(__file__).parent

#: Round every operation separately, and keep denormals, so that a GPU and a CPU write the same bytes.
OPTIONS = ("-std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")

#: Threads of a block, in every kernel.
THREADS = 256


class KernelLaunch(Protocol):
    """The protocol of a function that launches kernels."""

    def __call__(self, family: str, kernel: str, grid: int, parameters: bytes, tensors: Sequence[torch.Tensor]) -> None:
        """Launch a kernel, an instance of a template in `<family>.cu`.

        parameters: the kernel's only argument, a struct. tensors: all that the kernel reads or writes.
        """


#: The C++ types of the numbers in memory: see common.cuh.
NUMBERS = {torch.float32: "float", torch.bfloat16: "Bfloat16", torch.float16: "Float16"}


def literal(flag: bool) -> str:
    """Return a flag as a C++ literal."""
    return "true" if flag else "false"


@cache
def source(family: str) -> str:
    """Return the text of `<family>.cu`, with every #include replaced by the header's text."""
    return re.sub(r'#include "(.+)"', lambda include: _text(include[1]), _text(f"{family}.cu"))


def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


#: The most bytes that the parameters of a kernel have.
_PARAMETER_BYTES = 4096


class _Room(threading.local):
    """Memory of a thread for the parameters of a launch, which the driver copies. address: of a pointer to the memory."""

    def __init__(self) -> None:
        memory = (ctypes.c_char * _PARAMETER_BYTES)()
        self._pointer = ctypes.pointer(memory)
        self.parameters = memoryview(memory).cast("B")
        self.address = ctypes.addressof(self._pointer)


class CupyLaunch:
    """Launches kernels. Compiles a kernel at its first launch on a device."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._driver = cupy.cuda.driver
        self._functions: dict[tuple[str, torch.device], Any] = {}
        self._room = _Room()

    def __call__(self, family: str, kernel: str, grid: int, parameters: bytes, tensors: Sequence[torch.Tensor]) -> None:
        device = tensors[0].device
        # The guard of a device takes as long as a launch.
        with nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device):
            function = self._functions.get((kernel, device))
            if function is None:
                # If two threads compile it, both launch the first one's, since CuPy unloads what is dropped.
                function = self._functions.setdefault((kernel, device), self._compile(family, kernel, device))
            if not self._driver.ctxGetCurrent():  # a thread that has used no GPU yet
                self._cupy.cuda.runtime.free(0)
            room, stream = self._room, current_stream_handle(device)
            room.parameters[: len(parameters)] = parameters
            # CuPy's own call of a function takes longer, to find out what its arguments are.
            self._driver.launchKernel(function.ptr, grid, 1, 1, THREADS, 1, 1, 0, stream, room.address, 0)

    def _compile(self, family: str, kernel: str, device: torch.device) -> Any:
        """Compile a kernel. Do not use cupy.RawModule: it flushes denormals with any options."""
        architecture = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
        code, name = compile_kernel(self._cupy.cuda.nvrtc, family, kernel, architecture)
        module = self._cupy.cuda.function.Module()
        module.load(code)
        return module.get_function(name)


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
