"""The kernels for NVIDIA GPUs: CuPy compiles and launches them, on torch's current stream and on memory of torch's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from collectives.kernels import reference, reference_sparse
from collectives.kernels.cuda_quantize import Quantizers
from collectives.kernels.cuda_source import OPTIONS, THREADS, source
from collectives.kernels.cuda_sparse import Sparse

_CAPABILITY = (8, 0)  # of a GPU that has the instructions which the kernels use


class CudaKernels(Quantizers, Sparse):
    """What collectives.kernels.reference and reference_sparse have, on CUDA tensors.

    Nothing is synchronised or copied through the host, and all may be captured in a CUDA graph, once a first call,
    outside of it, has compiled what it needs.
    """


class CupyLaunch:
    """Compiles a kernel when it is first launched on a device."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._functions: dict[tuple[str, torch.device], Any] = {}

    def __call__(
        self, family: str, kernel: str, grid: int, parameters: NDArray[np.void], tensors: Sequence[torch.Tensor]
    ) -> None:
        device = tensors[0].device
        with torch.cuda.device(device):
            function = self._functions.get((kernel, device))
            if function is None:
                function = self._functions[kernel, device] = self._compile(family, kernel, device)
            with self._cupy.cuda.ExternalStream(torch.cuda.current_stream(device).cuda_stream):
                function((grid, 1, 1), (THREADS, 1, 1), (parameters,))

    def _compile(self, family: str, kernel: str, device: torch.device) -> Any:
        """Not by cupy.RawModule, which flushes denormals whatever options it is given."""
        architecture = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
        code, name = compile_kernel(self._cupy.cuda.nvrtc, family, kernel, architecture)
        module = self._cupy.cuda.function.Module()
        module.load(code)
        return module.get_function(name)


def compile_kernel(nvrtc: Any, family: str, kernel: str, architecture: str) -> tuple[bytes, str]:
    """The machine code of a kernel, and its name in that. nvrtc: cupy.cuda.nvrtc.

    Raises RuntimeError, with what the compiler said.
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


class TorchKernels:
    """What CudaKernels has, in plain torch: the same bytes, but slowly, and the host waits for the GPU here and there."""

    def __getattr__(self, function: str) -> Callable[..., None]:
        module = reference if hasattr(reference, function) else reference_sparse
        implementation: Callable[..., None] = getattr(module, function)
        return implementation


def cuda_kernels() -> CudaKernels | TorchKernels | str:
    """The kernels. If something that they need is missing, plain torch, and a warning of one line says what to install.

    If torch cannot have CUDA tensors: that, as a text.
    """
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    found = _cupy_launch(torch.version.cuda.split(".")[0])
    if isinstance(found, str):
        warnings.warn(f"codecs on CUDA tensors are slow, in plain torch: {found}", stacklevel=2)
        return TorchKernels()
    return CudaKernels(found)


def _cupy_launch(major: str) -> CupyLaunch | str:
    """major: torch's version of CUDA. If there is no CuPy for it, or no GPU for the kernels, the reason in one line."""
    for number in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(number)
        if capability < _CAPABILITY:
            least, this = (".".join(map(str, version)) for version in (_CAPABILITY, capability))
            return f"the kernels need compute capability {least}, cuda:{number} has {this}"
    advice = f"pip install cupy-cuda{major}x"
    try:
        import cupy
    except ImportError as error:
        # Where CuPy is there but does not load, its own text is a page, and the cause is a line.
        return f"{str(error.__cause__ or error).strip().splitlines()[0]}: {advice}"
    built_for = str(cupy.cuda.runtime.runtimeGetVersion() // 1000)
    if built_for != major:
        return f"CuPy was built for CUDA {built_for}, torch for CUDA {major}: {advice}, without the other CuPy"
    return CupyLaunch(cupy)
