"""Which compiled kernels do the work for tensors on a device."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType
from typing import Literal, cast

import torch


def kernels_for(device: torch.device, family: Literal["quantize", "sparse"] = "quantize") -> ModuleType:
    """Return what has the functions of kernels.reference.<family> for tensors on `device`: a module, or like one.

    Raises ImportError, which names the package to install, where there is none.
    """
    return _kernels(device.type, family)


@cache
def _kernels(kind: str, family: str) -> ModuleType:
    if kind == "cpu":
        try:
            return importlib.import_module(f"gradwire.collectives.kernels.cpu.{family}")
        except ImportError as error:
            raise ImportError(f"codecs cannot encode tensors on cpu: {error}: pip install numba") from error
    if kind == "cuda":
        from gradwire.collectives.kernels.cuda import kernels as cuda

        kernels = cuda.cuda_kernels()
        if isinstance(kernels, str):
            raise ImportError(f"codecs cannot encode tensors on cuda: {kernels}")
        return cast(ModuleType, kernels)
    raise ValueError(f"codecs encode tensors on cpu and cuda, not on {kind}")
