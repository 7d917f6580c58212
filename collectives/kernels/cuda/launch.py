"""Launches of kernels by CuPy, on torch's current stream and memory."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch

from gradwire.collectives.kernels.cuda.compiling import code_of
from gradwire.collectives.torch_internals import current_stream_handle

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
    """Launches kernels. Loads a kernel, from the disk or compiled, at its first launch on a device."""

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
                # If two threads load it, both launch the first one's, since CuPy unloads what is dropped.
                function = self._functions.setdefault((kernel, device), self._load(family, kernel, device))
            if not self._driver.ctxGetCurrent():  # a thread that has used no GPU yet
                self._cupy.cuda.runtime.free(0)
            room, stream = self._room, current_stream_handle(device)
            room.parameters[: len(parameters)] = parameters
            # CuPy's own call of a function takes longer, to find out what its arguments are.
            self._driver.launchKernel(function.ptr, grid, 1, 1, THREADS, 1, 1, 0, stream, room.address, 0)

    def _load(self, family: str, kernel: str, device: torch.device) -> Any:
        """Load a kernel. Do not use cupy.RawModule: it flushes denormals with any options."""
        architecture = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
        code, name = code_of(self._cupy, family, kernel, architecture)
        module = self._cupy.cuda.function.Module()
        module.load(code)
        return module.get_function(name)
