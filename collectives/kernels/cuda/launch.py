"""The CUDA sources, and their compilation and launch by CuPy, on torch's current stream and memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from gradwire.collectives.torch_internals import current_stream_handle

_FOLDER = Path(__file__).parent

#: Round every operation separately, and keep denormals, so that a GPU and a CPU write the same bytes.
OPTIONS = ("-std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")

#: Threads of a block, in every kernel.
THREADS = 256


class KernelLaunch(Protocol):
    """The protocol of a function that launches kernels."""

    def __call__(
        self, family: str, kernel: str, grid: int, parameters: NDArray[np.void], tensors: Sequence[torch.Tensor]
    ) -> None:
        """Launch a kernel, an instance of a template in `<family>.cu`.

        parameters: the kernel's only argument. tensors: all that the kernel reads or writes.
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


class _Stream:
    """A stream by NVIDIA's CUDA stream protocol, which torch.cuda.Stream implements only from torch 2.10 on. handle: the address
    of a cudaStream_t."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the version of the protocol, and the handle."""
        return 0, self._handle


class CupyLaunch:
    """Launches kernels. Compiles a kernel at its first launch on a device."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._functions: dict[tuple[str, torch.device], Any] = {}
        self._streams: dict[tuple[int, torch.device], Any] = {}  # CuPy's objects for torch's streams, by their handles

    def __call__(
        self, family: str, kernel: str, grid: int, parameters: NDArray[np.void], tensors: Sequence[torch.Tensor]
    ) -> None:
        device = tensors[0].device
        # The guard of a device takes as long as a launch.
        with nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device):
            function = self._functions.get((kernel, device))
            if function is None:
                # If two threads compile it, both launch the first one's, since CuPy unloads what is dropped.
                function = self._functions.setdefault((kernel, device), self._compile(family, kernel, device))
            handle = current_stream_handle(device)
            stream = self._streams.get((handle, device))
            if stream is None:
                stream = self._streams[handle, device] = self._cupy.cuda.Stream.from_external(_Stream(handle))
            # CuPy asks for a description of named fields at each launch.
            unnamed = parameters.view(f"V{parameters.itemsize}")
            function((grid, 1, 1), (THREADS, 1, 1), (unnamed,), stream=stream)

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
