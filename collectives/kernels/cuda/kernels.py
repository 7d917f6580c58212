"""The kernels for NVIDIA GPUs, or what stands in for them: the file that others load."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from gradwire.collectives.kernels.cuda.launch import CupyLaunch
from gradwire.collectives.kernels.cuda.quantize import Quantizers
from gradwire.collectives.kernels.cuda.sparse import Sparse
from gradwire.collectives.kernels.reference import quantize, sparse

_CAPABILITY = (8, 0)  # of a GPU that has the instructions which the kernels use


class CudaKernels(Quantizers, Sparse):
    """What reference.quantize and reference.sparse have, on CUDA tensors.

    Nothing is synchronised or copied through the host, and all may be captured in a CUDA graph, once a first call,
    outside of it, has compiled what it needs.
    """


class TorchKernels:
    """What CudaKernels has, in plain torch: the same bytes, but slowly, and the host waits for the GPU at times."""

    def __getattr__(self, function: str) -> Callable[..., None]:
        module = quantize if hasattr(quantize, function) else sparse
        implementation: Callable[..., None] = getattr(module, function)
        return implementation


def cuda_kernels() -> CudaKernels | TorchKernels | str:
    """Return the kernels or, where something that they need is missing, plain torch, and warn of what to install.

    Where torch cannot have CUDA tensors, return that, as a text.
    """
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    found = _cupy_launch(torch.version.cuda.split(".")[0])
    if isinstance(found, str):
        warnings.warn(f"codecs on CUDA tensors are slow, in plain torch: {found}", stacklevel=2)
        return TorchKernels()
    return CudaKernels(found)


def _cupy_launch(major: str) -> CupyLaunch | str:
    """Return what launches by CuPy or, in a line, why nothing can: no CuPy for CUDA `major`, no GPU for the kernels."""
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
