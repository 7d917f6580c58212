"""The kernels for NVIDIA GPUs, or plain torch in place of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from gradwire.collectives.kernels.cuda.launch import CupyLaunch
from gradwire.collectives.kernels.cuda.matrices import MatrixKernels
from gradwire.collectives.kernels.cuda.quantize import Quantizers
from gradwire.collectives.kernels.cuda.sparse import SparseKernels
from gradwire.collectives.kernels.reference import matrices, quantize, sparse

_CAPABILITY = (8, 0)  # the lowest that has the instructions of the kernels


class CudaKernels(Quantizers, SparseKernels, MatrixKernels):
    """The functions of reference.quantize, reference.sparse and reference.matrices on CUDA tensors.

    They neither synchronise nor copy through the host. They can be captured in a CUDA graph after a first call outside the
    graph has compiled the kernels.
    """


class TorchKernels:
    """The functions of CudaKernels in plain torch. They write the same bytes more slowly. The host waits for none either."""

    def __getattr__(self, function: str) -> Callable[..., None]:
        module = next((module for module in (quantize, sparse) if hasattr(module, function)), matrices)
        implementation: Callable[..., None] = getattr(module, function)
        return implementation


def cuda_kernels(device: torch.device) -> CudaKernels | TorchKernels | str:
    """Return the kernels for a device. If they cannot be used, return TorchKernels, with a warning that gives the reason.

    If torch was built without CUDA, return that as text.
    """
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    found = _cupy_launch(torch.version.cuda.split(".")[0], device)
    if isinstance(found, str):
        warnings.warn(f"codecs on {device} are slow, in plain torch: {found}", stacklevel=2)
        return TorchKernels()
    return CudaKernels(found)


def _cupy_launch(major: str, device: torch.device) -> CupyLaunch | str:
    """Return a KernelLaunch by CuPy, or a line of text why there is none: no CuPy for CUDA `major`, or a GPU too old."""
    if (capability := torch.cuda.get_device_capability(device)) < _CAPABILITY:
        least, this = (".".join(map(str, version)) for version in (_CAPABILITY, capability))
        return f"the kernels need compute capability {least}, {device} has {this}"
    advice = f"pip install cupy-cuda{major}x"
    try:
        import cupy
    except ImportError as error:
        # If CuPy is installed but cannot be loaded, its message has a page, and the message of the cause one line.
        return f"{str(error.__cause__ or error).strip().splitlines()[0]}: {advice}"
    built_for = str(cupy.cuda.runtime.runtimeGetVersion() // 1000)
    if built_for != major:
        return f"CuPy was built for CUDA {built_for}, torch for CUDA {major}: {advice}, without the other CuPy"
    return CupyLaunch(cupy)
