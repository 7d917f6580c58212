"""The kernels: `reference` in plain torch, `cpu` and `cuda` compiled. Each package is loaded when a process first needs it."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, cast

import torch

from gradwire.collectives.kernels.first_use import FIRST_USE


@cache
def cpu_kernels() -> ModuleType | str:
    """Return the module cpu.shared_memory, its kernels compiled or loaded from the disk, or a text why it cannot be used."""
    return _compiled("shared_memory")


@cache
def cpu_sockets() -> ModuleType | str:
    """Return the module cpu.tcp, its kernels and those of cpu.programs compiled or loaded from the disk, or a text why it cannot
    be used."""
    return _compiled("tcp", "programs")


def cpu_programs() -> ModuleType:
    """Return the module cpu.programs. cpu_sockets() must have returned a module."""
    return import_module("gradwire.collectives.kernels.cpu.programs")


def _compiled(*modules: str) -> ModuleType | str:
    """Import modules of the package cpu, and return the first of them."""
    if sys.platform != "linux":
        return "it needs Linux"
    try:
        with FIRST_USE.together("about 10 s"):
            first, *_ = [import_module(f"gradwire.collectives.kernels.cpu.{module}") for module in modules]
            return first
    except ImportError as error:
        return f"{error}: pip install numba"


@cache
def cpu_arithmetic(dtype: torch.dtype) -> Any:
    """Return the C function that reduces a dtype, compiled or loaded from the disk."""
    return import_module("gradwire.collectives.kernels.cpu.arithmetic").arithmetic(dtype)


@cache
def cpu_or_reference(module: str) -> ModuleType:
    """Return cpu.<module>, for tensors on the CPU; without Numba, reference.<module>, which does the same more slowly."""
    try:
        return _cpu(module)
    except ImportError:
        return import_module(f"gradwire.collectives.kernels.reference.{module}")


def _cpu(module: str) -> ModuleType:
    """Return cpu.<module>. Raises ImportError if kernels can be neither loaded from the disk nor compiled."""
    import_module("gradwire.collectives.kernels.cpu.context")  # which compiles or loads a small kernel
    return import_module(f"gradwire.collectives.kernels.cpu.{module}")


def cpu_cache() -> Path | None:
    """Return the folder in which compiled kernels are kept; None, with a warning, if no folder is writable."""
    from gradwire.collectives.kernels.cpu.object_files import kernel_folder

    return kernel_folder()


def kernels_for(device: torch.device, family: Literal["quantize", "sparse"] = "quantize") -> ModuleType:
    """Return a module, or an object like one, with the functions of reference.<family> for tensors on `device`.

    Raises ImportError, which names the package to install, if a package is missing.
    """
    return _kernels(device.type, family)


@cache
def _kernels(kind: str, family: str) -> ModuleType:
    if kind == "cpu":
        try:
            return _cpu(family)
        except ImportError as error:
            raise ImportError(f"codecs cannot encode tensors on cpu: {error}: pip install numba") from error
    if kind == "cuda":
        from gradwire.collectives.kernels.cuda import kernels as cuda

        kernels = cuda.cuda_kernels()
        if isinstance(kernels, str):
            raise ImportError(f"codecs cannot encode tensors on cuda: {kernels}")
        return cast(ModuleType, kernels)
    raise ValueError(f"codecs encode tensors on cpu and cuda, not on {kind}")
